"""One observer of the scheduler that passes records on to all: metrics, the journal of decisions, traces, the log."""

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any

from fairlead.core.demand import DECODE, PREFILL, Demand, Load, MaySplit, Objective, PeersLoad, Totals
from fairlead.core.endpoint import MODEL_LABEL, STAGES, Endpoint
from fairlead.core.errors import PluginError
from fairlead.core.fleet import Fleet
from fairlead.core.flow import LEFT
from fairlead.core.flow_control import FlowController
from fairlead.core.policy import Policy
from fairlead.core.records import DecisionRecord, OutcomeRecord, StallRecord
from fairlead.core.request import Request
from fairlead.core.stalls import LEVELS, level_name
from fairlead.pool.scrape import TOLD_AFTER, ScrapeStats
from fairlead.server.observe.component_metrics import (
    ChooserMetrics,
    KubeMetrics,
    ShadowMetrics,
    Tempo,
    UploadMetrics,
)
from fairlead.server.observe.decisions import DecisionId, RecentDecisions, explained
from fairlead.server.observe.fleet_gauges import EndpointStatus, FleetStatus
from fairlead.server.observe.flow_metrics import FlowMetrics
from fairlead.server.observe.log import Counted, get
from fairlead.server.observe.metrics import SchedulerMetrics
from fairlead.server.observe.recent import SHORT, Recent, Window
from fairlead.server.observe.tracing import Tracing
from fairlead.server.observe.troubles import Troubles, named, watch_process

log = get("schedule")
#: The pool's name in published metrics.
POOL = "default"


#: Receives outcomes.
Listener = Callable[[Sequence[OutcomeRecord]], object]
#: At most this many decisions, and as many outcomes, wait to be counted.
_BATCH = 64
#: At most this many ends of requests are kept for percentiles of the last seconds.
_NEWEST = 2000
#: Lines that count requests.
_LEFT = "gateways closed streams of waiting requests (their clients left, or they waited too long)"
_BYPASSED = "the gateway routed requests without asking the scheduler"


def _part_only(endpoint: Endpoint) -> bool:
    """Whether the endpoint only prefills, or only decodes."""
    role = endpoint.role
    return role != "" and (role in STAGES[PREFILL]) != (role in STAGES[DECODE])


