"""All observers of the scheduler behind one: metrics, the decision journal, the log."""

from collections.abc import Callable, Iterable, Sequence
from math import inf, isfinite
from typing import Any, Protocol

from fairlead.admit.desk import Desk
from fairlead.fleet.fleet import Fleet
from fairlead.model.decision import DecisionRecord, OutcomeRecord
from fairlead.model.endpoint import MODEL_LABEL, Endpoint
from fairlead.model.errors import PluginError
from fairlead.observe.chooser_metrics import ChooserMetrics
from fairlead.observe.flow_metrics import FlowMetrics
from fairlead.observe.journal import Journal
from fairlead.observe.journal_explain import explained
from fairlead.observe.kube_metrics import KubeMetrics
from fairlead.observe.log import get
from fairlead.observe.metrics import SchedulerMetrics
from fairlead.observe.recent import Recent
from fairlead.observe.shadow_metrics import ShadowMetrics
from fairlead.observe.status import EndpointStatus, FleetStatus, ScrapeTotals

log = get("schedule")
#: The pool's name in published metrics.
POOL = "default"


#: Records that wait to be counted, at most.
_BATCH = 64
#: Seconds between two lines about requests that went past us: while we are away that is every request.
_FALLBACK_GAP = 15.0


class Observer(Protocol):
    """Who hears of records one by one."""

    def on_decision(self, record: DecisionRecord, duration_s: float) -> None: ...

    def on_outcome(self, record: OutcomeRecord) -> None: ...


