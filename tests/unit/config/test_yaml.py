"""YAML to nodes: what is kept, what is refused, and texts made to crash, hang or fill the memory."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.config.problems import Problem
from fairlead.config.yaml import MAX_BYTES, Node, Tree, YamlError, parse_yaml

#: Reads each text in a process of its own, with bounds on memory and CPU that the system enforces, and writes its exit
#: code. The processes are forked, so that the modules are imported once.
HOSTILE = """
import os, resource, sys
from fairlead.compat.load import problems
from fairlead.config.endpoint_list import parse_endpoints_text
from fairlead.config.yaml import MAX_BYTES
for line in sys.stdin:
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    text = eval(line)[:MAX_BYTES]
    resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    assert [str(problem) for problem in (*problems(text), *parse_endpoints_text(text.encode()).problems)]
    os._exit(0)
"""


@pytest.fixture(scope="module")
def exit_code() -> Iterator[Callable[[str], int]]:
    """The exit code of a process that reads this text, which is given as an expression."""
    command = [sys.executable, "-c", HOSTILE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        texts, codes = process.stdin, process.stdout
        assert texts is not None and codes is not None

        def ended(text: str) -> int:
            print(text, file=texts, flush=True)
            return int(codes.readline())

        yield ended


def attempt(text: bytes | str) -> Tree | Problem:
    try:
        return parse_yaml(text)
    except YamlError as error:
        return error.problem


def plain(node: Node) -> object:
    if isinstance(node.value, dict):
        return {key: plain(value) for key, value in node.value.items()}
    return [plain(item) for item in node.value] if isinstance(node.value, list) else node.value


def test_scalars_and_keys_stay_text_with_their_lines() -> None:
    tree = parse_yaml("a: 1.10\nb:\n- 'x'\n- {c: 08,\n   1: ~}\n")
    assert plain(tree.root) == {"a": "1.10", "b": ["x", {"c": "08", "1": "~"}]}
    lines = {(): 1, ("a",): 1, ("b",): 2, ("b", 0): 3, ("b", 1): 4, ("b", 1, "c"): 4, ("b", 1, "1"): 5}
    assert {place: tree.line(place) for place in lines} == lines
    assert (tree.line(("b", 1, "c", "d")), tree.line(("b", 7)), tree.line(("z", "y"))) == (4, 2, 1)
    assert tree.faults == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [("", True), ("# only", True), ("~", True), ("null", True), ("!!null x", True), ("''", False), ("'null'", False)],
)
def test_what_counts_as_nothing(text: str, missing: bool) -> None:
    assert parse_yaml(text).root.missing is missing


def test_an_alias_is_the_node_of_its_anchor() -> None:
    tree = parse_yaml("a: &a [1]\nb: *a\n")
    assert isinstance(tree.root.value, dict)
    assert tree.root.value["b"] is tree.root.value["a"]


def test_merge_keeps_own_keys_and_their_lines() -> None:
    tree = parse_yaml("a: &a {x: 1, y: 2}\nb: &b {z: 3, x: 0}\nc:\n  y: 5\n  <<: [*a, *b]\nd: {'<<': 1}\n")
    assert plain(tree.root) == {
        "a": {"x": "1", "y": "2"}, "b": {"z": "3", "x": "0"}, "c": {"y": "5", "x": "1", "z": "3"}, "d": {"<<": "1"},
    }  # fmt: skip
    assert [tree.line(("c", key)) for key in "yxz"] == [4, 1, 2]
    assert tree.faults == []


@pytest.mark.parametrize(
    ("text", "path", "line", "message"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "$.b.c", 4, "'c' is given twice"),
        ("- 1\n- {'c d': 1,\n  c d: 2}\n", '$[1]["c d"]', 3, "'c d' is given twice"),
        ("a: {<<: 3}\n", "$.a", 1, "<< needs a mapping"),
        ("a: [1, {<<: [{}, [x]]}]\n", "$.a[1]", 1, "<< needs a mapping"),
    ],
)
def test_faults_cost_only_themselves(text: str, path: str, line: int, message: str) -> None:
    (fault,) = parse_yaml(text).faults
    assert (fault.path, fault.line) == (path, line)
    assert message in fault.message


def test_faults_are_bounded() -> None:
    assert len(parse_yaml("a: 1\n" * 1000).faults) == 200


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("? [a]\n: x\n", 1, "keys are strings"),
        ("a: &a [x]\nb: {*a : x}\n", 2, "keys are strings"),
        ("a: 1\n---\nb: 1\n", 2, "second document"),
        ("a: *b\n", 1, "*b stands for nothing"),
        ("a: &a [*a]\n", 1, "*a stands for nothing"),
        ("a: !!python/object:os.system x\n", 1, "tags such as"),
        ("a: !mine x\n", 1, "tags such as"),
        ("a: !!set {x}\n", 1, "tags such as"),
        ("a:\n\tb: 1\n", 2, "not valid YAML: a tab, where only spaces may indent"),
        ("a:\n  b: [1,\n\t- 2\n", 3, "not valid YAML"),
        ("a: 1\nb: \x00\n", 2, "not valid YAML"),
        ("a: [", 1, "not valid YAML"),
        ("%YAML 3.0\n---\na: 1\n", 1, "not valid YAML"),
        ("x" * (MAX_BYTES + 1), 0, "larger than 1 MiB"),
        (b"a: \xff\xfe\xff", 0, "not valid UTF-8"),
        ("a: \ud800", 0, "not valid UTF-8"),
    ],
)
def test_what_cannot_be_read(text: str | bytes, line: int, message: str) -> None:
    with pytest.raises(YamlError) as caught:
        parse_yaml(text)
    problem = caught.value.problem
    assert (problem.path, problem.line) == ("$", line)
    assert message in problem.message


@pytest.mark.parametrize(
    "text",
    [
        "'[' * MAX_BYTES",
        "'{a: ' * MAX_BYTES",
        "'- ' * MAX_BYTES",
        "'? ' * MAX_BYTES",
        pytest.param("'[? a,' + '? a,' * MAX_BYTES", marks=pytest.mark.slow),
        "'[' + 'a,' * MAX_BYTES",
        "'%TAG !a! b\\n' * MAX_BYTES",
        "''.join(f'%TAG !a{i:x}! b\\n' for i in range(70_000))",
        "'a: 1\\n' * MAX_BYTES",
        "''.join(f'k{i:x}: 1\\n' for i in range(100_000))",
        "''.join(f'{i}' + 'k' * 5000 + ': 1\\n' for i in range(250))",
        "'- &a0 []\\n' + ''.join(f'- &a{i + 1:x} [*a{i:x}]\\n' for i in range(60_000))",
        "'- &a0 [x]\\n' + ''.join(f'- &a{i + 1} [' + ','.join([f'*a{i}'] * 9) + ']\\n' for i in range(5000))",
        "'- &a0 {x: y}\\n' + ''.join(f'- &a{i + 1} {{<<: *a{i}, k{i}: 1}}\\n' for i in range(40_000))",
        "'- &l [' + '{},' * 100_000 + ']\\n-\\n' + '  <<: *l\\n' * MAX_BYTES",
        "'- &a {address: h:1, labels: {' + ','.join(f'k{i}: v' for i in range(9000)) + '}}\\n'"
        " + ''.join(f'- {{<<: *a, name: n{i}}}\\n' for i in range(9999))",
        "'- x\\n' * 9999",
    ],
)
def test_hostile_texts_end_with_a_problem(text: str, exit_code: Callable[[str], int]) -> None:
    assert exit_code(text) == 0


#: Without the characters that only YAML 1.1 takes for line breaks.
text = st.text(st.characters(codec="utf-8", exclude_characters="\x85\u2028\u2029"), max_size=8)
values = st.recursive(text, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4))


@given(st.lists(values, max_size=4), st.booleans(), st.sampled_from([None, 1, "\t"]))
@settings(max_examples=300, deadline=None)
def test_json_is_read_as_it_is(value: object, ascii_only: bool, indent: str | int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    found = attempt(text)
    if isinstance(found, Tree):
        assert plain(found.root) == value
    else:  # characters that JSON allows and YAML does not
        assert not ascii_only
        assert any(not c.isprintable() or c == "\ufeff" for c in text), found


@given(
    st.binary(max_size=200)
    | st.text(alphabet=st.sampled_from("ab:-[]{},&*!|>'\"%#?<~=01.\n\t \x00é\ud800"), max_size=80)
    | st.lists(st.sampled_from(["- ", "a: ", "&a ", "*a", "<<: ", "{", "}", "[", "]", ",", "\n", "  "])).map("".join)
)
@settings(max_examples=500, deadline=None)
def test_any_text_is_a_tree_or_an_error(text: bytes | str) -> None:
    found = attempt(text)
    if isinstance(found, Tree):
        plain(found.root)
    else:
        lines = text.decode("latin-1") if isinstance(text, bytes) else text
        assert 0 <= found.line <= max(1, len(lines.splitlines()))
        assert "\n" not in str(found)
