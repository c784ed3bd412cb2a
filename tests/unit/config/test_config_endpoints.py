"""`endpoints:` of a configuration. The forms of an entry are tested with `config.endpoint_list`."""

from pathlib import Path

import pytest

from fairlead.compat.load import examine, load, problems
from fairlead.core.endpoint import Endpoint


def test_a_list_in_all_forms() -> None:
    config = load("""
endpoints:
- 10.0.0.1:8000
- model-server.example:8000
- '[fd00:0::1]:8000'
- {name: a, address: '10.0.0.2:8000', labels: {version: 1.10, spot: yes}, metricsUrl: 'http://10.0.0.2:9400/metrics'}
- {name: a, namespace: n, address: fd00::2, port: '8000'}
- &e {name: b, address: 10.0.0.3, port: 8000}
- {<<: *e, name: c, port: 8001}
""")
    assert [listed.endpoint for listed in config.endpoints.static] == [
        Endpoint("10.0.0.1:8000", "10.0.0.1:8000"),
        Endpoint("model-server.example:8000", "model-server.example:8000"),
        Endpoint("[fd00::1]:8000", "[fd00::1]:8000"),
        Endpoint("default/a", "10.0.0.2:8000", {"version": "1.10", "spot": "yes"}, "http://10.0.0.2:9400/metrics"),
        Endpoint("n/a", "[fd00::2]:8000"),
        Endpoint("default/b", "10.0.0.3:8000"),
        Endpoint("default/c", "10.0.0.3:8001"),
    ]
    assert [listed.literal for listed in config.endpoints.static] == [True, False, True, True, True, True, True]


TWO = (
    "endpoints:\n- {address: '127.0.0.1:1', labels: {model-id: a}}\n- {address: '127.0.0.1:2', labels: {model-id: b}}\n"
)
FAR = "endpoints: ['10.0.0.1:8000', '10.0.0.2:8000']\n"
ROLES = "endpoints:\n- {address: '127.0.0.1:1'}\n- {address: '127.0.0.1:2', labels: {llm-d.ai/role: prefill}}\n"
NEAR = "endpoints: ['127.0.0.1:8000', 'localhost:8000']\n"


@pytest.mark.parametrize(
    ("text", "noted"),
    [
        (NEAR, []),
        (FAR + "gateway: {host: 0.0.0.0}", []),
        (FAR + "gateway: {host: '::'}", []),
        (FAR + "gateway: none", []),
        (FAR, ["listens on 127.0.0.1, where only this machine reaches it; gateway.host: '::' opens"]),
        (TWO, ["without the scheduler, requests go to any endpoint, and endpoints serve 2 models"]),
        (TWO.replace("b}", "a}"), []),
        (TWO + "gateway: {failOpen: true}", []),
        (TWO + "gateway: {failOpen: false}", []),
        (TWO + "gateway: none", []),
        (TWO + "gateway: none\nautoscaling: {port: 9100}", ["the desired number is of all endpoints, which serve 2"]),
        (NEAR + "scorers: [{type: queue}]\nselection: {topK: 2}", ["topK is 2, and there are 2 endpoints"]),
        (NEAR + "scorers: [{type: queue}]\nselection: {topK: 1}", []),
        (NEAR + "policy: prefill-decode", ["no request is split"]),
        (ROLES + "policy: prefill-decode", []),
        ("endpoints: [{address: 127.0.0.1, port: 1, labels: {role: prefill}}]", ["the label 'role' has no effect"]),
        ("endpoints: [{address: 127.0.0.1, port: 1, labels: {role: admin}}]", []),
        (
            "endpoints: [{address: 127.0.0.1, port: 1, labels: {llm-d.ai/role: decoder}}]",
            ["to the role 'decoder'", "every request is refused: no endpoint decodes"],
        ),
        (
            "endpoints: [{address: 127.0.0.1, port: 1, labels: {llm-d.ai/role: prefill}}]",
            ["every request is refused: no endpoint decodes (llm-d.ai/role: decode)"],
        ),
        (
            "filters: [{type: encode-filter}]\nendpoints: [{address: 127.0.0.1, port: 1}]",
            ["every request is refused: no endpoint encodes (llm-d.ai/role: encode)"],
        ),
        (
            "builtinFilters: false\nendpoints: [{address: 127.0.0.1, port: 1, labels: {llm-d.ai/role: prefill}}]",
            [],
        ),
        (
            "policy: prefill-decode\nendpoints: [{address: 127.0.0.1, port: 1, labels: {llm-d.ai/role: prefill}}]",
            ["every request is refused: no endpoint decodes"],
        ),
        (
            "policy: prefill-decode\nendpoints:\n- {address: 127.0.0.1, port: 1, labels: {llm-d.ai/role: prefill}}\n"
            "- {address: 127.0.0.1, port: 2, labels: {llm-d.ai/role: encode}}",
            ["every request is refused: no endpoint decodes"],
        ),
    ],
)
def test_what_is_allowed_and_hardly_meant_is_noted(text: str, noted: list[str]) -> None:
    notes = [note.message for note in load(text).notes]
    assert len(notes) == len(noted)
    assert all(part in note for part, note in zip(noted, notes, strict=True))


