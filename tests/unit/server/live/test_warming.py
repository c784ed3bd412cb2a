"""The beginnings that prompts share, by the models that they are for."""

import json

import pytest

from fairlead.core.beginnings import Beginnings
from fairlead.core.models import Catalogue, InferenceModel, ModelSet, Origin
from fairlead.core.prefix import ChainHasher
from fairlead.core.tokens import TokenEstimator
from fairlead.server.live.warming import Noticing

SYSTEM = {"role": "system", "content": "be brief " * 1000}


@pytest.mark.parametrize("defined", [False, True])
def test_each_model_has_beginnings_of_its_own(defined: bool) -> None:
    beginnings = Beginnings(shared=4)
    understanding = Noticing(beginnings, TokenEstimator(), ChainHasher(), lambda: 5.0)
    if defined:
        models = [InferenceModel(origin=Origin(namespace="x", name=name), model=name) for name in ("red", "blue")]
        understanding.define(Catalogue(ModelSet(models=tuple(models))))
    head = understanding.head({":path": "/v1/chat/completions"})
    for number in range(8):
        for model in ("red", "blue"):
            asked = {"role": "user", "content": f"question {number}"}
            understanding.request(head, json.dumps({"model": model, "messages": [SYSTEM, asked]}).encode())
    assert {json.loads(kept.body)["model"] for kept in beginnings.hottest()} == {"red", "blue"}
