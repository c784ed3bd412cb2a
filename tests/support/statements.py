"""The statements of a module, for tests that read sources."""

import ast
from collections.abc import Iterator


def statements(source: str) -> Iterator[ast.AST]:
    """Every statement, also of functions, classes and branches. Expressions are passed over, to save time."""
    left: list[ast.AST] = [ast.parse(source)]
    while left:
        node = left.pop()
        yield node
        left += (
            inner
            for inner in ast.iter_child_nodes(node)
            if isinstance(inner, ast.stmt | ast.excepthandler | ast.match_case)
        )
