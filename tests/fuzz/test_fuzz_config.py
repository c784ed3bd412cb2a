"""Whatever stands in a file: it loads, or it is a ConfigError."""

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.compat.load import FIELDS, load, problems
from fairlead.config.plugins import build_hasher, build_policy
from fairlead.config.registry import ALIASES, BUILTINS
from fairlead.config.schema import SECTIONS
from fairlead.core.errors import ConfigError

PLUGINS = sorted({name for table in (*BUILTINS.values(), *ALIASES.values()) for name in table})
WORDS = [
    *FIELDS, *PLUGINS, "type", "name", "weight", "parameters", "params", "config", "topK", "picker", "k", "mode",
    "pluginsCustomConfig", "maxQueueLength", "hashBlockSize", "checkInterval", "nearTie", "matchLabels", "address",
    "port", "labels", "file", "interval", "engines", "vllm", "waiting", "extra", "tls", "certDir", "host", "5s",
    "64MiB", "10.0.0.1:8000", "embedded", "none", "round-robin", "<<", "a{b=c}",
]  # fmt: skip
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(WORDS), st.text(max_size=20),
    st.integers(min_value=10**19, max_value=10**30),
)  # fmt: skip
keys = st.one_of(st.sampled_from(WORDS), st.text(max_size=8))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=5)),
    max_leaves=25,
)
plugins = st.lists(
    st.one_of(
        values,
        st.fixed_dictionaries(
            {"type": st.sampled_from(PLUGINS)},
            optional={"weight": scalars, "name": scalars, "parameters": values, "k": scalars},
        ),
    ),
    max_size=4,
)
documents = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys((*SECTIONS, "endpoints", "seed", "policy", "inferenceExtension", "builtinFilters"), values),
        "filters": plugins,
        "scorers": plugins,
        "selection": st.one_of(values, st.fixed_dictionaries({"picker": st.sampled_from(PLUGINS)})),
        "surprise": values,
    },
)


def attempt(text: str) -> None:
    found = problems(text)
    for problem in found:
        assert problem.path.startswith("$")
        assert problem.line <= max(len(text.splitlines()), 1)
        assert "\n" not in problem.render("f.yaml")
    if found:
        with pytest.raises(ConfigError) as caught:
            load(text)
        assert len(str(caught.value).splitlines()) == len(found)
    else:
        config = load(text)
        build_policy(config)
        build_hasher(config)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(documents)
def test_structures(document: object) -> None:
    attempt(yaml.dump(document, allow_unicode=True))


@settings(max_examples=60, deadline=None)
@given(values)
def test_any_root_as_json(document: object) -> None:
    attempt(json.dumps(document))


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab:-[]{},&*!|>'\"%#?<~=01.\n\t \x00é\ud800"), max_size=60))
def test_texts_made_of_yaml_syntax(text: str) -> None:
    attempt(text)


@settings(max_examples=80, deadline=None)
@given(values)
def test_endpoint_lists(node: object) -> None:
    attempt(yaml.dump({"endpoints": node}, allow_unicode=True))
