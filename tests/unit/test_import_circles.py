"""No modules import each other in a circle, at run time or for the type checker."""

import ast
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from statements import statements

SOURCE = Path(__file__).parents[2] / "src"


def imports(source: str, module: str, modules: set[str]) -> set[str]:
    """Modules among `modules` that this one names in any import, also inside functions and `TYPE_CHECKING` blocks."""
    names = set()
    for node in statements(source):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in modules else node.module for name in inner}
    return names & modules - {module}


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """One circle, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    files = {
        ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): file
        for file in (SOURCE / "fairlead").rglob("*.py")
    }
    graph = {module: imports(file.read_text(), module, set(files)) for module, file in files.items()}
    assert circle(graph) == []


@pytest.mark.parametrize(
    "text",
    [
        "from fairlead import b",
        "import fairlead.b",
        "def f():\n    from fairlead.b import x",
        "if 0:\n    from fairlead.b import x",
    ],
)
def test_every_way_to_import_is_seen(text: str) -> None:
    graph = {"fairlead.a": imports(text, "fairlead.a", {"fairlead.a", "fairlead.b"}), "fairlead.b": {"fairlead.a"}}
    assert set(circle(graph)) == {"fairlead.a", "fairlead.b"}
