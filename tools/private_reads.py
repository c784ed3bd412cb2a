"""Lists the places where tests reach into another module: `thing._name`, `from fairlead.x import _name`, and private
names given as text to `setattr`, `getattr` and monkeypatch.

    python tools/private_reads.py [FILE …]      exit code 1 if there are any

A test that reads what is private pins how a thing is made, not what it does. Names that a file itself defines
are its own.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Underscored names that their libraries document as public.
DOCUMENTED = {"_asdict", "_replace", "_fields", "_make"}
_BY_TEXT = {"setattr", "getattr", "delattr", "hasattr"}


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and len(name) > 1 and name not in DOCUMENTED


def reads(source: str) -> list[tuple[int, str]]:
    """Line and text of each place."""
    tree = ast.parse(source)
    own = set(_defined(tree))
    found = [(line, text) for line, name, text in _used(tree) if private(name) and name not in own]
    return sorted(set(found))


def _defined(tree: ast.AST) -> Iterator[str]:
    """Names that this file defines: functions, classes, variables, and attributes of its own objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            yield node.attr


def _used(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not _is_own(node.value):
            yield node.lineno, node.attr, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("_"):
            for name in node.names:
                yield node.lineno, name.name, f"from {node.module} import {name.name}"
        elif isinstance(node, ast.Call) and _name(node.func) in _BY_TEXT:
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value.rpartition(".")[2], ast.unparse(node)


def _is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def main(files: list[str]) -> int:
    paths = [Path(file) for file in files] or sorted((ROOT / "tests").rglob("*.py"))
    count = 0
    for path in paths:
        for line, text in reads(path.read_text()):
            print(f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{line}: {text}")
            count += 1
    print(f"{count} places", file=sys.stderr)
    return int(bool(count))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
