"""`tools/names.py` finds names that say nothing, and its baseline only shrinks."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("names")


@pytest.mark.parametrize(
    ("source", "unclear"),
    [
        ("found = 1", ["found"]),
        ("def f(one, *, other=2): pass", ["one", "other"]),
        ("async def told(): pass", ["told"]),
        ("class Beacon: pass", ["Beacon"]),
        ("class C:\n    _wishes: int = 0", ["_wishes"]),
        ("class C:\n    def f(self):\n        self._told = self.endpoint = 1", ["_told"]),
        ("for rest in []: pass\n[some for some in []]\nlambda at: 0", ["at", "rest", "some"]),
        ("with open('x') as whole: pass\nimport a as others\nfrom b import c as again", ["again", "others", "whole"]),
        ("match 1:\n    case [one, *rest]: pass\n    case str() as told: pass", ["one", "rest", "told"]),
        ("try: pass\nexcept OSError as found: pass", ["found"]),
        ("def f(): found = 1\ndef g(): found = 2; found = 3", ["found", "found"]),
        ("second = 1", ["second"]),
        ("TOKEN_PARITY = 1\nKvAsking = 2", ["KvAsking", "TOKEN_PARITY"]),
    ],
)
def test_what_says_nothing(names: Any, source: str, unclear: list[str]) -> None:
    assert sorted(name for _, name, _ in names.of_file("room/a.py", source)) == unclear


@pytest.mark.parametrize(
    "source",
    [
        "first, second = 1, 2",
        "first_token_at = per_second = findings = headroom = remote = 1",
        "import other\nother.found(rest=others)\nprint(one)",
        "x = {'told': 1}  # found",
        "def call_at(when): pass",
    ],
)
def test_what_is_fine(names: Any, source: str) -> None:
    assert names.of_file("core/cost.py", source) == []


def test_a_module_has_a_name_too(names: Any) -> None:
    assert names.of_file("live/asking.py", "x = 1") == [(1, "asking", "asking")]


def run(names: Any, folder: Path, *arguments: str) -> int:
    return int(names.main(list(arguments), folder / "src", folder / "baseline.txt"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "src" / "core").mkdir(parents=True)
    (tmp_path / "src" / "core" / "cost.py").write_text("endpoint = 1\ndef f(found): pass\n")
    return tmp_path


def test_a_new_name_fails_with_its_place_and_what_to_say(
    names: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(names, folder) == 1
    assert capsys.readouterr().out == "core/cost.py:2: found: say what it holds: endpoint, match, findings, …\n"


def test_the_baseline_allows_so_many_and_never_grows(
    names: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    baseline = folder / "baseline.txt"
    baseline.write_text("core/cost.py found=2 one=1\ncore/gone.py at=4\n")
    assert run(names, folder) == 0
    assert run(names, folder, "--all") == 0
    assert "core/cost.py:2: found" in capsys.readouterr().out
    run(names, folder, "--lower")
    assert baseline.read_text() == "core/cost.py found=1\n"
    (folder / "src" / "core" / "cost.py").write_text("def f(found): pass\ndef g(found): pass\n")
    assert run(names, folder, "--lower") == 1
    assert "(2 here, 1 are older)" in capsys.readouterr().out
    assert baseline.read_text() == "core/cost.py found=1\n"


def test_the_glossary_is_short_and_uses_its_own_words(names: Any) -> None:
    terms = re.findall(r"\*\*([^*]+)\*\*", (ROOT / "docs" / "glossary.md").read_text())
    assert 40 < len(terms) <= 60
    assert len(set(terms)) == len(terms)
    assert [term for term in terms for word in term.split() if names.unclear(word)] == []
