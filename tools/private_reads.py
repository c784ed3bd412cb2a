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
    used = [place for place in _used(tree) if private(place[1])]
    own = set(_defined(tree)) if used else set()
    return sorted({(node.lineno, text or ast.unparse(node)) for node, name, text in used if name not in own})


def _defined(tree: ast.AST) -> Iterator[str]:
    """Names that this file defines: functions, classes, variables, and attributes of its own objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            yield node.attr


def _used(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    """Each place, the name that it uses, and how it is shown; empty = as it is written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not _is_own(node.value):
            yield node, node.attr, ""
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("_"):
            for name in node.names:
                yield node, name.name, f"from {node.module} import {name.name}"
        elif isinstance(node, ast.Call) and _name(node.func) in _BY_TEXT:
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node, argument.value.rpartition(".")[2], ""


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
