"""YAML to plain values: scalars without traps, and aliases that cannot unfold without bounds."""

import pytest

from fairlead.config.yaml import parse


def test_values() -> None:
    document = parse("a: 1\nb:\n- x\n- {c: true,\n   1: ~}\n")
    assert document.value == {"a": 1, "b": ["x", {"c": True, "1": None}]}
    assert document.tree.line(("b", 1, "1")) == 5
    assert document.problems == []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e3", 1000.0), ("'1e3'", "1e3"), ("0.5", 0.5), ("1:30", "1:30"), ("190:20:30.15", "190:20:30.15"),
        ("2024-01-01", "2024-01-01"), ("=", "="), ("9" * 5000, "9" * 5000), ("0x10", 16), ("", None), ("# only", None),
        ("!!str 5", "5"), ('"\\u00e9"', "é"), ("on", True), ("5s", "5s"), ("'5'", "5"), ("'on'", "on"), ("~", None),
        ("!!int '5'", 5), ("!!float 1", 1.0), ("!!null x", None), ("1_000", 1000), ("<<", "<<"), ("!!str ~", "~"),
    ],
)  # fmt: skip
def test_scalars_without_traps(text: str, value: object) -> None:
    document = parse(text)
    assert document.problems == []
    assert document.value == value
    assert type(document.value) is type(value)


def test_merged_values() -> None:
    document = parse("a: &a {x: 1, y: 2}\nc:\n  y: 5\n  <<: *a\n")
    assert document.value["c"] == {"y": 5, "x": 1}
    assert (document.tree.line(("c", "y")), document.tree.line(("c", "x"))) == (3, 1)


@pytest.mark.parametrize(
    ("text", "path", "line", "message"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "$.b.c", 4, "given twice"),
        ("? [a]\n: x\n", "$", 1, "keys are strings"),
        ("a:\n  !!int foo\n", "$", 2, "cannot be read as int"),
        ("a:\n  !!bool foo\n", "$", 2, "cannot be read as bool"),
        ("a: !!map foo\n", "$", 1, "cannot be read as map"),
        ("a: 0b_\n", "$", 1, "cannot be read as int"),
        ("a:\n\tb: 1\n", "$", 2, "not valid YAML"),
        ("[" * 100_000, "$", 1, "nested more than"),
    ],
)
def test_what_is_wrong(text: str, path: str, line: int, message: str) -> None:
    (problem,) = parse(text).problems
    assert (problem.path, problem.line) == (path, line)
    assert message in problem.message


def test_aliases_cannot_unfold_without_bounds() -> None:
    nine = lambda i: ",".join([f"*a{i}"] * 9)  # noqa: E731
    lists = "a0: &a0 [x]\n" + "".join(f"a{i + 1}: &a{i + 1} [{nine(i)}]\n" for i in range(30))
    nested = "a0: &a0 []\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}]\n" for i in range(3000))
    for text in (lists, nested):
        (problem,) = parse(text).problems
        assert "too large once its aliases are unfolded" in problem.message
