"""What is done to a whole Fairlead, and what it may cost; docs/security.md says what it is for.

`make chaos` runs the long form (`FAIRLEAD_CHAOS=full`) and writes its table as JSON too (`FAIRLEAD_CHAOS_JSON=file`).
"""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "e2e" / "support"))

from ch_site import MEMORY_MIB, ModelServer, Prefixed, limited, pool
from ch_trial import FULL, HEAD, Row, told, write
from gw_processes import Child, Serve, require_envoy, sees_the_scheduler
from msgspec import convert
from msgspec.structs import asdict


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Everything here needs Envoy. What `long_form` marks is left to `make chaos`: other tests show it too."""
    here = Path(__file__).parent
    mine = [item for item in items if item.path.is_relative_to(here)]
    for item in mine:
        item.add_marker(pytest.mark.envoy)
    left_out = [] if FULL else [item for item in mine if item.get_closest_marker("long_form")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for group in ("passed", "failed") for report in terminalreporter.getreports(group)]
    rows = [convert(value, Row) for report in reports for name, value in report.user_properties if name == "chaos"]
    if rows:
        terminalreporter.section("chaos")
        for line in (HEAD, *map(told, rows)):
            terminalreporter.write_line(line)
        if file := os.environ.get("FAIRLEAD_CHAOS_JSON"):
            write(rows, Path(file))


@pytest.fixture(scope="session", autouse=True)
def envoy_binary() -> str:
    return require_envoy()


@pytest.fixture
def judged(record_property: Callable[[str, object], None]) -> Callable[[Row], None]:
    """Notes a row for the table, and fails for what it says is broken."""

    def judge(row: Row) -> None:
        record_property("chaos", asdict(row))
        assert row.problems == [], told(row)

    return judge


@pytest.fixture
def ending() -> Iterator[Callable[[Child], None]]:
    """Call it with a process that is to be ended after the test, the last one first."""
    children: list[Child] = []
    try:
        yield children.append
    finally:
        for child in reversed(children):
            child.end()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ModelServer]]:
    """Four model servers, each a process of its own."""
    folder = tmp_path_factory.mktemp("servers")
    children = [ModelServer(folder / f"server-{number}.log") for number in range(4)]
    try:
        yield [child.again() for child in children]
    finally:
        for child in children:
            child.end()


@pytest.fixture(scope="module")
def started(servers: list[ModelServer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    child = Serve(tmp_path_factory.mktemp("site"))
    try:
        yield child.start(pool(servers))
    finally:
        child.end()


@pytest.fixture
async def site(started: Serve) -> Serve:
    """One Fairlead for all trials of a file, which leave it as it was. Its gateway asks the scheduler."""
    await sees_the_scheduler(started.gateway)
    return started


Starting = Callable[..., Awaitable[Serve]]


@pytest.fixture
def own(servers: list[ModelServer], tmp_path: Path, ending: Callable[[Child], None]) -> Starting:
    """`await own(config, prefix)` starts a Fairlead for one trial: what `prefix` says comes before its command."""

    async def start(config: dict[str, object], *prefix: str) -> Serve:
        child = Prefixed(tmp_path, prefix)
        ending(child)
        document = {name: value for name, value in (pool(servers) | config).items() if value is not None}
        await asyncio.to_thread(child.start, document)
        await sees_the_scheduler(child.gateway)
        return child

    return start


@pytest.fixture
def memory_limit() -> Iterator[tuple[list[str], str]]:
    """What limits the memory of the command behind it, as in the chart all processes together; and in words how."""
    limit = str(MEMORY_MIB << 20)
    for base, file, tasks in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "tasks"),
        (Path("/sys/fs/cgroup"), "memory.max", "cgroup.procs"),
    ):
        group = base / f"fairlead-chaos-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / file).write_text(limit)
            yield limited(f"echo $$ > {group / tasks}"), f"a cgroup of {MEMORY_MIB} MiB"
            return
        except OSError:
            continue
        finally:
            group.rmdir()
    space = 8 * MEMORY_MIB
    yield limited(f"ulimit -Sv {space * 1024}"), f"no memory cgroup here: {space} MiB of address space each"
