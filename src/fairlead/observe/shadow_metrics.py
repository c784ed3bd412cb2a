"""How policies on trial differ from the one that decides. All milliseconds are forecasts."""

from collections.abc import Callable, Mapping

from fairlead.model.shadow import ShadowRecord, ShadowVerdict
from fairlead.observe.exposition import Registry
from fairlead.observe.instruments import counters, gauges, histograms

BOUNDS = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1)


class ShadowMetrics:
    """`skipped` gives the cases left out by reason, `cut` the shadows that are cut off with the reason."""

    def __init__(self, registry: Registry) -> None:
        self.skipped: Callable[[], Mapping[str, int]] = dict
        self.cut: Callable[[], Mapping[str, str]] = dict
        #: Records, one per shadow and decision or one per decision.
        self.judged = 0
        self._decisions = counters("shadow", "verdict")
        self._regret = counters("shadow")
        self._gain = counters("shadow", "sign")
        self._primary = counters()
        self._took = histograms("shadow", bounds=BOUNDS)
        self._skipped = counters("reason")
        self._cut = gauges("shadow")
        registry.before(self._refresh)
        show = registry.show
        text = "What shadows would have done: agree, differ, refuse, error."
        show("fairlead_shadow_decisions_total", text, self._decisions)
        text = "Reference cost of a shadow's choices above the lowest possible."
        show("fairlead_shadow_regret_milliseconds_total", text, self._regret)
        text = "The same of the choices that were made."
        show("fairlead_shadow_primary_regret_milliseconds_total", text, self._primary)
        text = "Forecast TTFT where requests went, less that of the shadow's choice, by sign."
        show("fairlead_shadow_predicted_gain_milliseconds_total", text, self._gain)
        show("fairlead_shadow_seconds", "Time that a shadow took for a decision.", self._took)
        show("fairlead_shadow_skipped_total", "Decisions that shadows were not shown, by why.", self._skipped)
        show("fairlead_shadow_cut_off", "1 for a shadow that was cut off.", self._cut)

    def on_shadow(self, record: ShadowRecord) -> None:
        self.judged += 1
        self._primary.child().value += record.regret_ms
        for verdict in record.verdicts:
            name = verdict.shadow
            self._decisions.child(name, _kind(verdict)).value += 1
            self._took.child(name).observe(verdict.took_us * 1e-6)
            if verdict.endpoint:
                self._regret.child(name).value += verdict.regret_ms
                sign = "gain" if verdict.gain_ms >= 0 else "loss"
                self._gain.child(name, sign).value += abs(verdict.gain_ms)

    def totals(self) -> dict[str, dict[str, float]]:
        """By shadow: decisions by verdict, and milliseconds of regret, predicted gain and predicted loss."""
        found: dict[str, dict[str, float]] = {}
        for (name, verdict), counter in self._decisions.children.items():
            found.setdefault(name, {})[verdict] = counter.value
        for (name,), counter in self._regret.children.items():
            found.setdefault(name, {})["regret_ms"] = counter.value
        for (name, sign), counter in self._gain.children.items():
            found.setdefault(name, {})[f"{sign}_ms"] = counter.value
        return found

    @property
    def primary_regret_ms(self) -> float:
        """The same of the choices that were made, of all decisions that shadows judged."""
        return self._primary.child().value

    def _refresh(self) -> None:
        for reason, count in self.skipped().items():
            self._skipped.child(reason).value = count
        self._cut.children.clear()
        for name in self.cut():
            self._cut.child(name).set(1)


def _kind(verdict: ShadowVerdict) -> str:
    if verdict.error:
        return "error"
    if not verdict.endpoint:
        return "refuse"
    return "agree" if verdict.agrees else "differ"
