"""When the demo judges itself, and what it does before anything is started."""

import io
import socket
from pathlib import Path
from typing import Any, Self

import pytest
from msgspec import structs
from rich.console import Console

from fairlead.core.errors import FairleadError
from fairlead.lab import demo
from fairlead.lab.demo import POLICIES, Plan
from fairlead.lab.load.spec import Record, RunResult, RunSpec

#: Seconds until the first token.
_TTFT = {POLICIES["round-robin"]: 2.0, POLICIES["default"]: 0.125}
#: Seconds that requests left late, if the machine is busy.
_LATE = 0.03


@pytest.fixture
def late() -> float:
    return 0.0


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch, late: float) -> None:
    """Nothing is started; of each policy ten requests come back."""

    class Nothing:
        """A process that is there at once."""

        def __init__(self, *_arguments: str) -> None:
            pass

        async def __aenter__(self) -> Self:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def ready(self, _url: str, file: Path | None = None) -> None:
            pass

    async def results(load: RunSpec, _look: object) -> RunResult:
        answered = Record(0, 1.0, sent=1.0 + late, first_data=1.0 + _TTFT[load.name], prompt_tokens=10, cached_tokens=7)
        records = [structs.replace(answered, end=5.0, completion_tokens=10) for _ in range(10)]
        return RunResult(name=load.name, records=records, duration_s=4.0)

    monkeypatch.setattr(demo, "Child", Nothing)
    monkeypatch.setattr(demo, "run_in_process", results)
    monkeypatch.setattr(demo, "check_ports", lambda _plan: None)


async def printed(plan: Plan, check: bool = False) -> str:
    out = io.StringIO()
    await demo.run(plan, Console(file=out, width=200), check)
    return out.getvalue()


@pytest.mark.usefixtures("canned")
async def test_the_usual_demo_is_judged_wherever_it_listens(tmp_path: Path) -> None:
    text = await printed(Plan(port=23000, out=tmp_path))
    assert "  met     TTFT p50 at least 10× lower than round robin's: 16×\n" in text
    assert "  missed  prefix hit rate at least 80%: 70%\n" in text
    assert "  met     no failed request: 0\n" in text


@pytest.mark.usefixtures("canned")
@pytest.mark.parametrize(
    "changed", [{"requests": 4499}, {"rate": 13.0}, {"time_ratio": 9.0}, {"replicas": 7}, {"seed": 2}]
)
async def test_others_are_judged_only_when_asked(tmp_path: Path, changed: dict[str, Any]) -> None:
    plan = Plan(out=tmp_path, **changed)
    assert "  met  " not in await printed(plan)
    assert "  met  " in await printed(plan, check=True)


@pytest.mark.usefixtures("canned")
@pytest.mark.parametrize("late", [0.0, _LATE])
async def test_a_busy_machine_is_named(tmp_path: Path, late: float) -> None:
    assert ("too busy" in await printed(Plan(out=tmp_path))) == (late > 0)


async def test_a_taken_port_stops_it_before_anything_is_started(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(FairleadError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .* --port$"):
            await printed(Plan(port=port, out=tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("canned")
async def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FairleadError, match=r"cannot make the folder .*/file/out: Not a directory"):
        await printed(Plan(out=tmp_path / "file" / "out"))
