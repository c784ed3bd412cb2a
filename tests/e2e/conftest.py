"""Fixtures for tests of the whole product: real Envoy, real `fairlead serve`, real upstreams."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))

from gw_live import running
from gw_processes import Child, Envoy, Serve, Stub, Upstream, require_envoy
from gw_traffic import Tally

from fairlead.server.live import Live

_tallies: list[Tally] = []
_figures: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs Envoy."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.envoy)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _tallies:
        terminalreporter.section("byte safety")
        terminalreporter.write_line(Tally.head())
        for tally in _tallies:
            terminalreporter.write_line(tally.row())
    if _figures:
        terminalreporter.section("survival")
        for line in _figures:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session", autouse=True)
def envoy_binary() -> str:
    return require_envoy()


@pytest.fixture(scope="session")
def tallies() -> list[Tally]:
    """Printed as a table at the end."""
    return _tallies


@pytest.fixture(scope="session")
def figures() -> list[str]:
    """Lines that are printed at the end."""
    return _figures


@pytest.fixture(scope="session")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upstream]:
    """Four ports of the benchmark upstream."""
    child = Upstream(tmp_path_factory.mktemp("upstream") / "upstream.log")
    try:
        yield child.start(4)
    finally:
        child.end()


Children = Callable[[Child], Child]


@pytest.fixture
def ending() -> Iterator[Callable[[Child], Child]]:
    """Call it with a process that is to be ended after the test, last one first."""
    children: list[Child] = []

    def add(child: Child) -> Child:
        children.append(child)
        return child

    try:
        yield add
    finally:
        for child in reversed(children):
            child.end()


@pytest.fixture
def serve(tmp_path: Path, ending: Children) -> Callable[..., Serve]:
    """`serve(config)` starts `fairlead serve` and waits until it is ready."""

    def start(config: dict[str, object], name: str = "serve") -> Serve:
        child = Serve(tmp_path, name)
        ending(child)
        return child.start(config)

    return start


@pytest.fixture
def envoy(tmp_path: Path, ending: Children) -> Callable[..., Envoy]:
    """`envoy(bootstrap)` starts an Envoy of its own and waits until it serves."""

    def start(bootstrap: dict[str, object], name: str = "envoy", concurrency: int = 1) -> Envoy:
        child = Envoy(tmp_path, name)
        ending(child)
        return child.start(bootstrap, concurrency)

    return start


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[tuple[Live, asyncio.Task[None]]]]]:
    """`await live(config)` runs the scheduler in this process; see `gw_live`."""
    async with AsyncExitStack() as stack:

        async def start(config: dict[str, Any]) -> tuple[Live, asyncio.Task[None]]:
            return await stack.enter_async_context(running(config, tmp_path))

        yield start


@pytest.fixture
def stub(tmp_path: Path, ending: Children) -> Callable[..., Stub]:
    """`stub(replicas, *arguments)` starts simulated model servers, twenty times faster than real ones."""

    def start(replicas: int, *arguments: str) -> Stub:
        child = Stub(tmp_path / "stub.log")
        ending(child)
        return child.start(replicas, "--time-ratio", "20", *arguments)

    return start