@pytest.mark.parametrize(
    ("given", "noted"),
    [
        (["a prefill", "b decode"], ["request for a is refused: no endpoint decodes", "no request for b is split"]),
        (["a prefill", "a decode", "b decode", "b encode"], ["no request for b is split"]),
        (["a prefill", "a decode", "b"], []),
        (["a prefill", "a decode", "b decode", " prefill"], []),
        (["a", "b"], ["no request for a is split", "no request for b is split"]),
        (["a prefill", "a decode"], []),
    ],
)
def test_roles_are_those_of_a_model(given: list[str], noted: list[str]) -> None:
    lines = []
    for port, (model, _, role) in enumerate((one.partition(" ") for one in given), 1):
        labels = f"{f'model-id: {model}, ' * bool(model)}{f'llm-d.ai/role: {role}' * bool(role)}"
        lines.append(f"- {{address: '127.0.0.1:{port}', labels: {{{labels}}}}}\n")
    text = "policy: prefill-decode\ngateway: {failOpen: true}\nendpoints:\n" + "".join(lines)
    notes = [note.message for note in load(text).notes]
    assert len(notes) == len(noted)
    assert all(part in note for part, note in zip(noted, notes, strict=True))


def test_the_endpoints_of_a_file_are_looked_at_too(tmp_path: Path) -> None:
    listing = tmp_path / "e.yaml"
    listing.write_text("endpoints: [{name: a, address: 127.0.0.1, port: 1, labels: {role: prefill}}]")
    report = examine(f"endpoints: {{file: {listing}}}")[1]
    assert [note.message for note in report.notes] == [
        f"{listing}: endpoint default/a: the label 'role' has no effect; its name is llm-d.ai/role"
    ]


@pytest.mark.parametrize(
    ("entry", "path", "message", "hint"),
    [
        ("'http://10.0.0.1:8000'", "$.endpoints[1]", "is a URL", "without scheme"),
        ("10.0.0.256:80", "$.endpoints[1]", "neither an IP address nor a host name", ""),
        ("10.0.0.1", "$.endpoints[1]", "`port` is missing", "behind the address"),
        ("10.0.0.1:0", "$.endpoints[1]", "is not a port", ""),
        ("{address: 10.0.0.1, port: http}", "$.endpoints[1].port", "is not a port", ""),
        ("{address: '10.0.0.1:80', port: 80}", "$.endpoints[1].port", "has a port already", ""),
        ("{adress: 10.0.0.1, address: '10.0.0.1:80'}", "$.endpoints[1].adress", "unknown field", "'address'?"),
        ("{name: x}", "$.endpoints[1]", "`address` is missing", ""),
        ("{address: 'h:80', labels: {v: []}}", "$.endpoints[1].labels.v", "expected a scalar", ""),
        ("{address: 'h:80', labels: {a.b/c: []}}", '$.endpoints[1].labels["a.b/c"]', "expected a scalar", ""),
        ("{address: 'h:80', metricsUrl: 'ftp://x'}", "$.endpoints[1].metricsUrl", "neither http nor https", ""),
        ("{address: 'h:80', name: a b}", "$.endpoints[1].name", "is not a valid name", ""),
        ("5", "$.endpoints[1]", "neither an IP address nor a host name", ""),
        ("localhost", "$.endpoints[1]", "`port` is missing", ""),
        ("~", "$.endpoints[1]", "expected host:port", ""),
        ("{address: 'h:80', name: a}", "$.endpoints[1]", "default/a is listed twice", "leave one out"),
        ("{address: '10.9.9.9:1', name: b}", "$.endpoints[1]", "is the address of default/a already", "leave one out"),
    ],
)
def test_what_is_wrong_with_an_entry(entry: str, path: str, message: str, hint: str) -> None:
    (problem,) = problems(f"endpoints:\n- {{name: a, address: '10.9.9.9:1'}}\n- {entry}\n- 10.9.9.8:1\n")
    assert (problem.path, problem.line) == (path, 3)
    assert message in problem.message
    assert hint in problem.hint


def test_where_a_duplicate_ends_the_start_nothing_is_said_to_count() -> None:
    (problem,) = problems("endpoints: ['10.9.9.9:1', '10.9.9.9:1']\n")
    assert "the last counts" not in str(problem)
    assert not problem.warning


@pytest.mark.parametrize("node", ["5", "''", "x.yaml", "{}", "{file: ''}", "{file: [x]}", "{files: x}"])
def test_neither_a_list_nor_a_file(node: str) -> None:
    (problem, *_) = problems(f"endpoints: {node}\n")
    assert problem.path.startswith("$.endpoints")
    assert problem.line == 1


def test_file_source_is_relative_to_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "fairlead.yaml"
    file.write_text("endpoints: {file: pool/e.yaml, watch: false}")
    source = load(file).endpoints
    assert (source.file, source.watch, source.static) == (str(tmp_path / "pool/e.yaml"), False, ())
    file.write_text("endpoints: {file: /abs/e.yaml}")
    assert load(file).endpoints.file == "/abs/e.yaml"
    assert load("endpoints: {file: e.yaml}").endpoints.file == "e.yaml"
