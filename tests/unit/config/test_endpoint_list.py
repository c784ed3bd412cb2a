"""Lists of endpoints: the format, and every way of getting it wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.config.endpoint_list import Listing, parse_endpoints_text
from fairlead.core.endpoint import Endpoint

EXAMPLES = Path(__file__).parents[3] / "examples"

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


def listing(*entries: Any) -> Listing:
    return parse_endpoints_text(json.dumps({"endpoints": entries}).encode())


def test_a_good_file() -> None:
    read = parse_endpoints_text(GOOD.encode())
    assert (read.problems, read.ok) == ((), True)
    labels = {"model-id": "llama-3-8b", "version": "1.10", "spot": "true"}
    assert read.endpoints == [
        Endpoint("default/vllm-0", "10.0.0.1:8000", labels),
        Endpoint("prod/vllm-1", "[fd00::1]:8000"),
        Endpoint("default/vllm-2", "[fd00::2]:8000"),
        Endpoint("default/vllm-3", "model-server.example:443", metrics_url="https://model-server.example:9400/m"),
        Endpoint("default/vllm-4", "10.0.0.4:1", {"metricsPort": "9100"}),
    ]
    assert [one.literal for one in read.entries] == [True, True, True, False, True]


def test_a_resolved_name() -> None:
    named = parse_endpoints_text(GOOD.encode()).entries[3]
    assert named.resolved("fd00::7").address == "[fd00::7]:443"
    assert named.resolved("10.0.0.7").scrape_url == "https://model-server.example:9400/m"
    plain = listing(entry(address="host")).entries[0]
    assert plain.resolved("10.0.0.7").scrape_url == "http://10.0.0.7:8000/metrics"


def test_json_with_tabs() -> None:
    read = parse_endpoints_text(b'{\n\t"endpoints": [\n\t\t{"name": "a",\t"address": "::1", "port": 1}\n\t]\n}\n')
    assert [one.address for one in read.endpoints] == ["[::1]:1"]


@pytest.mark.parametrize(
    ("changes", "path", "message"),
    [
        ({"port": 0}, ".port", "'0' is not a port (1 to 65535)"),
        ({"port": 65536}, ".port", "'65536' is not a port (1 to 65535)"),
        ({"port": -1}, ".port", "'-1' is not a port (1 to 65535)"),
        ({"port": "http"}, ".port", "'http' is not a port (1 to 65535)"),
        ({"port": "٣"}, ".port", "'٣' is not a port (1 to 65535)"),
        ({"port": 80.0}, ".port", "'80.0' is not a port (1 to 65535)"),
        ({"port": None}, "", "`port` is missing"),
        ({"port": [1]}, ".port", "expected a scalar"),
        ({"address": None}, "", "`address` is missing"),
        ({"address": ""}, ".address", "'' is neither an IP address nor a host name"),
        ({"address": "10.0.0.256"}, ".address", "'10.0.0.256' is neither an IP address nor a host name"),
        ({"address": "10.1"}, ".address", "'10.1' is neither an IP address nor a host name"),
        ({"address": "10.0.0.1:80"}, ".port", "the address has a port already"),
        ({"address": "[::1]:80"}, ".port", "the address has a port already"),
        ({"address": "10.0.0.1:x", "port": None}, ".address", "'x' is not a port (1 to 65535)"),
        ({"address": "10.0.0.1:", "port": None}, ".address", "'' is not a port (1 to 65535)"),
        ({"address": "10.0.0.1:８０", "port": None}, ".address", "'８０' is not a port (1 to 65535)"),
        ({"address": "[::1]80", "port": None}, ".address", "'[::1]80' is neither an IP address nor a host name"),
        ({"address": "[10.0.0.1"}, ".address", "'[10.0.0.1' is neither an IP address nor a host name"),
        ({"address": "[host]"}, ".address", "'[host]' is neither an IP address nor a host name"),
        ({"address": "http://h"}, ".address", "'http://h' is a URL"),
        ({"address": "a b"}, ".address", "'a b' is neither an IP address nor a host name"),
        ({"address": "a\r\nb"}, ".address", "'a\\r\\nb' is neither an IP address nor a host name"),
        ({"address": "x" * 64}, ".address", f"'{'x' * 64}' is neither an IP address nor a host name"),
        ({"address": "fe80::1%eth0"}, ".address", "an IPv6 zone cannot be dialled by the gateway"),
        ({"adress": "x"}, ".adress", "unknown field 'adress'"),
        ({"labels": ["a"]}, ".labels", "expected a mapping"),
        ({"labels": {"a": {"b": "c"}}}, ".labels.a", "expected a scalar"),
        ({"labels": dict.fromkeys(map(str, range(101)), "x")}, ".labels", "more than 100 labels"),
        ({"metricsUrl": "ftp://h"}, ".metricsUrl", "'ftp://h' is neither http nor https"),
        (
            {"metricsUrl": "http://a:b@h/"},
            ".metricsUrl",
            "the URL has a user or a password, which are not sent; a token can be (metrics.tokenFile)",
        ),
        (
            {"metricsUrl": "http://me:secret@h:99999/"},
            ".metricsUrl",
            "'http://me:***@h:99999/' is no URL: Port out of range 0-65535",
        ),
        ({"metricsUrl": "http://h:0/"}, ".metricsUrl", "'http://h:0/' has no usable host and port"),
        ({"metricsUrl": "http://:80/"}, ".metricsUrl", "'http://:80/' has no usable host and port"),
        ({"metricsUrl": "http://ü/"}, ".metricsUrl", "'http://ü/' has no usable host and port"),
        ({"metricsUrl": ["http://h"]}, ".metricsUrl", "expected a scalar"),
        ({"labels": {"metricsPort": "x"}}, ".labels.metricsPort", "'x' is not a port"),
        (
            {"labels": {"metricsAddress": "10.0.0.1:9"}},
            ".labels.metricsAddress",
            "'10.0.0.1:9' is neither an IP address nor a host name",
        ),
        ({"metrics_url": "file:///etc/passwd"}, ".metrics_url", "'file:///etc/passwd' is neither http nor https"),
    ],
)
def test_a_wrong_entry_costs_only_itself(changes: dict[str, Any], path: str, message: str) -> None:
    read = listing(entry(name="b"), entry(**changes))
    assert [one.id for one in read.endpoints] == ["default/b"]
    assert [(p.path, p.message, p.warning) for p in read.problems] == [(f"$.endpoints[1]{path}", message, False)]
    assert (read.broken, read.nameless, read.ok) == ({"default/a"}, False, True)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "-a", "a" * 254, ["a"], {"a": 1}, "ä"])
def test_an_entry_without_a_usable_name(name: Any) -> None:
    read = listing(entry(name=name), entry(name="b", port=2))
    assert [one.id for one in read.endpoints] == ["default/b"]
    assert (read.broken, read.nameless) == (frozenset(), True)


@pytest.mark.parametrize(
    ("short", "identity", "literal"),
    [
        ("10.0.0.1:8000", "10.0.0.1:8000", True),
        ("[fd00:0::1]:8000", "[fd00::1]:8000", True),
        ("localhost:8000", "localhost:8000", False),
        ("vllm-0.vllm.default.svc:8000", "vllm-0.vllm.default.svc:8000", False),
        ({"address": "10.0.0.1", "port": "8000"}, "10.0.0.1:8000", True),
        ({"address": "fd00::1", "port": 8000}, "[fd00::1]:8000", True),
        ({"address": "[fd00::1]", "port": 8000}, "[fd00::1]:8000", True),
        ({"address": "10.0.0.1:8000", "name": None, "port": None, "labels": None}, "10.0.0.1:8000", True),
    ],
)
def test_without_a_name_the_id_is_the_address(short: Any, identity: str, literal: bool) -> None:
    read = listing(short)
    assert (read.problems, read.nameless) == ((), False)
    assert [(one.endpoint.id, one.endpoint.address, one.literal) for one in read.entries] == [
        (identity, identity, literal)
    ]


def test_a_wrong_entry_without_a_name_is_nameless() -> None:
    read = listing("10.0.0.1:0", entry())
    assert ([one.id for one in read.endpoints], read.nameless) == (["default/a"], True)
    assert [problem.path for problem in read.problems] == ["$.endpoints[0]"]


def test_both_spellings_of_the_metrics_url() -> None:
    urls = [listing(entry(**{key: "http://h:1/m"})).endpoints[0].scrape_url for key in ("metricsUrl", "metrics_url")]
    assert urls == ["http://h:1/m", "http://h:1/m"]


@pytest.mark.parametrize("odd", [None, [], [entry()], ""])
def test_an_entry_that_is_no_entry(odd: Any) -> None:
    read = listing(odd, entry())
    assert (len(read.entries), read.nameless) == (1, True)
    assert read.problems[0].path == "$.endpoints[0]"


def test_an_address_has_one_id() -> None:
    read = listing(entry(), entry(name="b"), "10.0.0.1:8000", entry(name="c", port=1))
    assert [one.id for one in read.endpoints] == ["default/a", "default/c"]
    assert (read.broken, read.nameless) == ({"default/a", "default/b", "10.0.0.1:8000"}, False)
    assert [(p.path, p.message, p.warning) for p in read.problems] == [
        ("$.endpoints[1]", "10.0.0.1:8000 is the address of default/a already", False),
        ("$.endpoints[2]", "10.0.0.1:8000 is the address of default/a already", False),
    ]


def test_of_duplicates_the_first_is_there_and_any_may_be_meant() -> None:
    read = listing(entry(port=1), entry(name="b"), entry(port=2), entry(namespace="other", port=3))
    assert [(one.id, one.address) for one in read.endpoints] == [
        ("default/a", "10.0.0.1:1"),
        ("default/b", "10.0.0.1:8000"),
        ("other/a", "10.0.0.1:3"),
    ]
    assert (read.broken, read.nameless) == ({"default/a"}, True)
    assert [(p.path, p.message, p.hint, p.warning) for p in read.problems] == [
        (
            "$.endpoints[2]",
            "default/a is listed twice",
            "leave one out, or give each a name and an address of its own",
            False,
        )
    ]


def test_a_duplicate_whose_last_is_wrong_is_broken() -> None:
    read = listing(entry(port=1), entry(port=0))
    assert (read.entries, read.broken) == ((), {"default/a"})
    again = listing(entry(port=0), entry(port=1))
    assert (len(again.entries), again.broken) == (1, frozenset())


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 0, "expected a list of endpoints"),
        ("5", 1, "expected a list of endpoints"),
        ("{}", 1, "expected a list of endpoints"),
        ("endpoint: []", 1, "unknown field 'endpoint'"),
        ("endpoints:\n", 1, "there is nothing in it"),
        ("endpoints: {}", 1, "expected a list of endpoints"),
        ("\nendpoints: []\nmore: 1", 3, "unknown field 'more'"),
        ("endpoints:\n- name: a\n   port: 1\n", 3, "not valid YAML: mapping values are not allowed in this context"),
        ("endpoints: []\n---\nendpoints: []", 2, "a second document begins here"),
        ("endpoints: []\nendpoints: []", 2, "'endpoints' is given twice"),
        ("endpoints:\n- *x", 2, "alias *x stands for nothing that is complete before it"),
        ("endpoints: &x\n- *x", 2, "alias *x stands for nothing that is complete before it"),
        ("- 10.0.0.1:1\n" * 10_001, 10_001, "more than 10000 endpoints"),
    ],
)
def test_text_that_cannot_be_read(text: str, line: int, message: str) -> None:
    read = parse_endpoints_text(text.encode())
    assert (read.ok, read.entries) == (False, ())
    assert [(p.line, p.message) for p in read.problems] == [(line, message)]


def test_a_list_alone_is_fine() -> None:
    read = parse_endpoints_text(b"- 10.0.0.1:1\n- 10.0.0.1:x\n")
    assert ([one.id for one in read.endpoints], read.ok) == (["10.0.0.1:1"], True)
    assert [str(problem) for problem in read.problems] == ["line 2, $[1]: 'x' is not a port (1 to 65535)"]


def test_the_example_file() -> None:
    read = parse_endpoints_text((EXAMPLES / "endpoints.yaml").read_bytes())
    assert (read.ok, read.problems) == (True, ())
    assert [one.address for one in read.endpoints] == ["10.0.0.1:8000", "10.0.0.2:8000", "[fd00::3]:30000"]
    assert read.endpoints[2].scrape_url == "http://[fd00::3]:30001/metrics"


def test_an_empty_list_is_fine() -> None:
    assert parse_endpoints_text(b"endpoints: []") == Listing()


def test_problems_have_lines() -> None:
    text = "endpoints:\n- name: a\n  address: 10.0.0.1\n  port: 99999\n- name: b\n  address: 10.0.0.1\n"
    read = parse_endpoints_text(text.encode())
    assert [str(problem) for problem in read.problems] == [
        "line 4, $.endpoints[0].port: '99999' is not a port (1 to 65535)",
        "line 5, $.endpoints[1]: `port` is missing (write it behind the address: 10.0.0.1:8000)",
    ]


def test_entries_may_share_by_aliases_and_merges() -> None:
    text = b"- &a {name: a, address: 10.0.0.1, port: 1, labels: {x: 1.10}}\n- {<<: *a, name: b, port: 2}\n"
    read = parse_endpoints_text(text)
    assert [(one.id, one.address, one.labels) for one in read.endpoints] == [
        ("default/a", "10.0.0.1:1", {"x": "1.10"}),
        ("default/b", "10.0.0.1:2", {"x": "1.10"}),
    ]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
keys = st.sampled_from(["name", "namespace", "address", "port", "labels", "metrics_url", "metricsUrl", "other"])
words = st.sampled_from(
    ["10.0.0.1", "::1", "[::1]", "h", "h:1", "10.0.0.1:80", "[::1]:80", "80", "a", "http://h/", ":"]
)


@given(st.lists(st.dictionaries(keys, values | words) | values | words, max_size=4))
@settings(max_examples=200, deadline=None)
def test_any_values(entries: list[Any]) -> None:
    read = listing(*entries)
    assert read.ok
    assert len({one.id for one in read.endpoints}) == len(read.entries)
    assert len(read.entries) + len([p for p in read.problems if not p.warning]) <= len(entries)


@given(st.binary(max_size=120) | st.text(alphabet="endpoits:-[]{}&*!|>'\"\n a1,#%@`~", max_size=120).map(str.encode))
@settings(max_examples=300, deadline=None)
def test_any_bytes(text: bytes) -> None:
    read = parse_endpoints_text(text)
    assert read.ok or len(read.problems) == 1
