"""FAIRLEAD_FUZZ_SECONDS: each fuzzer runs for about that long, split evenly among its tests (`make fuzz`).

A fuzzer is a file of this folder, or the tests of one that carry `pytest.mark.fuzzer("name")`. A test is called again
and again, and every call draws new examples; a failing one ends, the rest goes on. A line tells when each test begins
and ends, and at the end there is one line per fuzzer. Without the variable each test is called once.
"""

import functools
import os
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from msgspec import Struct, json

from fairlead.core.endpoint import Endpoint
from fairlead.core.errors import PluginError
from fairlead.core.events import EndpointUp
from fairlead.core.fleet import Fleet
from fairlead.core.prefix import ChainHasher
from fairlead.core.profile import Profile
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.gateway.answers import Answers
from fairlead.gateway.driver import Driver
from fairlead.gateway.host import Host
from fairlead.gateway.understand import Understanding
from fairlead.plugins.filters.ability import Subset
from fairlead.plugins.params import NoParams
from fairlead.plugins.pickers import RoundRobin
from fairlead.server.observe.watch import Watch
from fairlead.testing import SimClock

SECONDS = float(os.environ.get("FAIRLEAD_FUZZ_SECONDS") or 0)

if SECONDS:
    # Where a CI system is detected the default is the same examples every time.
    settings.register_profile("fuzz", derandomize=False)
    settings.load_profile("fuzz")


class Tally(Struct):
    """What one fuzzer has done."""

    tests: int = 0
    examples: int = 0
    seconds: float = 0.0
    findings: list[str] = []


_tallies: dict[str, Tally] = {}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fuzzer(name): which line of `make fuzz` a test belongs to; default: its file's")


def _fuzzer(item: pytest.Item) -> str:
    mark = item.get_closest_marker("fuzzer")
    return str(mark.args[0]) if mark else item.path.stem.removeprefix("test_fuzz_")


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items if SECONDS else ():
        if item.path.name.startswith("test_fuzz_"):
            _tallies.setdefault(_fuzzer(item), Tally()).tests += 1


def _counting(test: Callable[..., Any], tally: Tally) -> Callable[..., Any]:
    @functools.wraps(test)
    def counted(*arguments: Any, **named: Any) -> Any:
        tally.examples += 1
        return test(*arguments, **named)

    return counted


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    tally = _tallies.get(_fuzzer(item))
    if tally is None or not isinstance(item, pytest.Function):
        yield
        return
    handle = getattr(item.obj, "hypothesis", None)
    if handle is not None:  # Hypothesis's documented way in
        handle.inner_test = _counting(handle.inner_test, tally)
    say = item.config.get_terminal_writer().line
    share, begun, before = SECONDS / tally.tests, time.monotonic(), tally.examples
    say(f"{time.strftime('%H:%M:%S')} {_fuzzer(item)}: {item.name}, {share:.0f} s")
    try:
        yield
        while time.monotonic() - begun < share:
            item.runtest()
    except Exception as error:
        tally.findings.append(f"{item.nodeid}: {type(error).__name__}")
        raise
    finally:
        tally.seconds += time.monotonic() - begun
        say(f"{time.strftime('%H:%M:%S')}   {tally.examples - before:,} examples")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _tallies:
        return
    terminalreporter.section("fuzzers")
    for name, tally in _tallies.items():
        found = "; ".join(tally.findings) or "none"
        terminalreporter.write_line(
            f"{name:<20} {tally.examples:>10,} examples in {tally.seconds:>5.0f} s   findings: {found}"
        )


class Wire:
    """A transport that remembers, and holds handlers to the rules of `io.receive.stream`."""

    def __init__(self, window: int = 65_536) -> None:
        self.sent: list[bytes] = []
        self.status: int | None = None
        self._window = window

    def send(self, *messages: bytes) -> None:
        assert self.status is None, "sent after the end"
        self.sent += messages

    def send_last(self, *messages: bytes) -> None:
        self.send(*messages)
        self.finish()

    def finish(self, code: int = 0, message: str = "") -> None:
        assert self.status is None, "finished twice"
        self.status = code

    def writable_bytes(self) -> int:
        return self._window

    def watch_cancel(self, on: bool) -> None:
        pass

    def hold(self, size: int, expected: int = 0) -> None:
        assert size >= 0 and expected >= 0


class Rig:
    """A whole scheduler without sockets: what sessions and access logs talk to, metrics and journal included."""

    def __init__(self, endpoints: int = 2, max_body: int = 200, inspect: bool = False) -> None:
        self.clock = SimClock()
        self.fleet = Fleet()
        self.watch = Watch(self.fleet, self.clock.time)
        tokens = TokenEstimator()
        profile = Profile("rr", [Subset(NoParams())], [], RoundRobin(NoParams()))
        self.pipeline = Pipeline(self.clock, Random(1), self.fleet, profile, tokens, self._plugin_failed)
        self.driver = Driver(self.pipeline, self.clock, self.watch)
        for i in range(endpoints):
            self.driver.feed(EndpointUp(Endpoint(f"default/e{i}", f"10.0.0.{i}:80")))
        self.answers = Answers("ab")
        understanding = Understanding(tokens, ChainHasher(), self.clock.time)
        self.host = Host(
            self.driver,
            understanding,
            self.answers,
            self.watch,
            self.clock.time,
            max_body,
            lambda request, stream: inspect,
        )

    def _plugin_failed(self, error: PluginError) -> None:
        raise AssertionError("no plugin may fail here") from error

    def leased(self) -> list[str]:
        """The lease ids of all requests that count as running."""
        return [self.answers.lease(number) for slot in range(2) for number in self._held(slot)]

    def _held(self, slot: int) -> list[int]:
        return [lease.request.id for lease in self.fleet.ledger.of_slot(slot)]

    def check(self) -> None:
        self.pipeline.validate()
        assert all(entry.lease is not None for entry in self.pipeline.requests), "nobody waits: all are routed"

    def end(self) -> None:
        """Nothing is left of any request, and whoever looks can be shown what happened."""
        self.check()
        assert len(self.fleet.ledger) == 0
        assert b"".join(self.watch.exposition()).count(b"nan") == 0
        json.encode(self.watch.decisions(200))


@pytest.fixture(scope="session")
def rigs() -> type[Rig]:
    return Rig


@pytest.fixture(scope="session")
def wires() -> type[Wire]:
    return Wire
