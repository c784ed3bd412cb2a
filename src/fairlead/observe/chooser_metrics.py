"""What schedulers in other processes, the canary and shadows did. Gauges and sums are set at each rendering."""

from collections.abc import Callable, Mapping

from fairlead.observe.exposition import Registry
from fairlead.observe.instruments import Histogram, counters, gauges, histograms
from fairlead.schedule.breaker import STATES
from fairlead.schedule.canary import Canary
from fairlead.schedule.remote import RemotePolicy

#: Seconds.
BOUNDS = (0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_SUMS = ("asked", "queued", "answered", "refused", "late", "alternatives")


class ChooserMetrics:
    """`remotes` and `canary` tell what there is now."""

    def __init__(self, registry: Registry) -> None:
        self.remotes: Callable[[], Mapping[str, RemotePolicy]] = dict
        self.canary: Callable[[], Canary | None] = lambda: None
        self._sums = counters("scheduler", "event")
        self._fallbacks = counters("scheduler", "reason")
        self._connected = gauges("scheduler")
        self._breaker = gauges("scheduler", "state")
        self._opened = counters("scheduler")
        self._took = histograms("scheduler", bounds=BOUNDS)
        self._canary = counters("side")
        registry.before(self._refresh)
        show = registry.show
        show("fairlead_scheduler_requests_total", "Requests of a scheduler in another process, by event.", self._sums)
        show("fairlead_scheduler_fallbacks_total", "Requests decided by the policy behind it, by why.", self._fallbacks)
        show("fairlead_scheduler_connected", "1 while the scheduler is connected.", self._connected)
        show("fairlead_scheduler_breaker", "1 for the state that the circuit breaker is in.", self._breaker)
        show("fairlead_scheduler_breaker_opened_total", "How often the circuit breaker opened.", self._opened)
        show("fairlead_scheduler_answer_seconds", "Time from question to answer, of answers in time.", self._took)
        show("fairlead_canary_decisions_total", "Decisions made here, by the side that made them.", self._canary)

    def took(self, scheduler: str) -> Histogram:
        """For the seconds that its answers take."""
        return self._took.child(scheduler)

    def _refresh(self) -> None:
        remotes = self.remotes()
        for family in (self._connected, self._breaker):
            family.children.clear()
        for name, policy in remotes.items():
            stats = policy.stats
            for event in _SUMS:
                self._sums.child(name, event).value = getattr(stats, event)
            for reason, count in stats.fallbacks.items():
                self._fallbacks.child(name, reason).value = count
            self._connected.child(name).set(policy.connected)
            for state in STATES:
                self._breaker.child(name, state).set(policy.breaker.state == state)
            self._opened.child(name).value = policy.breaker.opened
        canary = self.canary()
        if canary is not None:
            for side, count in canary.decided.items():
                self._canary.child(side).value = count
