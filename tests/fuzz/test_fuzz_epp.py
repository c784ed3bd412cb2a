"""Whatever stands in a configuration of the reference picker, it is read or refused, never a crash."""

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairlead.compat.catalogue import CATALOGUE
from fairlead.compat.load import load, problems
from fairlead.compat.locate import document_fields
from fairlead.config.check import fields
from fairlead.config.plugins import build_policy
from fairlead.config.problems import InvalidConfig
from fairlead.core.errors import PluginError

NAMES = sorted(CATALOGUE)
#: Words that mean something somewhere.
WORDS = st.sampled_from(
    [*NAMES, *document_fields(), "pluginRef", "name", "type", "parameters", "weight", "plugins", "", "x", "5s"]
)
SCALARS = st.none() | st.booleans() | st.integers(-5, 1 << 40) | st.floats(allow_nan=False) | WORDS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4), max_leaves=12
)
#: Parameters with a right name and any value, so that values are reached.
PARAMETERS = {
    name: st.fixed_dictionaries({}, optional=dict.fromkeys(fields(entry.params), VALUES))
    for name, entry in CATALOGUE.items()
}
PLUGINS = st.sampled_from(NAMES).flatmap(
    lambda type: st.fixed_dictionaries(
        {"type": st.just(type)}, optional={"parameters": PARAMETERS[type], "name": WORDS}
    )
)
REFS = st.fixed_dictionaries({"pluginRef": WORDS}, optional={"weight": VALUES})
PROFILES = st.fixed_dictionaries({"name": WORDS, "plugins": st.lists(REFS, max_size=4)})
DOCUMENTS = st.fixed_dictionaries(
    {"apiVersion": st.just("llm-d.ai/v1alpha1"), "kind": st.just("EndpointPickerConfig")},
    optional={
        "plugins": st.lists(PLUGINS, max_size=6) | VALUES,
        "schedulingProfiles": st.lists(PROFILES, max_size=3) | VALUES,
        "featureGates": VALUES,
        "dataLayer": st.dictionaries(st.sampled_from(["sources", "discovery", "peerDiscovery"]), VALUES) | VALUES,
        "flowControl": VALUES,
        "requestHandler": VALUES,
        "saturationDetector": VALUES,
        "parser": VALUES,
    },
)
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=150, deadline=None, suppress_health_check=QUIET)
@given(DOCUMENTS)
def test_documents(document: object) -> None:
    check(msgspec.json.encode(document).decode())


@settings(max_examples=60, deadline=None, suppress_health_check=QUIET)
@given(st.dictionaries(st.sampled_from(["router", "inferenceExtension"]), VALUES), DOCUMENTS, st.booleans())
def test_values_with_a_document_inside(values: dict[str, object], document: object, inside: bool) -> None:
    if inside:
        values["router"] = {"epp": {"pluginsCustomConfig": {"a.yaml": msgspec.json.encode(document).decode()}}}
    check(msgspec.json.encode(values).decode())


def check(text: str) -> None:
    found = problems(text, need_endpoints=False)
    assert all(problem.message and problem.path.startswith("$") for problem in found)
    if found:
        with pytest.raises((InvalidConfig, PluginError)):
            load(text, need_endpoints=False)
    else:
        build_policy(load(text, need_endpoints=False))
