"""Policies on trial in a running scheduler: built-in ones in a thread, schedulers in other processes over their stream.

Rules
* No error here reaches a decision, and no decision waits for a shadow. Cases beyond the limits are skipped and counted.
* A shadow that cannot be built fails the start, like every wrong setting. A shadow that fails later is cut off.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from random import Random

import numpy as np
from msgspec import Struct

from fairlead.config.building import able_by, computes_by
from fairlead.config.plugins import build_policy
from fairlead.config.schema import Config, SchedulerSettings
from fairlead.core.columns import FloatColumn
from fairlead.core.errors import PluginError
from fairlead.core.events import Event, RemotePicked, ShadowsJudged
from fairlead.core.fleet import Fleet
from fairlead.core.instructions import AskRemote, JudgeShadows
from fairlead.core.policy import Cycle, Policy
from fairlead.core.records import OutcomeRecord, ShadowCase, ShadowRecord
from fairlead.core.request import Request
from fairlead.core.shadow import Bench, Opened
from fairlead.core.view import FleetView
from fairlead.plugins.policies.cost_model import CostModel
from fairlead.server.live.choosers import of_gateway
from fairlead.server.observe.log import get
from fairlead.server.observe.watch import Listener
from fairlead.server.remote.client import RemoteClient
from fairlead.server.shadow_runner import MAX_FAILURES, PASSED, ShadowRunner

log = get("shadow")

#: At most this many questions to one remote scheduler may be unanswered; with one more it is cut off. After so many
#: seconds, a question counts as `unanswered`.
_MAX_OPEN, _PATIENCE = 256, 10.0
#: Seconds of the event loop that asking may take in one burst.
_BURST = 0.05


class LiveShadows(Struct, eq=False):
    """Call `follow(config, …)` at the start and after each reload, `close()` at the end. `feed` receives the verdicts
    as events, `report` the errors of shadows that learn from outcomes."""

    _fleet: Fleet
    _feed: Callable[[Event], None]
    _report: Callable[[PluginError], object]
    #: The policies that run now. Following the same object again changes nothing.
    _on_trial: Mapping[str, Policy] | None = None
    _runner: ShadowRunner | None = None
    _remotes: "list[RemoteShadow]" = []
    _closing: set[asyncio.Task[None]] = set()

    def follow(self, config: Config, on_trial: Mapping[str, Policy]) -> None:
        """Run the shadows of `config` instead of the present ones. `on_trial`: the built-in shadow policies that were
        built from `config`. `check_schedulers(config)` must have passed."""
        if on_trial is self._on_trial:
            return
        settings = config.shadows
        schedulers = {policy.label: policy.scheduler for policy in settings.policies if policy.scheduler is not None}
        self._stop()
        self._on_trial = on_trial
        if on_trial:
            self._runner = ShadowRunner(
                on_trial,
                lambda: make_bench(config),
                self._judged,
                lambda shadow, why: log.error("a shadow was cut off", shadow=shadow, reason=why),
                self._report,
                cpu=settings.cpu,
                limit=settings.limit,
            )
        for name, scheduler in schedulers.items():
            remote = RemoteShadow(name, scheduler, config, self._fleet, make_bench(config), self._judged, settings.cpu)
            self._remotes.append(remote)

    async def close(self) -> None:
        self._stop()
        await asyncio.gather(*self._closing)

    def _stop(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        for remote in self._remotes:
            task = asyncio.ensure_future(remote.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self._remotes = []

    def judge(self, instruction: JudgeShadows) -> None:
        case = instruction.case
        if self._runner is not None:
            self._runner.judge(case)
        loop = asyncio.get_running_loop()
        for remote in self._remotes:
            loop.call_soon(remote.ask, case)

    def listeners(self) -> list[Listener]:
        """What takes the ends of requests, which the deciding policy had sent, to the shadows."""
        runner = [] if self._runner is None else [self._runner.hear]
        return [*runner, *(remote.hear for remote in self._remotes)]

    def unheard(self) -> dict[str, int]:
        """The number of outcomes that shadows were too slow for. Built-in shadows leave out the same ones, as `""`."""
        counts = {} if self._runner is None else {"": self._runner.stats.unheard}
        return counts | {remote.name: remote.client.unheard for remote in self._remotes}

    def _judged(self, record: ShadowRecord) -> None:
        self._feed(ShadowsJudged((record,)))

    def cut(self) -> dict[str, str]:
        """The shadows that are cut off → why."""
        counts = {} if self._runner is None else dict(self._runner.stats.cut)
        return counts | {remote.name: remote.cut for remote in self._remotes if remote.cut}

    def skipped(self) -> dict[tuple[str, str], int]:
        """The number of cases without a verdict by shadow and reason. Built-in shadows skip the same ones, as `""`."""
        runner = self._runner
        counts = (
            {} if runner is None else {("", "crowded"): runner.stats.crowded, ("", "budget"): runner.stats.over_budget}
        )
        for remote in self._remotes:
            counts |= {(remote.name, reason): count for reason, count in remote.skipped.items()}
        return counts


class RemoteShadow:
    """A scheduler in another process, on trial. It is asked in a later turn of the event loop, about the state at the
    time of the decision."""

    def __init__(
        self,
        name: str,
        settings: SchedulerSettings,
        config: Config,
        fleet: Fleet,
        bench: Bench,
        judged: Callable[[ShadowRecord], None],
        cpu: float,
    ) -> None:
        #: Cases without a verdict, by reason: not asked (the first two), asked and not answered.
        self.skipped = {"down": 0, "budget": 0, "lost": 0, "unanswered": 0}
        self.name = name
        #: Why this shadow is cut off; empty = it is not.
        self.cut = ""
        self._failures = 0
        self._bench = bench
        self._computes = computes_by(config)
        self._judged = judged
        self._cpu, self._used, self._began = cpu, 0.0, time.monotonic()
        #: Unanswered cases by request id, oldest first, each with when it was asked (`time.monotonic`).
        self._open: dict[int, tuple[Opened, float]] = {}
        self._closing: asyncio.Task[None] | None = None
        self.client = RemoteClient(
            name,
            settings,
            fleet,
            self._on_event,
            lambda what, why: log.info(what.replace("; the built-in policy decides", ""), shadow=name, reason=why),
            **of_gateway(config),
        )
        self.client.start()

    def ask(self, case: ShadowCase) -> None:
        if self.cut:
            return
        if self._used > _BURST + self._cpu * (time.monotonic() - self._began):
            self.skipped["budget"] += 1
            return
        began = time.perf_counter()
        if self.client.welcome is None:
            self.skipped["down"] += 1
            return
        fleet = self._bench.open(case)
        opened = self._bench.opened
        computes = self._computes(case.request, fleet, case.snapshot.at)
        question = AskRemote(self.name, case.request, case.held, opened[1].able, case.expected_output, computes)
        if not self.client.ask_as_of(question, fleet, case.snapshot):
            self.skipped["down"] += 1
            return
        now = time.monotonic()
        self._open[case.request.id] = (opened, now)
        while next(iter(self._open.values()))[1] < now - _PATIENCE:
            del self._open[next(iter(self._open))]
            self.skipped["unanswered"] += 1
        self._used += time.perf_counter() - began
        if len(self._open) > _MAX_OPEN:
            self._cut_off(f"{_MAX_OPEN} questions are unanswered")

    def hear(self, outcomes: Sequence[OutcomeRecord]) -> None:
        if not self.cut:
            began = time.perf_counter()
            self.client.hear(outcomes)
            self._used += time.perf_counter() - began

    def _on_event(self, event: Event) -> None:
        if not isinstance(event, RemotePicked):
            self._lose()
            return
        for pick in event.picks:
            opened, asked_at = self._open.pop(pick.request_id, (None, 0.0))
            if opened is None:
                continue
            self._bench.reopen(opened)
            verdict = self._bench.answered(self.name, pick, (time.monotonic() - asked_at) * 1e6)
            self._judged(self._bench.record((verdict,)))
            self._failures = self._failures + 1 if verdict.error and verdict.error != PASSED else 0
            if self._failures >= MAX_FAILURES:
                self._cut_off(f"failed {MAX_FAILURES} times in a row: {verdict.error}")

    def _cut_off(self, why: str) -> None:
        if not self.cut:
            self.cut = why
            self._lose()
            log.error("a shadow was cut off", shadow=self.name, reason=why)
            self._closing = asyncio.ensure_future(self.client.close())

    def _lose(self) -> None:
        """The questions that are open will not be answered."""
        self.skipped["lost"] += len(self._open)
        self._open.clear()

    async def close(self) -> None:
        if self._closing is not None:
            await self._closing
        await self.client.close()


def make_bench(config: Config) -> Bench:
    """Make a bench for use in one thread: it shares no state. It compares choices by the default policy's cost, without
    `patience`: as that grows with the square of the wait, a few decisions would outweigh all others."""
    model = CostModel()

    def reference(request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn:
        terms = [column for name, column in model.terms(request, fleet, cycle) if name != "patience"]
        total: FloatColumn = np.sum(terms, axis=0)
        return total

    return Bench(reference, able_by(config, build_policy(config)), Random())
