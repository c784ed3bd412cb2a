"""`tools/prose.py` finds Vale, says how to get it, and its rules find our own tics."""

import importlib
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def prose(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("prose")


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Neither Vale nor Go."""
    for name, value in {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "FAIRLEAD_GO": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("FAIRLEAD_VALE", raising=False)
    no_go = tmp_path / "find.py"
    no_go.write_text("raise SystemExit('no Go')")
    return no_go


@pytest.mark.parametrize(("required", "code"), [("", 0), ("1", 1)])
def test_without_vale_and_go_it_says_what_to_install(
    prose: Any,
    nowhere: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    required: str,
    code: int,
) -> None:
    monkeypatch.setattr(prose, "FIND_GO", nowhere)
    monkeypatch.setenv("FAIRLEAD_REQUIRE_ALL", required)
    assert prose.main([]) == code
    assert "install Vale (https://vale.sh/docs/install) or set FAIRLEAD_VALE" in capsys.readouterr().err


def test_a_vale_that_is_named_but_missing_is_an_error(
    prose: Any, nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRLEAD_VALE", "/no/such/vale")
    with pytest.raises(prose.NoVale, match="/no/such/vale"):
        prose.find_vale()


#: A sentence, and the rule that objects; none for plain English.
SENTENCES = [
    ("The load is more than round robin bears.", "Fairlead.Tics"),
    ("Both are for people who look.", "Fairlead.Tics"),
    ("Waited 0 ms, of it in the queue 0 ms.", "Fairlead.Tics"),
    ("It would have tied with: neither would do.", "Fairlead.Tics"),
    ("Who comes back from a pause, starts late.", "Fairlead.Inversions"),
    ("Should the scheduler die, Envoy goes on.", "Fairlead.Inversions"),
    ("We utilize the cache in order to win.", "Fairlead.Words"),
    ("It is very fast.", "Fairlead.Filler"),
    ("It is " + "a long and winding " * 12 + "road.", "Fairlead.SentenceLength"),
    ("The gateway goes on without the scheduler. A request waits until an endpoint has room.", ""),
]


def test_the_rules_find_what_they_are_for(prose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prose, "build", lambda binary: pytest.skip("Vale is not here; `make prose` builds it"))
    vale = prose.find_vale()
    page = tmp_path / "page.md"
    page.write_text("\n\n".join(sentence for sentence, _ in SENTENCES))
    command = [vale, "--config", str(ROOT / ".vale.ini"), "--output", "line", str(page)]
    lines = subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.splitlines()
    found = {int(line.split(":")[1]): line.split(":")[3] for line in lines}
    assert found == {2 * i + 1: rule for i, (_, rule) in enumerate(SENTENCES) if rule}
