"""Lists of endpoints: the format, and every way of getting it wrong."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.model.endpoint import Endpoint
from fairlead.wire.endpoint_list import MAX_BYTES, Listing, parse_endpoints, parse_endpoints_text
from fairlead.wire.plain_yaml import parse_plain

GOOD = """\
endpoints:
- name: vllm-0
  address: "10.0.0.1"
  port: "8000"
  labels: {model-id: llama-3-8b, version: 1.10, spot: true}
- name: vllm-1
  namespace: prod
  address: fd00::1
  port: 8000
- {name: vllm-2, address: "[fd00::2]", port: 8000}
- name: vllm-3
  address: model-server.example
  port: 443
  labels:
  metrics_url: https://model-server.example:9400/m
- name: vllm-4
  address: 10.0.0.4
  port: 1
  labels: {metricsPort: 9100}
"""


def entry(**changes: Any) -> dict[str, Any]:
    return {"name": "a", "address": "10.0.0.1", "port": 8000, **changes}


def listing(*entries: dict[str, Any]) -> Listing:
    """Through both doors, which must agree."""
    plain = parse_endpoints(entries)
    text = parse_endpoints_text(json.dumps({"endpoints": entries}).encode())
    assert plain.entries == text.entries
    assert [p.message for p in plain.problems] == [p.message for p in text.problems]
    assert (plain.broken, plain.nameless, plain.ok) == (text.broken, text.nameless, text.ok)
    return plain


def test_a_good_file() -> None:
    read = parse_endpoints_text(GOOD.encode())
    assert (read.problems, read.ok) == ((), True)
    labels = {"model-id": "llama-3-8b", "version": "1.10", "spot": "true"}
    assert read.endpoints == [
        Endpoint("default/vllm-0", "10.0.0.1:8000", labels),
        Endpoint("prod/vllm-1", "[fd00::1]:8000"),
        Endpoint("default/vllm-2", "[fd00::2]:8000"),
        Endpoint("default/vllm-3", "model-server.example:443", metrics_url="https://model-server.example:9400/m"),
        Endpoint("default/vllm-4", "10.0.0.4:1", {"metricsPort": "9100"}, "http://10.0.0.4:9100/metrics"),
    ]
    assert [one.literal for one in read.entries] == [True, True, True, False, True]


def test_a_resolved_name() -> None:
    named = parse_endpoints_text(GOOD.encode()).entries[3]
    assert named.at("fd00::7").address == "[fd00::7]:443"
    assert named.at("10.0.0.7").scrape_url == "https://model-server.example:9400/m"
    plain = listing(entry(address="host")).entries[0]
    assert plain.at("10.0.0.7").scrape_url == "http://10.0.0.7:8000/metrics"


def test_json_with_tabs() -> None:
    read = parse_endpoints_text(b'{\n\t"endpoints": [\n\t\t{"name": "a",\t"address": "::1", "port": 1}\n\t]\n}\n')
    assert [one.address for one in read.endpoints] == ["[::1]:1"]


@pytest.mark.parametrize(
    ("changes", "path", "message"),
    [
        ({"port": 0}, ".port", "'0' is no port (1 to 65535)"),
        ({"port": 65536}, ".port", "'65536' is no port (1 to 65535)"),
        ({"port": -1}, ".port", "'-1' is no port (1 to 65535)"),
        ({"port": "http"}, ".port", "'http' is no port (1 to 65535)"),
        ({"port": "٣"}, ".port", "'٣' is no port (1 to 65535)"),
        ({"port": 80.0}, ".port", "'80.0' is no port (1 to 65535)"),
        ({"port": None}, "", "`port` is missing"),
        ({"port": [1]}, ".port", "expected a scalar"),
        ({"address": None}, "", "`address` is missing"),
        ({"address": ""}, ".address", "'' is neither an IP address nor a host name"),
        ({"address": "10.0.0.256"}, ".address", "'10.0.0.256' is neither an IP address nor a host name"),
        ({"address": "10.1"}, ".address", "'10.1' is neither an IP address nor a host name"),
        ({"address": "10.0.0.1:80"}, ".address", "'10.0.0.1:80' is neither an IP address nor a host name"),
        ({"address": "[host]"}, ".address", "'[host]' is neither an IP address nor a host name"),
        ({"address": "http://h"}, ".address", "'http://h' is neither an IP address nor a host name"),
        ({"address": "a b"}, ".address", "'a b' is neither an IP address nor a host name"),
        ({"address": "a\r\nb"}, ".address", "'a\\r\\nb' is neither an IP address nor a host name"),
        ({"address": "x" * 64}, ".address", f"'{'x' * 64}' is neither an IP address nor a host name"),
        ({"address": "fe80::1%eth0"}, ".address", "an IPv6 zone cannot be dialled by the gateway"),
        ({"adress": "x"}, "", "unknown key 'adress'"),
        ({"labels": ["a"]}, ".labels", "expected a mapping"),
        ({"labels": {"a": {"b": "c"}}}, ".labels.a", "expected a scalar"),
        ({"labels": {"metricsPort": "x"}}, ".labels.metricsPort", "'x' is no port"),
        ({"metrics_url": "file:///etc/passwd"}, ".metrics_url", "'file:///etc/passwd' is neither http nor https"),
    ],
)
def test_a_wrong_entry_costs_only_itself(changes: dict[str, Any], path: str, message: str) -> None:
    read = listing(entry(name="b"), entry(**changes))
    assert [one.id for one in read.endpoints] == ["default/b"]
    assert [(p.path, p.message, p.warning) for p in read.problems] == [(f"$.endpoints[1]{path}", message, False)]
    assert (read.broken, read.nameless, read.ok) == ({"default/a"}, False, True)


@pytest.mark.parametrize("name", [None, "", "a/b", "a b", "-a", "a" * 254, ["a"], {"a": 1}, "ä"])
def test_an_entry_without_a_usable_name(name: Any) -> None:
    read = parse_endpoints([entry(name=name), entry(name="b")])
    assert [one.id for one in read.endpoints] == ["default/b"]
    assert (read.broken, read.nameless) == (frozenset(), True)


def test_an_entry_that_is_no_mapping() -> None:
    read = parse_endpoints(["a", entry()])
    assert (len(read.entries), read.nameless) == (1, True)
    assert str(read.problems[0]) == "$.endpoints[0]: expected a mapping with name, address and port"


def test_of_duplicates_the_last_wins() -> None:
    read = listing(entry(port=1), entry(name="b"), entry(port=2), entry(namespace="other", port=3))
    assert [(one.id, one.address) for one in read.endpoints] == [
        ("default/b", "10.0.0.1:8000"),
        ("default/a", "10.0.0.1:2"),
        ("other/a", "10.0.0.1:3"),
    ]
    assert [(p.path, p.message, p.warning) for p in read.problems] == [
        ("$.endpoints[2]", "default/a is listed twice, the last counts", True)
    ]


def test_a_duplicate_whose_last_is_wrong_is_broken() -> None:
    read = listing(entry(port=1), entry(port=0))
    assert (read.entries, read.broken) == ((), {"default/a"})
    again = listing(entry(port=0), entry(port=1))
    assert (len(again.entries), again.broken) == (1, frozenset())


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "expected a mapping with the key `endpoints`"),
        ("[]", 1, "expected a mapping with the key `endpoints`"),
        ("endpoint: []", 1, "expected a mapping with the key `endpoints`"),
        ("endpoints:\n", 1, "`endpoints` has no value; write [] for an empty list"),
        ("endpoints: {}", 1, "expected a list"),
        ("\nendpoints: []\nmore: 1", 3, "unknown key 'more'"),
        ("endpoints:\n- name: a\n   port: 1\n", 3, "mapping values are not allowed in this context"),
        ("endpoints: []\n---\nendpoints: []", 2, "more than one document"),
        ("endpoints: []\nendpoints: []", 2, "the key 'endpoints' stands twice in one mapping"),
        ("endpoints:\n- *x", 2, "the alias *x refers to nothing before it"),
        ("endpoints: &x\n- *x", 2, "the alias *x refers to nothing before it"),
        ("[" * 100_000, 1, "nested deeper than 16"),
        ("x" * (MAX_BYTES + 1), 0, f"larger than {MAX_BYTES} bytes"),
    ],
)
def test_text_that_cannot_be_read(text: str, line: int, message: str) -> None:
    read = parse_endpoints_text(text.encode())
    assert (read.ok, read.entries) == (False, ())
    assert [(p.line, p.message) for p in read.problems] == [(line, message)]


def test_an_empty_list_is_fine() -> None:
    assert parse_endpoints_text(b"endpoints: []") == Listing()


def test_problems_have_lines() -> None:
    text = "endpoints:\n- name: a\n  address: 10.0.0.1\n  port: 99999\n- name: b\n  address: 10.0.0.1\n"
    read = parse_endpoints_text(text.encode())
    assert [str(problem) for problem in read.problems] == [
        "line 4, $.endpoints[0].port: '99999' is no port (1 to 65535)",
        "line 5, $.endpoints[1]: `port` is missing",
    ]


def test_nested_aliases_stay_small() -> None:
    lines = ["a0: &a0 {x: y}"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 14)]
    tree = parse_plain("\n".join([*lines, "endpoints: [*a13]"]).encode())
    assert isinstance(tree.value, dict)
    read = parse_endpoints_text(b"endpoints:\n- &a {name: a, address: 10.0.0.1, port: 1}\n- *a\n")
    assert len(read.entries) == 1


def test_too_many_endpoints() -> None:
    read = parse_endpoints([entry(name=f"e{i}") for i in range(10_001)])
    assert (read.ok, read.problems[0].message) == (False, "more than 10000 endpoints")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
keys = st.sampled_from(["name", "namespace", "address", "port", "labels", "metrics_url", "other"])


@given(st.lists(st.dictionaries(keys, values) | values, max_size=4))
@settings(max_examples=200, deadline=None)
def test_any_values(entries: list[Any]) -> None:
    read = parse_endpoints(entries)
    assert read.ok
    assert len(read.entries) + len([p for p in read.problems if not p.warning]) <= len(entries)


@given(st.binary(max_size=120) | st.text(alphabet="endpoits:-[]{}&*!|>'\"\n a1,#%@`~", max_size=120).map(str.encode))
@settings(max_examples=300, deadline=None)
def test_any_bytes(text: bytes) -> None:
    read = parse_endpoints_text(text)
    assert read.ok or len(read.problems) == 1
