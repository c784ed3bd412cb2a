"""Text files are UTF-8, whatever the locale says."""

import ast
from collections.abc import Iterator
from pathlib import Path

import fairlead


def by_locale(source: str) -> Iterator[int]:
    """Lines with a call that reads or writes text without naming an encoding."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and not any(keyword.arg == "encoding" for keyword in node.keywords):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            modes = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            text = {"read_text": not node.args, "write_text": True}
            if text.get(called, called in ("open", "fdopen") and not {"r", "w", "a", "x"}.isdisjoint(modes)):
                yield node.lineno


def test_every_text_file_has_an_encoding() -> None:
    package = Path(fairlead.__file__).parent
    files = {path: [*by_locale(path.read_text(encoding="utf-8"))] for path in package.rglob("*.py")}
    assert {str(path.relative_to(package)): lines for path, lines in files.items() if lines} == {}


def test_calls_without_an_encoding_are_seen() -> None:
    source = "p.read_text()\np.write_text('a')\nopen(p, 'w')\nos.fdopen(1, 'r')\n"
    assert [*by_locale(source)] == [1, 2, 3, 4]
    assert [*by_locale("p.read_text(encoding='utf-8')\nopen(p, 'rb')\nstore.open(case)\n")] == []
