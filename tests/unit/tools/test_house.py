"""What counts the house finds what it should, and nothing else."""

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "house.py"


@pytest.fixture(scope="module")
def house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fairlead_house", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OWNER = """
class Books:
    def __init__(self):
        self.by_request: dict[int, str] = {}
        self.negative = {}
        self.seen: set[int] = set()
        self.by_slot: dict[int, str] = {}
        self.ledger = Ledger()

    def note(self, request, lease, slot):
        self.by_request[request.id] = "x"
        self.negative.pop(~lease.request.id, None)
        self.by_slot[slot] = "y"
        self.ledger.get(request.id)
        return lease.request_id in self.seen
"""


def test_dictionaries_by_request_id_are_found_and_others_are_not(house: ModuleType) -> None:
    tree = ast.parse(OWNER)
    found = list(house.owners(tree, "core/books.py"))
    assert found == [f"core/books.py Books.{name}" for name in ("by_request", "negative", "seen")]
    assert not list(house.owners(tree, next(iter(house.RECORDS)))), "so may records of the past"
    assert not list(house.owners(tree, "lab/books.py")), "so may programs that only use the scheduler"


def test_hooks_are_found_but_for_those_that_are_allowed(house: ModuleType) -> None:
    tree = ast.parse("x = getattr(plugin, 'chosen', None)\ny = hasattr(plugin, 'demote')\nplugin.getattr('z')\n")
    assert list(house.hooks(tree, "a.py")) == [
        "a.py:1 getattr(plugin, 'chosen', None)",
        "a.py:2 hasattr(plugin, 'demote')",
    ]
    (allowed, argument), reason = next(iter(house.ALLOWED.items()))
    assert not list(house.hooks(ast.parse(f"getattr(x, {argument})"), f"io/{allowed}")) and reason
    assert len(house.ALLOWED) <= 5


def test_a_function_of_61_lines_is_long(house: ModuleType) -> None:
    for lines, found in ((59, 0), (60, 1)):
        tree = ast.parse("class A:\n    async def f(self):\n" + "        x = 1\n" * lines)
        assert len(list(house.long_functions(tree, "a.py"))) == found


def test_allowed_calls_are_there(house: ModuleType) -> None:
    """An entry that nothing needs any more goes."""
    calls = {
        (path.name, ast.unparse(node.args[1]))
        for path in house.modules()
        if re.search("(has|get)attr", text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("hasattr", "getattr")
    }
    assert set(house.ALLOWED) <= calls


def test_the_house_is_as_it_should_be(house: ModuleType) -> None:
    found = house.measure()
    where = found["where"]
    assert where["request_state_owners"] == ["core/requests.py Requests._entries"]
    assert where["getattr_hooks"] == []
    assert where["functions_over_60"] == []
    assert found["rooms"] == 12
    assert found["modules"] <= 420


def test_records_are_there(house: ModuleType) -> None:
    """An exemption that nothing needs any more goes."""
    records, house.RECORDS = house.RECORDS, {}
    try:
        unneeded = [
            name for name in records if not list(house.owners(ast.parse((house.SOURCE / name).read_text()), name))
        ]
    finally:
        house.RECORDS = records
    assert unneeded == []
