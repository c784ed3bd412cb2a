"""The list of models."""

import json
from collections.abc import Mapping
from math import inf
from types import ModuleType
from typing import Any

import pytest
from msgspec import Raw

from fairlead.core.models import Catalogue, InferenceModel, ModelCard, ModelRules, ModelSet, Origin, Target
from fairlead.gateway.answers import Served, models_page, no_names


def defined(*names: str, rules: ModelRules = ModelRules()) -> Catalogue:  # noqa: B008 frozen
    origins = [Origin(namespace="n", name=f"o{i}", created=float(i)) for i in range(len(names))]
    models = [
        InferenceModel(origin=o, model=n, targets=(Target("secret"),)) for o, n in zip(origins, names, strict=True)
    ]
    return Catalogue(ModelSet(tuple(models)), rules)


def ask(
    pb: ModuleType, catalogue: Catalogue, path: str, method: str = "GET", served: Served = no_names
) -> tuple[int, Any] | None:
    message = models_page(catalogue, {":method": method, ":path": path}, served)
    if message is None:
        return None
    answer = pb.ProcessingResponse.FromString(message).immediate_response
    (kind,) = [h.header.raw_value for h in answer.headers.set_headers if h.header.key == "content-type"]
    assert kind == b"application/json"
    assert b"secret" not in answer.body
    return answer.status.code, json.loads(answer.body)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/", "/v1/models?limit=3", "/openai/v1/models"])
def test_the_list(pb: ModuleType, path: str) -> None:
    listed = [{"id": n, "object": "model", "created": i, "owned_by": "fairlead"} for n, i in (("a/b", 1), ("é", 0))]
    assert ask(pb, defined("é", "a/b"), path) == (200, {"object": "list", "data": listed})


def test_one_model(pb: ModuleType) -> None:
    for path, name in (
        ("/v1/models/a%2Fb", "a/b"),
        ("/v1/models/a/b", "a/b"),
        ("/v1/models/%C3%A9?x=1", "é"),
        ("/openai/v1/models/a/b", "a/b"),
    ):
        found = ask(pb, defined("é", "a/b"), path)
        assert found is not None
        assert (found[0], found[1]["id"]) == (200, name)


def test_an_unknown_model(pb: ModuleType) -> None:
    found = ask(pb, defined("a"), "/v1/models/nope")
    assert found is not None
    assert (found[0], found[1]["error"]["code"]) == (404, "model_not_found")
    assert ask(pb, defined("a", rules=ModelRules(reject_unmatched=False)), "/v1/models/nope") is None


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/models"), ("GET", "/v1/chat/completions"), ("HEAD", "/v1/models")]
)
def test_other_requests(pb: ModuleType, method: str, path: str) -> None:
    assert ask(pb, defined("a"), path, method) is None


def test_reserved_models_do_not_exist(pb: ModuleType) -> None:
    reserved = InferenceModel(origin=Origin(namespace="n", name="o"), model="r", targets=(Target("x", weight=0),))
    catalogue = Catalogue(ModelSet((reserved,)))
    assert ask(pb, catalogue, "/v1/models") == (200, {"object": "list", "data": []})
    found = ask(pb, catalogue, "/openai/v1/models/r")
    assert found is not None and found[0] == 404


def test_nothing_defined(pb: ModuleType) -> None:
    assert ask(pb, Catalogue(), "/v1/models") is None


def card(name: str, context: int) -> ModelCard:
    return ModelCard(Raw(b'{"id":"%b","max_model_len":%d}' % (name.encode(), context)), float(context))


SAID = {name: card(name, 512) for name in ("base", "adapter")}


def unlike(alike: bool) -> Mapping[str, ModelCard]:
    return SAID


def same(alike: bool) -> Mapping[str, ModelCard]:
    return SAID if alike else {}


PASS = ModelRules(reject_unmatched=False)


@pytest.mark.parametrize(
    ("catalogue", "served", "names"),
    [
        (Catalogue(), unlike, ["adapter", "base"]),
        (Catalogue(), same, None),
        (defined("a"), unlike, ["a"]),
        (defined("a", rules=PASS), unlike, ["a", "adapter", "base"]),
        (defined("a", rules=PASS), same, ["a", "adapter", "base"]),
        (defined("a", "base", rules=PASS), no_names, ["a", "base"]),
    ],
)
def test_what_endpoints_serve(pb: ModuleType, catalogue: Catalogue, served: Served, names: list[str] | None) -> None:
    found = ask(pb, catalogue, "/v1/models", served=served)
    assert (found and [model["id"] for model in found[1]["data"]]) == names
    for name in names or ():
        found = ask(pb, catalogue, f"/v1/models/{name}", served=served)
        assert found is not None
        assert (found[0], found[1]["id"]) == (200, name)
        assert found[1].get("max_model_len") == (512 if name in served(True) else None), "as its server says it"


@pytest.mark.parametrize("rules", [ModelRules(), PASS])
@pytest.mark.parametrize(
    ("targets", "context"),
    [
        ({"long": 1}, 4096),
        ({"long": 9, "short": 1}, 512),
        ({"long": 1, "short": 0}, 4096),
        ({"long": 1, "silent": 1}, 4096),
        ({"long": 1, "down": 1}, 4096),
        ({"silent": 1}, None),
        ({"down": 1}, None),
    ],
)
def test_a_defined_name_has_the_shortest_context_of_its_targets(
    pb: ModuleType, targets: dict[str, int], context: int | None, rules: ModelRules
) -> None:
    served = {"long": card("long", 4096), "short": card("short", 512), "silent": ModelCard(Raw(b"{}"), inf)}
    split = tuple(Target(name, weight) for name, weight in targets.items())
    model = InferenceModel(origin=Origin(namespace="n", name="o"), model="chat", targets=split)
    for path in ("/v1/models", "/v1/models/chat"):
        found = ask(pb, Catalogue(ModelSet((model,)), rules), path, served=lambda alike: served if alike else {})
        assert found is not None
        (entry,) = [one for one in found[1].get("data", [found[1]]) if one.get("id") == "chat"]
        assert entry.get("max_model_len") == context


def test_an_unknown_model_of_a_mixed_pool_is_the_servers_to_refuse(pb: ModuleType) -> None:
    assert ask(pb, Catalogue(), "/v1/models/nope", served=unlike) is None


def test_a_reserved_model_is_hidden_where_undefined_names_pass_too(pb: ModuleType) -> None:
    reserved = InferenceModel(origin=Origin(namespace="n", name="o"), model="base", targets=(Target("x", weight=0),))
    catalogue = Catalogue(ModelSet((reserved,)), PASS)
    found = ask(pb, catalogue, "/v1/models", served=same)
    assert found is not None and [model["id"] for model in found[1]["data"]] == ["adapter"]
    found = ask(pb, catalogue, "/v1/models/base", served=same)
    assert found is not None and found[0] == 404
    assert ask(pb, catalogue, "/v1/models/another", served=same) is None, "some model server may know it"
