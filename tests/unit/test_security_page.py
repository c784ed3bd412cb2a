"""The threat model names tests that exist, for every boundary, and every unsafe setting that the doctor knows."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
FILES = sorted((ROOT / "tests").rglob("test_*.py"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NAMED = sorted(set(re.findall(r"`(test_\w+\.py)(?:::(test_\w+))?`", PAGE)))


@pytest.mark.parametrize(("file", "test"), NAMED, ids=lambda name: name)
def test_every_named_test_exists_once(file: str, test: str) -> None:
    trees = [ast.parse(path.read_text()) for path in FILES if path.name == file]
    functions = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    assert functions.count(test) == 1 if test else len(trees) == 1


def test_every_boundary_names_its_tests() -> None:
    _, _, rest = PAGE.partition("## Who stands where")
    sections = rest.partition("\n## ")[0].split("\n### ")[1:]
    assert len(sections) > 7
    rows = [row for section in sections for row in re.findall(r"^\| (?!may not|---)(.+) \|$", section, re.MULTILINE)]
    assert len(rows) > 25
    assert [row for row in rows if "`test_" not in row] == []
