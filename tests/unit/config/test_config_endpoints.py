"""Endpoint entries in all their forms, and endpoints files."""

from pathlib import Path

import pytest

from fairlead.config.endpoints import read_file_text
from fairlead.config.load import load

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(
    ("entry", "identity", "address"),
    [
        ("10.0.0.1:8000", "10.0.0.1:8000", "10.0.0.1:8000"),
        ("'[fd00::1]:8000'", "[fd00::1]:8000", "[fd00::1]:8000"),
        ("{address: '10.0.0.1:8000', name: a}", "default/a", "10.0.0.1:8000"),
        ("{address: 10.0.0.1, port: '8000', name: a, namespace: n}", "n/a", "10.0.0.1:8000"),
        ("{address: 10.0.0.1, port: 8000}", "10.0.0.1:8000", "10.0.0.1:8000"),
        ("{address: 'fd00:0::1', port: 8000}", "[fd00::1]:8000", "[fd00::1]:8000"),
        ("{address: '[fd00::1]', port: 8000}", "[fd00::1]:8000", "[fd00::1]:8000"),
    ],
)
def test_forms_of_an_entry(entry: str, identity: str, address: str) -> None:
    (endpoint,), problems = read_file_text(f"endpoints: [{entry}]")
    assert problems == []
    assert (endpoint.id, endpoint.address) == (identity, address)


@pytest.mark.parametrize(
    ("entry", "path", "message", "hint"),
    [
        ("localhost:8000", "$[0]", "expected an IP address", "write 127.0.0.1:8000"),
        ("vllm-0.svc:8000", "$[0]", "expected an IP address", "not resolved"),
        ("'http://10.0.0.1:8000'", "$[0]", "expected an IP address", "leave out the scheme"),
        ("'[10.0.0.1'", "$[0]", "expected an IP address", ""),
        ("10.0.0.256:80", "$[0]", "expected an IP address", ""),
        ("10.0.0.1", "$[0]", "expected a port", ""),
        ("'10.0.0.1:'", "$[0]", "expected a port", ""),
        ("10.0.0.1:0", "$[0]", "expected a port", ""),
        ("10.0.0.1:65536", "$[0]", "expected a port", ""),
        ("'10.0.0.1:８０'", "$[0]", "expected a port", ""),
        ("{address: 10.0.0.1, port: 0x1ffffffffffffffff}", "$[0].port", "expected a port", ""),
        ("{address: 10.0.0.1, port: http}", "$[0].port", "expected a port", ""),
        ("{address: '10.0.0.1:80', port: 80}", "$[0].port", "has a port already", ""),
        ("{adress: 10.0.0.1, address: '10.0.0.1:80'}", "$[0].adress", "unknown field", "'address'"),
        ("{name: x}", "$[0]", "'address' is missing", ""),
        ("{address: '10.0.0.1:80', labels: {v: 1}}", "$[0].labels.v", "expected a string, got 1", ""),
        ("{address: '10.0.0.1:80', labels: {a.b/c: 1}}", '$[0].labels["a.b/c"]', "expected a string", ""),
        ("{address: '10.0.0.1:80', metricsUrl: 'ftp://x'}", "$[0].metricsUrl", "http or https", ""),
        ("{address: '10.0.0.1:80', name: ''}", "$[0].name", "length >= 1", ""),
        ("5", "$[0]", "expected a mapping, got 5", ""),
    ],
)
def test_bad_entries_are_reported_and_the_others_kept(entry: str, path: str, message: str, hint: str) -> None:
    endpoints, (problem,) = read_file_text(f"- {entry}\n- 10.9.9.9:1\n")
    assert [endpoint.address for endpoint in endpoints] == ["10.9.9.9:1"]
    assert (problem.path, problem.line) == (path, 1)
    assert message in problem.message
    assert hint in problem.hint


def test_ids_and_addresses_are_unique() -> None:
    text = "- {name: a, address: '10.0.0.1:1'}\n- {name: a, address: '10.0.0.1:2'}\n- {name: b, address: '10.0.0.1:1'}"
    endpoints, problems = read_file_text(text)
    assert [endpoint.id for endpoint in endpoints] == ["default/a"]
    assert [(p.line, p.message) for p in problems] == [
        (2, "endpoint 'default/a' is there already, as number 1"),
        (3, "address 10.0.0.1:1 is there already, as number 1"),
    ]


@pytest.mark.parametrize("text", ["", "endpoints:", "endpoints: {}", "5", "endpoint: []", "a: ["])
def test_a_file_without_a_list_is_a_problem(text: str) -> None:
    endpoints, problems = read_file_text(text)
    assert endpoints == []
    assert problems


def test_an_empty_list_is_an_empty_pool() -> None:
    assert read_file_text("endpoints: []") == ([], [])


def test_the_example_file() -> None:
    endpoints, problems = read_file_text((EXAMPLES / "endpoints.yaml").read_bytes())
    assert problems == []
    assert [e.address for e in endpoints] == ["10.0.0.1:8000", "10.0.0.2:8000", "[fd00::3]:30000"]
    assert endpoints[2].scrape_url == "http://[fd00::3]:30001/metrics"


def test_file_source_is_relative_to_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "fairlead.yaml"
    file.write_text("endpoints: {file: pool/e.yaml, watch: false}")
    source = load(file).endpoints
    assert (source.file, source.watch, source.static) == (str(tmp_path / "pool/e.yaml"), False, ())
    file.write_text("endpoints: {file: /abs/e.yaml}")
    assert load(file).endpoints.file == "/abs/e.yaml"
    assert load("endpoints: {file: e.yaml}").endpoints.file == "e.yaml"