class Watch:
    """Receives every decision and outcome. `now` is the clock of their `at`.

    `on_routed` receives the endpoint of each routed request that is not in `awake` at the time. `tracing` receives
    every record immediately. `scrapes`: the scraper's totals. `served` returns the models that endpoints list.
    `skipped`, `cut`: see `ShadowMetrics`. `objective`: the latencies that the desired number of endpoints is computed
    for. `counts_log`: whether this process counts what only the gateway's access log shows (requests routed without
    asking, uploads that it ended); of several workers, which all get the log, only one does. `one_of_several`: the
    process serves several pools; then all metrics have the pool as a label, and `LivePools` watches the process.

    Records are counted in batches, decisions before outcomes, or when somebody reads the counts. Counting them one by
    one is slower, because the CPU's caches are cold, and would delay each decision while its request waits. Records
    that cause a log line are counted immediately.
    """

    def __init__(
        self,
        fleet: Fleet,
        now: Callable[[], float],
        pool: str = POOL,
        *,
        on_routed: Callable[[str], object] = lambda endpoint_id: None,
        awake: Container[str] = (),
        tracing: Tracing | None = None,
        scrapes: ScrapeStats | None = None,
        served: Callable[[], Iterable[str]] = tuple,
        skipped: Callable[[], Mapping[tuple[str, str], int]] = dict,
        cut: Callable[[], Mapping[str, str]] = dict,
        objective: Objective | None = None,
        counts_log: bool = True,
        one_of_several: bool = False,
    ) -> None:
        self.fleet, self._counts_log, self._now = fleet, counts_log, now
        self.journal, self._listed = RecentDecisions(), served
        self.metrics = SchedulerMetrics(
            now,
            self.status,
            pool=pool,
            served=self._served,
            desired=self._desired_by_role,
            constant={"inference_pool": pool} if one_of_several else None,
        )
        self._demands, self._prompts = {"": Demand(objective)}, Load()  # by role; own prompts that may be split
        self._apart = self._out_of_reach_logged = False  # whether there was a server of one role only
        self.queue = FlowMetrics(self.metrics, pool, fleet, now)
        self.metrics.on_forget = self.queue.forget
        self.choosers, self.kube = ChooserMetrics(self.metrics.registry), KubeMetrics(self.metrics.registry)
        self.shadows = ShadowMetrics(self.metrics.registry, skipped, cut)
        self.uploads = UploadMetrics(self.metrics.registry, now)
        self.troubles = Troubles(self.metrics.registry, now)
        self.tempo = Tempo(self.metrics.families.plugin.children, now)
        notes = {"kubernetes": self.kube.trouble, "scrapes": self._unread, "gateway-uploads": self.uploads.note}
        for what, note in notes.items():
            self.troubles.watch(what, note)
        if not one_of_several:
            watch_process(self.troubles)
        #: Records that wait to be counted. Each decision comes with the seconds that it took.
        self._decisions: list[tuple[DecisionRecord, float]] = []
        self._outcomes: list[OutcomeRecord] = []
        self._left, self._bypassed = Counted(log.info, _LEFT, now), Counted(log.warning, _BYPASSED, now)
        #: The newest ends of requests, and how many could not be read in the last seconds (the only key is "").
        self.newest: deque[OutcomeRecord] = deque(maxlen=_NEWEST)
        self.unreadable = Window[str](SHORT, 1.0, 1, "")
        self._silent: dict[str, str] = {}  # endpoint id → why its load cannot be read
        #: Endpoint id → the worst level of its hang that was logged, and when (clock seconds) its last progress was.
        self._hangs: dict[str, tuple[int, float]] = {}
        self._on_routed, self._awake, self._tracing, self._scrapes = on_routed, awake, tracing, scrapes
        self.decision_id: DecisionId | None = None  # `None` = our decisions have no ids
        self._peers_load, self.any_role = PeersLoad(), False  # see `watch_roles`
        self._alone: Callable[[], bool] = lambda: False
        self._listeners: Sequence[Listener] = ()  # see `set_listeners`
        self.standby: Callable[[], bool] = lambda: self.kube.standby  # whether gateways ask another process
        self._measured = False, False, 0  # `standby()`, `_alone()`, the breaks of the peers' load at the last reading
        #: Receives every counted record too; `None` = the dashboard has no viewer.
        self.recent: Recent | None = None

    def on_decision(self, record: DecisionRecord, duration_s: float) -> None:
        if record.endpoint not in self._awake and record.endpoint:
            self._on_routed(record.endpoint)
        if self._tracing is not None:
            self._tracing.on_decision(record, duration_s)
        self._decisions.append((record, duration_s))
        if record.overloaded or not record.endpoint:
            self.count()
            if record.overloaded:
                log.warning(
                    "all endpoints are over the limits of load filters; add replicas, or raise limits that are too low"
                )
            elif record.status not in (400, 404):  # these are errors of the client
                request = record.request
                decision = self.decision_id(request.id) if self.decision_id else request.id
                if record.outcome == LEFT.reason:  # nobody received the status
                    self._left.happened(decision)
                else:
                    whose = {"tenant": request.fairness_id, "model": request.model, "target_model": request.target}
                    whose["request_id"] = request.external_id
                    fields = {"priority": request.priority, "decision": decision}
                    fields |= {name: text for name, text in whose.items() if text}
                    log.warning("a request was refused", reason=record.outcome, status=record.status, **fields)
        elif len(self._decisions) >= _BATCH:
            self.count()

    def on_outcome(self, record: OutcomeRecord) -> None:
        if self._tracing is not None:
            self._tracing.on_outcome(record)
        self._outcomes.append(record)
        if len(self._outcomes) >= _BATCH:
            self.count()

    def count(self) -> None:
        """Count all records that wait."""
        timed, outcomes = self._decisions, self._outcomes
        self._decisions, self._outcomes = [], []
        decisions: Sequence[DecisionRecord] = ()
        if timed:
            decisions, durations = zip(*timed, strict=True)
            self.metrics.on_decisions(decisions, durations)
            self.queue.on_decisions(decisions)
            self.choosers.on_decisions(decisions)
            self.journal.on_decisions(decisions)
            self._count_prompts(decisions)
        if outcomes:
            for listener in self._listeners:
                listener(outcomes)
            self.newest.extend(outcomes)
            self.metrics.on_outcomes(outcomes)
            self.journal.on_outcomes(outcomes)
        if self.recent is not None:
            self.recent.take([*decisions, *outcomes])

    def naming(self, decision_id: DecisionId) -> None:
        """Have exemplars in OpenMetrics name the decision of an observation, and its trace if it has one."""
        self.decision_id = decision_id

        def name(request_id: int) -> dict[str, str]:
            names = {"decision_id": decision_id(request_id)}
            trace = self._tracing.trace_id(request_id) if self._tracing is not None else ""
            return names | {"trace_id": trace} if trace else names

        self.metrics.registry.naming = name

    def exposition(self, openmetrics: bool = False) -> Iterable[bytes]:
        """The metrics page, piece by piece."""
        self.count()
        return self.metrics.registry.parts(openmetrics)

    def decisions(self, count: int) -> Sequence[dict[str, Any]]:
        """The newest `count` decisions, newest first, as the journal renders them."""
        return list(self.each_decision(count))

    def each_decision(self, count: int) -> Iterator[dict[str, Any]]:
        """Like `decisions`, but each is rendered only when it is taken from the iterator."""
        self.count()
        return self.journal.each(count)

    def decision(self, name: str, make_policy: Callable[[str], Policy] | None = None) -> dict[str, Any] | None:
        """One decision in full, by its id or the client's request id; `None` = it is not among the last ones.

        `make_policy` returns a fresh copy of the policy with a name, to compute the reasons; `None` = only recorded
        values.
        """
        self.count()
        recorded = self.journal.find(name, self.decision_id)
        if recorded is None:
            return None
        decision_id = self.decision_id(recorded[0].request.id) if self.decision_id else None
        make = None if make_policy is None else partial(make_policy, recorded[0].policy)
        return {**explained(*recorded, make), "decision_id": decision_id}

    def desired_endpoints(self, role: str = "") -> int | None:
        """How many endpoints the pool's load needs; `None` = too little is known of the load. A standby knows nothing:
        no gateway asks it. `role`: only those with one of `roles`."""
        self.count()
        now = self._now()
        before, self._measured = self._measured, (self.standby(), self._alone(), self._peers_load.breaks)
        if self._measured != before or any(self._measured[:2]):
            for demand in self._demands.values():
                demand.forget()
        for part, demand in self._demands.items():
            demand.observe(Totals(now, *self._totals(part)))
        demand = self._demand(role)
        desired = demand.desired(self.fleet, self.queue.flow_controller, now)
        if demand.out_of_reach_ms and not self._out_of_reach_logged:
            self._out_of_reach_logged = True
            log.warning(
                "the objective autoscaling.tpot is hardly within reach: it allows steps of allowed_ms at most, since "
                "the time per token varies and load needs room; more replicas do not make steps shorter",
                tpot_ms=demand.objective.tpot_ms,
                step_ms=round(demand.out_of_reach_ms, 1),
                allowed_ms=round(demand.longest_step_ms, 1),
            )
        return desired

    def _demand(self, role: str) -> Demand:
        return self._demands.get(role, self._demands[""])  # the policy may split no more

    def _totals(self, role: str) -> tuple[int, int, int]:
        """Requests, prompt tokens and cached ones of the servers with this role."""
        own, peers, prompts, theirs = self.metrics, self._peers_load, self._prompts, self._peers_load.prompts
        tokens, cached = prompts.tokens + theirs.tokens, prompts.cached_tokens + theirs.cached_tokens
        if role == PREFILL:
            return prompts.requests + theirs.requests, tokens, cached
        elsewhere = tokens - cached if role == DECODE else 0
        totals = own.prompt_tokens + peers.tokens, own.cached_tokens + peers.cached_tokens + elsewhere
        return own.routed + peers.requests, *totals

    def _count_prompts(self, decisions: Iterable[DecisionRecord]) -> None:
        if (may_split := self._peers_load.may_split) is None:
            return
        for record in decisions:
            api, prompt, cached = record.request.api, record.request.prompt_tokens, record.hit_tokens
            alone = record.endpoint and cached < prompt
            if record.prefill or (alone and may_split(api, prompt, prompt - cached)):
                self._prompts.add(prompt, cached)

    def desired_replicas(self, role: str = "") -> int | None:
        """How many pods that are; `None` as there."""
        desired = self.desired_endpoints(role)
        pods = self._demand(role).pods(desired or 0, self.fleet)  # also a standby learns how many ports a pod has
        return None if desired is None else pods

    def present_replicas(self, role: str = "") -> int:
        return self._demand(role).present(self.fleet)

    @property
    def roles(self) -> Sequence[str]:
        """The roles that have a desired number of their own; none if the policy splits no requests."""
        return [role for role in self._demands if role]

    def _desired_by_role(self) -> dict[str, int]:
        roles = self.roles
        self._apart = bool(roles) and (self._apart or any(_part_only(e) for _, e in self.fleet.table.slots()))
        numbers = {role: self.desired_replicas(role) for role in (roles if self._apart else ("",))}
        return {role: number for role, number in numbers.items() if number is not None}

    def set_listeners(self, listeners: Sequence[Listener]) -> None:
        """Pass outcomes to these from now on, when they are counted."""
        self._listeners = listeners

    def watch_prompts(self, may_split: MaySplit | None) -> None:
        """Compute the desired number by role too; `None` = the policy splits no requests."""
        self._peers_load.may_split = may_split
        objective, roles = self._demands[""].objective, ("", PREFILL, DECODE) if may_split else ("",)
        self._demands = {role: self._demands.get(role, Demand(objective, role)) for role in roles}

    def watch_roles(self, any_role: bool) -> None:
        """Whether the policy also sends whole requests to endpoints that only prefill."""
        self.any_role = any_role

    def watch_peers(self, load: PeersLoad, alone: Callable[[], bool]) -> None:
        """Include the load of the pool's other schedulers. `alone()`: whether there is no link to them now."""
        load.may_split = self._peers_load.may_split
        self._peers_load, self._alone = load, alone

    def watch_lead(self, standby: Callable[[], bool]) -> None:
        """Measure the load only while `standby()` is false; by default while this pool's own lease is held."""
        self.standby = standby

    def watch_queue(self, flow_controller: FlowController | None) -> None:
        """Show the queues of this flow controller; `None` = flow control is off."""
        self.queue.flow_controller = flow_controller

    def _served(self) -> Iterable[str]:
        """The names of models and adapters that endpoints serve now."""
        table = self.fleet.table
        for slot, endpoint in table.slots():
            yield endpoint.labels.get(MODEL_LABEL, "")
            yield from table.adapters[slot] or ()
        yield from self._listed()

    def on_models(self, names: Iterable[str], conflicts: Iterable[tuple[str, str]]) -> None:
        """Take the defined model names: they keep their own series. `conflicts`: pairs of definitions with the same
        name: the unused one, the used one."""
        self.metrics.declare(names)
        for loser, owner in conflicts:
            log.warning("a model name is defined twice; the older definition is used", unused=loser, used=owner)

    def on_page(self, endpoint_id: str, lacks: Sequence[str]) -> None:
        """Log that the series which an endpoint's metrics page lacks have changed; empty = it lacks none any more."""
        if lacks:
            then = "decisions do without them; if the engine has other names for them, set these under metrics.engines"
            log.warning(f"a metrics page is missing series: {then}", endpoint=endpoint_id, problems="; ".join(lacks))
        else:
            log.info("a metrics page is complete again", endpoint=endpoint_id)

    def on_silence(self, endpoint_id: str, reason: str) -> None:
        """Log that the reason why an endpoint's load cannot be read has changed; empty = it is read again."""
        if reason:
            self._silent[endpoint_id] = reason
            then = (
                "its load is estimated" if self._failures(endpoint_id) == 0 else "it is out of use while others serve"
            )
            log.warning(f"cannot read the metrics of an endpoint; {then}", endpoint=endpoint_id, reason=reason)
        elif self._silent.pop(endpoint_id, ""):
            log.info("the metrics of an endpoint can be read again", endpoint=endpoint_id)

    def unread(self, endpoint_id: str) -> str:
        """Why the endpoint's load cannot be read; empty = it can, or scrapes have not failed often enough to report."""
        return self._silent.get(endpoint_id, "")

    def on_endpoint(self, endpoint: Endpoint) -> None:
        """Call this when an endpoint appears or changes, before the fleet is updated. If its address has changed, it is
        another server, and a hang of that one is logged again."""
        slot = self.fleet.table.slot(endpoint.id)
        known = None if slot is None else self.fleet.table.endpoints[slot]
        if known is not None and known.address != endpoint.address:
            self._hangs.pop(endpoint.id, None)

    def on_endpoint_gone(self, endpoint_id: str) -> None:
        self._silent.pop(endpoint_id, None)
        self._hangs.pop(endpoint_id, None)

    def _unread(self) -> str:
        if not self._silent:
            return ""
        failing = [name for name in self._silent if self._failures(name) >= TOLD_AFTER]
        out, count = len(failing), self.fleet.table.count
        if out == count:
            all_fail = f"the metrics pages of all {count} endpoints fail"
            return f"{all_fail}; requests go there all the same, unless flowControl.noEndpointTtl lets them wait"
        why = f"as their metrics pages fail: {named(failing)}"
        texts = [f"{out} of {count} endpoints are out of use, {why}"] if out else []
        if estimated := len(self._silent) - out:
            texts.append(f"the metrics of {estimated} of {count} endpoints cannot be read; their load is estimated")
        return "; ".join(texts)

    def _failures(self, endpoint_id: str) -> float:
        """How many scrapes failed in a row. 0 also if the endpoint answers, but with an error below 500 or without its
        load."""
        slot = self.fleet.table.slot(endpoint_id)
        return 0.0 if slot is None else float(self.fleet.table.failures[slot])

    def on_client_error(
        self, api: str, status: int, reason: str, headers: Mapping[str, str] | None, tenant: str = ""
    ) -> None:
        self.metrics.on_client_error(status, tenant, decided=headers is None)
        if headers is not None:
            self.unreadable.add("", self._now(), (1.0,))
        if self._tracing is not None and headers is not None:
            self._tracing.unread(api, status, reason, headers)

    def on_left(self, request: Request) -> None:
        """Count a request whose stream the gateway closed before the pipeline saw it."""
        record = DecisionRecord(request=request, at=self._now(), policy="", outcome=LEFT.reason, status=LEFT.status)
        self.on_decision(record, 0.0)

    def on_protocol_error(self, reason: str) -> None:
        self.metrics.families.protocol_errors.child().inc()
        remedy = "compare the processing_mode of its ext_proc filter with docs/gateway.md"
        log.warning(f"ended a stream of the gateway, which breaks the ext_proc protocol; {remedy}", reason=reason)

    def on_failure(self, instruction: str) -> None:
        """Count an instruction of the pipeline that could not be carried out. The caller logs why."""
        self.metrics.families.failed_instructions.child(instruction).inc()

    def on_stall(self, record: StallRecord) -> None:
        """Log one line when an endpoint seems to hang, one when it does, and one when it makes progress again. Requests
        that try it in between are not logged as warnings."""
        endpoint, level = record.endpoint, LEVELS.index(record.level)
        known, since = self._hangs.get(endpoint, (0, record.time_s - record.silent_s))
        if record.tried or known >= level > 0:
            log.debug("an endpoint that hangs is tested with a request", endpoint=endpoint, level=record.level)
            return
        self.metrics.families.stalls.child(endpoint, record.level).inc()
        if not level:
            self._hangs.pop(endpoint, None)
            what = "makes progress again" if record.silent_s else "that seemed to hang has had no work for a minute"
            log.info(f"an endpoint {what}", endpoint=endpoint, after_s=round(record.time_s - since, 1))
        else:
            self._hangs[endpoint] = level, since
            silent, plausible = round(record.silent_s, 1), round(record.plausible_s, 1)
            how = {"silent_s": silent, "plausible_s": plausible, "leases": record.leases}
            log.warning(f"an endpoint seems to hang: {record.level}", endpoint=endpoint, **how)

    def on_fallback(self, address: str, status: int) -> None:
        """Count a request that the gateway routed without asking the scheduler."""
        if not self._counts_log:
            return
        self.metrics.on_fallback(address)
        # The endpoint is not in the field `endpoint`: repeated lines are limited per endpoint (see `log`).
        self._bypassed.happened(address)

    def look(self, at_end: bool = False) -> None:
        """Log what is counted before it is logged. Call this every second or so, and at the end."""
        self._bypassed.look(at_end)
        self._left.look(at_end)

    def on_upload_ended(self, client: str, received: int, reason: str) -> None:
        """Count an upload of `client` that the gateway ended after `received` bytes."""
        if self._counts_log:
            self.uploads.ended(client, received, reason)

    def on_plugin_error(self, error: PluginError) -> None:
        self.metrics.families.plugin_errors.child(error.plugin).inc()
        log.error("a plugin failed and was left out", plugin=error.plugin, reason=str(error))

    def endpoints(self) -> Sequence[EndpointStatus]:
        """One entry per endpoint, in the order in which they joined."""
        fleet, table = self.fleet, self.fleet.table
        # Convert whole columns: reading single values from numpy's arrays takes three times as long.
        ages = (self._now() - table.sampled_at).tolist()
        leases, pending = table.inflight.tolist(), table.pending_tokens.tolist()
        suspicion, rates = table.suspicion.tolist(), fleet.predictor.rates
        prefill, step, slots = rates.prefill.tolist(), rates.step.tolist(), table.max_seqs.tolist()
        statuses = []
        for slot, endpoint in table.slots():
            age, sample = ages[slot], table.samples[slot]
            statuses.append(
                EndpointStatus(
                    id=endpoint.id,
                    address=endpoint.address,
                    labels=dict(endpoint.labels),
                    rank=endpoint.rank,
                    fresh=age <= fleet.staleness,
                    age_s=age if isfinite(age) else None,
                    last_error=self.unread(endpoint.id),
                    suspicion=level_name(suspicion[slot]),
                    silent_s=round(fleet.stalls.silence(slot, self._now()), 2),
                    waiting=sample.waiting if sample else None,
                    running=sample.running if sample else None,
                    kv_usage=sample.kv_usage if sample else None,
                    leases=int(leases[slot]),
                    pending_tokens=pending[slot],
                    models=sorted(table.base_names(slot, endpoint)),
                    adapters=sorted(
                        filter(None, (table.adapters[slot] or frozenset()) | (table.listed[slot] or frozenset()))
                    ),
                    block_size=sample.block_size or None if sample else None,
                    num_blocks=sample.num_blocks or None if sample else None,
                    prefix_queries=sample.prefix_queries if sample else None,
                    prefix_hits=sample.prefix_hits if sample else None,
                    max_num_seqs=int(slots[slot]) or None,
                    prefill_factor=round(prefill[slot], 4),
                    step_factor=round(step[slot], 4),
                )
            )
        return statuses

    def status(self) -> FleetStatus:
        return FleetStatus(
            endpoints=self.endpoints(),
            index_size=self.fleet.prefix.entries,
            leases=len(self.fleet.ledger),
            scrapes=self._scrapes,
        )
