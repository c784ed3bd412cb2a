"""YAML with bounds: lines, repeated keys, aliases, and hostile texts."""

import pytest

from fairlead.config.yamltree import MAX_BYTES, parse


def test_values_and_lines() -> None:
    document = parse("a: 1\nb:\n- x\n- {c: true,\n   d: ~}\n")
    assert document.value == {"a": 1, "b": ["x", {"c": True, "d": None}]}
    assert document.lines == {
        (): 1, ("a",): 1, ("b",): 2, ("b", 0): 3, ("b", 1): 4, ("b", 1, "c"): 4, ("b", 1, "d"): 5,
    }  # fmt: skip
    assert document.problems == []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e3", 1000.0), ("'1e3'", "1e3"), ("0.5", 0.5), ("1:30", "1:30"), ("190:20:30.15", "190:20:30.15"),
        ("2024-01-01", "2024-01-01"), ("=", "="), ("9" * 5000, "9" * 5000), ("0x10", 16), ("", None), ("# only", None),
        ("!!str 5", "5"), ('"\\u00e9"', "é"), ("on", True), ("5s", "5s"),
    ],
)  # fmt: skip
def test_scalars_without_traps(text: str, value: object) -> None:
    document = parse(text)
    assert document.problems == []
    assert document.value == value
    assert type(document.value) is type(value)


def test_merge_keeps_own_keys_and_their_lines() -> None:
    document = parse("a: &a {x: 1, y: 2}\nb: &b {z: 3}\nc:\n  y: 5\n  <<: [*a, *b]\n")
    assert document.value["c"] == {"y": 5, "x": 1, "z": 3}
    assert (document.lines[("c", "y")], document.lines[("c", "x")]) == (4, 1)
    assert document.problems == []


@pytest.mark.parametrize(
    ("text", "path", "line", "message"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "$.b.c", 4, "given twice"),
        ("a:\n  1: x\n", "$.a", 2, "keys are strings, not 1"),
        ("on: x\n", "$", 1, "keys are strings, not on"),
        ("? [a]\n: x\n", "$", 1, "not a list or mapping"),
        ("a: {<<: 3}\n", "$.a", 1, "<< needs a mapping"),
        ("a: 1\n---\nb: 1\n", "$", 2, "second document"),
        ("a: *b\n", "$", 1, "*b stands for nothing"),
        ("a: &a [*a]\n", "$", 1, "*a stands for nothing"),
        ("a: !!python/object:os.system x\n", "$", 1, "tags such as"),
        ("a: !mine x\n", "$", 1, "tags such as"),
        ("a:\n  !!int foo\n", "$", 2, "cannot be read as int"),
        ("a: 0b_\n", "$", 1, "cannot be read as int"),
        ("a:\n\tb: 1\n", "$", 2, "not valid YAML"),
        ("a: 1\nb: \x00\n", "$", 2, "not valid YAML"),
        ("%YAML 3.0\n---\na: 1\n", "$", 1, "not valid YAML"),
        ("[" * 100_000, "$", 1, "nested more than"),
        ("- " * 100_000, "$", 1, "nested more than"),
        ("x" * (MAX_BYTES + 1), "$", 0, "larger than 1 MiB"),
    ],
)
def test_what_is_wrong(text: str, path: str, line: int, message: str) -> None:
    (problem,) = parse(text).problems
    assert (problem.path, problem.line) == (path, line)
    assert message in problem.message


@pytest.mark.parametrize("raw", [b"a: \xff\xfe\xff", "a: \ud800"])
def test_text_that_is_no_utf8(raw: bytes | str) -> None:
    (problem,) = parse(raw).problems
    assert "UTF-8" in problem.message


def test_aliases_cannot_unfold_without_bounds() -> None:
    nine = lambda i: ",".join([f"*a{i}"] * 9)  # noqa: E731
    lists = "a0: &a0 [x]\n" + "".join(f"a{i + 1}: &a{i + 1} [{nine(i)}]\n" for i in range(30))
    merges = "a0: &a0 {}\n" + "".join(f"a{i + 1}: &a{i + 1} {{<<: [{nine(i)}]}}\n" for i in range(30))
    chain = "a0: &a0 {}\n" + "".join(f"a{i + 1}: &a{i + 1} {{<<: *a{i}}}\n" for i in range(3000))
    nested = "a0: &a0 []\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}]\n" for i in range(3000))
    for text in (lists, merges, chain, nested):
        (problem,) = parse(text).problems
        assert "too large once its aliases are unfolded" in problem.message