class Watch:
    """Hears of every decision and outcome. `now` is the clock of their `at`.

    Records are counted in batches, in their order, or when somebody looks: one by one each would pay for cold caches,
    and a decision's at the worst moment, while its request waits. What is worth a line in the log is counted at once.
    """

    def __init__(self, fleet: Fleet, now: Callable[[], float], pool: str = POOL) -> None:
        self.fleet = fleet
        self._now = now
        self.journal = Journal()
        self.metrics = SchedulerMetrics(now, self.status, pool=pool)
        self.queue = FlowMetrics(self.metrics.registry, pool, fleet, now)
        self.choosers = ChooserMetrics(self.metrics.registry)
        self.shadows = ShadowMetrics(self.metrics.registry)
        self.kube = KubeMetrics(self.metrics.registry)
        self._uncounted: list[tuple[DecisionRecord | OutcomeRecord, float]] = []
        self._past = 0
        self._past_told_at = -inf
        #: By endpoint, why its load cannot be read.
        self._silent: dict[str, str] = {}
        #: Told the endpoint of every routed request.
        self.on_routed: Callable[[str], object] = lambda endpoint_id: None
        #: A fresh copy of the policy in force, to ask why; `None` = only what was recorded is told.
        self.make_policy: Callable[[], Any] | None = None
        #: Hears of every counted record too; `None` = nobody looks at the dashboard.
        self.recent: Recent | None = None
        #: Hears of every record at once; `None` = nothing is traced.
        self.tracing: Observer | None = None
        #: The trace of a request, by its number; empty = it has none.
        self.trace_id: Callable[[int], str] = lambda request_id: ""
        #: Totals of scraping, once there is a scraper.
        self.scrapes: ScrapeTotals | None = None

    def on_decision(self, record: DecisionRecord, duration_s: float) -> None:
        if record.endpoint:
            self.on_routed(record.endpoint)
        if self.tracing is not None:
            self.tracing.on_decision(record, duration_s)
        self._uncounted.append((record, duration_s))
        if len(self._uncounted) >= _BATCH or record.overloaded or not record.endpoint:
            self._count()

    def on_outcome(self, record: OutcomeRecord) -> None:
        if self.tracing is not None:
            self.tracing.on_outcome(record)
        self._uncounted.append((record, 0.0))
        if len(self._uncounted) >= _BATCH:
            self._count()

    def _count(self) -> None:
        batch, self._uncounted = self._uncounted, []
        for record, duration_s in batch:
            if isinstance(record, OutcomeRecord):
                self.metrics.on_outcome(record)
                self.journal.on_outcome(record)
                if self.recent is not None:
                    self.recent.on_outcome(record)
                continue
            self.metrics.on_decision(record, duration_s)
            self.metrics.on_plugin("Schedule", record.policy, record.policy, duration_s)
            self.queue.on_decision(record)
            self.journal.on_decision(record)
            if self.recent is not None:
                self.recent.on_decision(record, duration_s)
            if record.overloaded:
                log.warning("all endpoints are overloaded; more replicas are wanted")
            elif not record.endpoint and record.status not in (400, 404):  # those are the client's own fault
                log.warning("a request was refused", reason=record.outcome, status=record.status)

    def count(self) -> None:
        """Count what waits to be counted."""
        self._count()

    def naming(self, decision_id: Callable[[int], str]) -> None:
        """Let OpenMetrics tell which decision an observation belongs to, and which trace."""

        def name(request_id: int) -> dict[str, str]:
            found, trace = {"decision_id": decision_id(request_id)}, self.trace_id(request_id)
            return found | {"trace_id": trace} if trace else found

        self.metrics.registry.naming = name

    def exposition(self, openmetrics: bool = False) -> Iterable[bytes]:
        """The metrics page, piece by piece."""
        self._count()
        return self.metrics.registry.parts(openmetrics)

    def decisions(self, count: int) -> Sequence[dict[str, Any]]:
        """The newest `count` decisions, as the journal renders them."""
        self._count()
        return self.journal.last(count)

    def decision(self, name: str) -> dict[str, Any] | None:
        """One decision in full, by its id or the client's; `None` = not among the last ones."""
        self._count()
        found = self.journal.find(name)
        return None if found is None else explained(*found, self.make_policy)

    def watch_queue(self, desk: Desk | None) -> None:
        """Show what waits there; `None` = flow control is off."""
        self.queue.desk = desk

    def on_endpoint(self, endpoint: Endpoint) -> None:
        """An endpoint joined or changed."""
        self.metrics.pin(endpoint.labels.get(MODEL_LABEL, ""))

    def on_models(self, names: Iterable[str], conflicts: Iterable[tuple[str, str]]) -> None:
        """Model names were defined (again): they keep their labels. `conflicts`: who lost its name to whom."""
        for name in names:
            self.metrics.pin(name)
        for loser, owner in conflicts:
            log.warning("a model name is defined twice; the older definition counts", unused=loser, used=owner)

    def on_page(self, endpoint_id: str, lacks: Sequence[str]) -> None:
        """What an endpoint's metrics page lacks has changed; empty = nothing any more."""
        if lacks:
            log.warning("a metrics page lacks something", endpoint=endpoint_id, problems="; ".join(lacks))
        else:
            log.info("a metrics page is complete again", endpoint=endpoint_id)

    def on_silence(self, endpoint_id: str, reason: str) -> None:
        """Why an endpoint's load cannot be read has changed; empty = it is read again."""
        if reason:
            self._silent[endpoint_id] = reason
            log.warning(
                "the metrics of an endpoint cannot be read; our own accounting stands in",
                endpoint=endpoint_id,
                reason=reason,
            )
        elif self._silent.pop(endpoint_id, ""):
            log.info("the metrics of an endpoint are read again", endpoint=endpoint_id)

    def on_endpoint_gone(self, endpoint_id: str) -> None:
        self._silent.pop(endpoint_id, None)

    def on_admin_error(self, page: str, error: Exception) -> None:
        log.error("an admin page failed", exc=error, page=page)

    def on_client_error(self, api: str, status: int) -> None:
        self.metrics.on_client_error("", status)

    def on_fallback(self, address: str, status: int) -> None:
        """The gateway served a request without asking us."""
        self.metrics.on_fallback(address)
        self._past += 1
        now = self._now()
        if now - self._past_told_at >= _FALLBACK_GAP:
            self._past_told_at = now
            # No field names the endpoint: that would make as many lines as there are endpoints.
            log.warning("the gateway served requests without asking the scheduler", requests=self._past, last=address)
            self._past = 0

    def on_plugin_error(self, error: PluginError) -> None:
        self.metrics.families.plugin_errors.child(error.plugin).inc()
        log.error("a plugin failed and was left out of a decision", plugin=error.plugin, reason=str(error))

    def endpoints(self) -> Sequence[EndpointStatus]:
        """One entry per endpoint, in the order in which they joined."""
        fleet, table = self.fleet, self.fleet.table
        # A value at a time out of numpy's arrays would take three times as long.
        ages = (self._now() - table.sampled_at).tolist()
        leases, pending = table.inflight.tolist(), table.pending_tokens.tolist()
        found = []
        for slot, endpoint in table.slots():
            age, sample = ages[slot], table.samples[slot]
            found.append(
                EndpointStatus(
                    id=endpoint.id,
                    address=endpoint.address,
                    labels=dict(endpoint.labels),
                    fresh=age <= fleet.staleness,
                    age_s=age if isfinite(age) else None,
                    last_error=self._silent.get(endpoint.id, ""),
                    waiting=sample.waiting if sample else None,
                    running=sample.running if sample else None,
                    kv_usage=sample.kv_usage if sample else None,
                    leases=int(leases[slot]),
                    pending_tokens=pending[slot],
                    adapters=sorted(table.adapters[slot] or ()),
                )
            )
        return found

    def status(self) -> FleetStatus:
        return FleetStatus(
            endpoints=self.endpoints(),
            index_size=self.fleet.prefix.entries,
            leases=len(self.fleet.ledger),
            scrapes=self.scrapes,
        )
