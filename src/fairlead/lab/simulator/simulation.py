"""One run: the workload's clients, the pipeline's driver, the gateway, servers and faults, all on one heap of timers.

The events of the pipeline and their times (as from the live server beside its embedded gateway)
* `RequestArrived`: `decision_ms` after the client sent the request. `Route` or `Reject` may be the result of any later
  call: a policy that holds requests back may answer at a later event.
* `FirstTokenSeen` when the first token passes the gateway, `ResponseEnded` when the access log reports the end, with
  token counts for the first few answers and a share of the others.
* `MetricsSampled` in each scrape interval per server that answers, `MetricsFailed` for a server that does not. An idle
  server's unchanged page is reported once per second.
* For a pair of servers (prefill, decode), only what the gateway sees: nothing before the decoding server's first token.
* `StreamLost` for a client that left before its first token.

Rules
* Nothing here knows the policy, and nothing in the pipeline knows that time is virtual.
* Everything that happens is an event on the kernel's heap, in the order of (time, order of setting). No sets are
  iterated, and nothing depends on Python's hashes: two runs with one seed are equal on every version of Python.
* Nobody scrapes in a long pause of the workload (`QUIET_S`): a day of it would take a minute.
"""

import heapq
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from random import Random

from msgspec.structs import replace
from xxhash import xxh3_64

from fairlead.compat.load import load
from fairlead.config.building import build_pipeline, given
from fairlead.config.registry import Registry
from fairlead.config.schema import Config
from fairlead.core import events as ev
from fairlead.core.clock import Timer, VirtualClock
from fairlead.core.endpoint import Sample
from fairlead.core.errors import PluginError
from fairlead.core.fleet import Fleet
from fairlead.core.instructions import Evict, Instruction, Reject, Route, SetTimer
from fairlead.core.policy import Policy
from fairlead.core.records import DecisionRecord, OutcomeRecord, StallRecord
from fairlead.core.request import Usage
from fairlead.lab.engine.request import EngineRequest, StepResult
from fairlead.lab.simulator.prompts import Prompts
from fairlead.lab.simulator.server import Blocks, Hooks, LateEvents, Server
from fairlead.lab.simulator.world import WARM_UP, Fault, Job, Scenario, Status
from fairlead.server.plugin_watch import watched

#: Kernel seconds at which a run begins; the workload begins `WARM_UP` later. Not 0, so that no code can confuse it with
#: "never" or a wall clock.
START = 1_000.0
#: Seconds after the last request and before the next one in which servers are scraped, if there is more time between.
QUIET_S = 300.0
#: The failure reason of a request that was still in progress when the run ended.
NOT_OVER = "not over at the end"
#: The configuration around a policy that is passed as an object.
_GIVEN = "flowControl: {enabled: false}\n"


class Simulation:
    """One run. `policy` is a configuration, of which only the scheduling part matters, or a policy object.

    `watch` sees every record of a decision, an outcome or a stall; `validate` checks all invariants after every event;
    `registry` has plugins that the configuration names in addition to the installed ones; `snapshots`: see
    `build_pipeline`. Raises `PluginError` if the policy cannot be built.
    """

    fleet_type: type[Fleet] = Fleet

    def __init__(
        self,
        scenario: Scenario,
        policy: Policy | Config,
        seed: int = 0,
        *,
        watch: Callable[[DecisionRecord | OutcomeRecord | StallRecord], None] | None = None,
        validate: bool = False,
        registry: Registry | None = None,
        kernel: VirtualClock | None = None,
        snapshots: bool = False,
    ) -> None:
        self.scenario = scenario
        self.world = world = scenario.world
        self.kernel = kernel or VirtualClock(START)
        self.plugin_errors: list[PluginError] = []
        self._events: LateEvents | None = None
        if world.kv_lag_ms >= 0:
            self._events = LateEvents(self.kernel, world.kv_lag_ms * 1e-3)
        config = policy if isinstance(policy, Config) else load(_GIVEN, need_endpoints=False)
        self.build = partial(
            build_pipeline,
            config,
            self.kernel,
            build=None if isinstance(policy, Config) else given(policy),
            on_plugin_error=self.plugin_errors.append,
            registry=registry,
            snapshots=snapshots,
        )
        self.make_fleet = partial(
            self.fleet_type, config.ledger.lease_ttl, world.staleness_s, exact=self._events, prior=world.prior
        )
        #: The pipeline that receives events now, and its number if there are several (`bench/_replicated.py`).
        self.pipeline, self.number = self.build(Random(f"pipeline/{seed}"), fleet=self.make_fleet()), 0
        self._chance, self._scrape_chance = Random(f"world/{seed}"), Random(f"scrapes/{seed}")
        self.prompts = Prompts(scenario.workload, world)
        self._watch, self._validate = watch, validate
        self.network = world.network_ms * 1e-3
        self.servers = [
            Server(i, replica, self.kernel, self._stepped, self._hooks(i), seed)
            for i, replica in enumerate(scenario.replicas)
        ]
        for server in self.servers:
            machine = server.replica.machine
            server.share_machine([s for s in self.servers if machine and s.replica.machine == machine])
        self._by_address = {server.endpoint.address: index for index, server in enumerate(self.servers)}
        self._by_endpoint = {server.endpoint.id: index for index, server in enumerate(self.servers)}
        self.jobs = self._make_jobs()
        self._adapters = frozenset(job.record.lora for job in self.jobs) - {""}
        self.open = len(self.jobs)
        #: Requests in progress, when the last one ended, and a heap of the times of those that will arrive.
        self._going, self._calm_since, self._coming = 0, START, list[float]()
        self._decided = xxh3_64()
        self._timers: dict[tuple[int, str], Timer] = {}
        #: For each streamed first token: whether it came within the band of its forecast.
        self.in_band: list[bool] = []
        #: Per server: the last sample that was reported, and when.
        self._scraped: list[tuple[Sample | None, float]] = [(None, -1.0)] * len(self.servers)
        self._usage_left = world.usage_first
        self._children: dict[str, list[Job]] = {}

    @property
    def decision_hash(self) -> str:
        """The hash of the sequence of (request, endpoint) in the order of the decisions."""
        return self._decided.hexdigest()

    @watched()
    def run(self) -> bool:
        """Run to the end of the last request; False if some were not over `drain_s` after the last arrival."""
        kernel, scenario = self.kernel, self.scenario
        for index in range(len(self.servers)):
            self.join(index)
        self.begin()
        self._scrape_all()
        if any(replica.dynamic_adapters for replica in scenario.replicas):
            self.kernel.call_at(kernel.now + self.world.models_s, self._list_again)
        self._dispatch()
        for fault in scenario.faults:
            self._plan(fault)
        last = START + WARM_UP + scenario.workload.duration_s / scenario.speedup
        over = kernel.run(lambda: self.open > 0, last + self.world.drain_s)
        for job in self.jobs:
            if job.status == "waiting":
                self._over(job, "failed", NOT_OVER)
        # The ends of the last requests have not reached the scheduler yet.
        kernel.run(lambda: True, kernel.now + self.world.end_report_ms * 1e-3 + self.network)
        return over

    def begin(self) -> None:
        """Start the pipeline, before any event except those of endpoints."""
        self.do(self.pipeline.start())

    def join(self, index: int) -> None:
        """Add a server to the pool and read its list of models."""
        self.feed(ev.EndpointUp(self.servers[index].endpoint))
        self._list_models(index)

    def _list_models(self, index: int) -> None:
        """Report the server's adapters: all of the workload if it has slots for adapters, otherwise none; with dynamic
        adapters, those that were requested from it."""
        server = self.servers[index]
        if not self._adapters:
            return
        loaded = self._adapters if server.replica.engine.max_loras else frozenset[str]()
        if server.replica.dynamic_adapters:
            loaded = frozenset(server.asked_for)
        self.feed(ev.AdaptersListed(server.endpoint.id, loaded))

    def _list_again(self) -> None:
        for index, server in enumerate(self.servers):
            if server.replica.dynamic_adapters and server.up:
                self._list_models(index)
        self.kernel.call_at(self.kernel.now + self.world.models_s, self._list_again)

    # ---- clients ----

    def _make_jobs(self) -> list[Job]:
        begin = START + WARM_UP
        speedup = self.scenario.speedup
        return [
            Job(index, record, begin + record.arrival_us * 1e-6 / speedup)
            for index, record in enumerate(self.scenario.workload.records)
        ]

    def _dispatch(self) -> None:
        """Schedule the arrivals. In `think` dispatch, a request with a parent waits for the parent's end."""
        waits = self.scenario.workload.dispatch == "think"
        known = {job.record.id for job in self.jobs} if waits else set()
        for job in self.jobs:
            if waits and job.record.parent in known:
                self._children.setdefault(job.record.parent, []).append(job)
            else:
                self._arrive_at(job.arrived, job)

    def _arrive_at(self, when: float, job: Job) -> None:
        heapq.heappush(self._coming, when)
        self.kernel.call_at(when, self._arrive, job)

    def _arrive(self, job: Job) -> None:
        world = self.world
        heapq.heappop(self._coming)
        self._going += 1
        job.arrived = self.kernel.now
        record = job.record
        patience = record.cancel_after_ms * 1e-3 or world.patience_s
        if patience:
            self.kernel.call_at(job.arrived + patience, self._cancel, job)
        self.kernel.call_at(job.arrived + world.decision_ms * 1e-3, self.decide, job)

    def decide(self, job: Job) -> None:
        if job.status != "waiting":
            return
        pipeline = self.pipeline
        job.request = self.prompts.request(job.index, job.record, job.arrived, pipeline.tokens)
        if self._events is not None:
            job.request = replace(job.request, blocks=self._blocks_of(job))
        self.feed(ev.RequestArrived(job.request))

    def _cancel(self, job: Job) -> None:
        if job.status != "waiting":
            return
        seen = job.first_at >= 0 and job.first_at <= self.kernel.now
        self._over(job, "cancelled", "client gone")
        index, served = job.leg()
        if served is not None and index >= 0:
            self._abort_later(job, index, served)
        if job.request is not None:
            gone = ev.ResponseEnded(request_id=job.request.id, status=200 if seen else 0, client_gone=True)
            self.feed(gone if seen else ev.StreamLost(job.request.id))

    def _abort_later(self, job: Job, index: int, served: EngineRequest) -> None:
        """Abort the request on the server when the server notices, one network delay from now."""
        engine, reaches = self.servers[index].engine, self.kernel.now + self.network
        for each in (served, *job.siblings):
            self.kernel.call_at(reaches, self._abort, index, each, engine)

    def _abort(self, index: int, served: EngineRequest, engine: object) -> None:
        server = self.servers[index]
        if server.engine is engine:
            server.abort(served)

    def _over(self, job: Job, status: Status, reason: str = "") -> None:
        if job.status != "waiting":
            return
        job.status = status
        job.reason = reason
        job.ended_at = max(job.ended_at, self.kernel.now) if status != "done" else job.ended_at
        self.open -= 1
        self._going -= 1
        self._calm_since = self.kernel.now
        for child in self._children.pop(job.record.id, ()):
            pause_s = child.record.think_ms * 1e-3 / self.scenario.speedup
            self._arrive_at(job.ended_at + pause_s, child)

    # ---- the pipeline's driver ----

    def feed(self, event: ev.Event) -> None:
        instructions = self.pipeline.handle(event)
        if instructions:
            self.do(instructions)
        if self._validate:
            self.pipeline.validate()
            for server in self.servers:
                server.engine.validate()

    def do(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, DecisionRecord | OutcomeRecord | StallRecord):
                if isinstance(instruction, OutcomeRecord):
                    self._judge(instruction)
                if self._watch is not None:
                    self._watch(instruction)
            elif isinstance(instruction, Route):
                self._route(instruction)
            elif isinstance(instruction, Reject):
                self._reject(instruction)
            elif isinstance(instruction, Evict):
                self._evict(instruction)
            elif isinstance(instruction, SetTimer):
                self._set_timer(instruction)

    def _judge(self, outcome: OutcomeRecord) -> None:
        forecast, came_ms = outcome.forecast, outcome.sent_ttft_ms
        if forecast is not None and forecast.ttft_ms > 0.0 and came_ms >= 0.0 and outcome.request.stream:
            self.in_band.append(forecast.low_ms <= came_ms <= forecast.high_ms)

    def _route(self, route: Route) -> None:
        job = self.jobs[route.request_id - 1]
        self._decided.update(f"{job.index}>{route.endpoint.id}{route.prefill and '<'}{route.prefill};".encode())
        if job.status != "waiting":
            return
        job.server = self._by_endpoint[route.endpoint.id]
        if route.prefill:
            self._send_prefill(job, route.prefill)
        else:
            server, reaches = self.servers[job.server], self.kernel.now + self.network
            ready = server.received(reaches, job.record.in_tokens)
            self.kernel.call_at(ready + server.overhead_s, self._deliver, job)

    def _reject(self, reject: Reject) -> None:
        job = self.jobs[reject.request_id - 1]
        self._decided.update(f"{job.index}>;".encode())
        self._over(job, "shed", reject.reason)

    def _evict(self, evict: Evict) -> None:
        """End the request at its gateway; the server notices later."""
        job = self.jobs[evict.reject.request_id - 1]
        index, served = job.leg()
        if job.status == "waiting" and served is not None:
            self._over(job, "shed", evict.reject.reason)
            self._abort_later(job, index, served)
            self.kernel.call_at(self.kernel.now, self.feed, ev.StreamLost(evict.reject.request_id))

    def _set_timer(self, timer: SetTimer) -> None:
        key = self.number, timer.name
        old = self._timers.get(key)
        if old is not None:
            old.cancel()
        self._timers[key] = self.kernel.call_at(timer.at, self.fire, self.number, ev.TimerFired(timer.name))

    def fire(self, number: int, event: ev.Event) -> None:
        """Feed an event that only the scheduler with this number receives."""
        self.feed(event)

    # ---- servers ----

    def _hooks(self, index: int) -> Hooks | None:
        """The hooks by which a server publishes KV events; `None` = it publishes none."""
        if self._events is None:
            return None
        table = self.pipeline.fleet.table
        return Hooks(self._events, lambda: table.slot(self.servers[index].endpoint.id))

    def _blocks_of(self, job: Job) -> Blocks:
        """The blocks of the prompt as in the engines, which all divide prompts the same way. A prompt that every server
        refuses has none."""
        record, size = job.record, self.scenario.replicas[0].engine.block_size
        if record.in_tokens > max(replica.engine.max_model_len for replica in self.scenario.replicas):
            return [], size, record.in_tokens
        served = self.prompts.engine_request(job.index, record, size)
        return (served.hashes or [])[: record.in_tokens // size], size, record.in_tokens

    def _deliver(self, job: Job) -> None:
        if job.status == "waiting" and self._accepted(job, job.server, job.record.out_tokens):
            self.answer(job, self._engine_request(job, job.server))

    def answer(self, job: Job, served: EngineRequest) -> None:
        """Deliver the request to the server that answers it, as one engine request per wanted answer."""
        size, record = self.servers[job.server].replica.engine.block_size, job.record
        job.served, job.left = served, record.n
        job.siblings = tuple(
            self.prompts.engine_request(job.index, record, size, loaded=served.loaded, choice=choice)
            for choice in range(1, record.n)
        )
        for each in (served, *job.siblings):
            if job.status == "waiting":
                self.put(job, job.server, each)

    def put(self, job: Job, index: int, served: EngineRequest) -> None:
        """Deliver a request, or one part of it, to a server."""
        if self._accepted(job, index, served.max_tokens):
            self.servers[index].add(served)

    def _accepted(self, job: Job, index: int, max_tokens: int) -> bool:
        """Whether the server is up and takes the request, which fails otherwise. Asked before the blocks of the prompt
        are made: those of a prompt that no server takes may need any amount of memory."""
        server, record = self.servers[index], job.record
        if not server.up:
            self.broken(job, "connection refused")
            return False
        try:
            server.replica.engine.check(record.in_tokens, max_tokens, record.lora)
        except ValueError as error:
            self.broken(job, str(error), status=400)
            return False
        return True

    def broken(self, job: Job, reason: str, status: int = 503) -> None:
        """Fail a request that the server refused or broke off."""
        if job.status == "waiting":
            self._over(job, "failed", reason)
            assert job.request is not None
            self.feed(ev.ResponseEnded(request_id=job.request.id, status=status))

    # ---- faults ----

    def _plan(self, fault: Fault) -> None:
        """Set the timers of a fault. Times count from the workload's start."""
        if not 0 <= fault.replica < len(self.servers):
            raise ValueError(f"fault {fault.kind!r} names replica {fault.replica} of {len(self.servers)}")
        begin = self.kernel.now + WARM_UP + fault.at_s
        self.kernel.call_at(begin, self._turn, fault, True)
        if fault.for_s > 0:
            self.kernel.call_at(begin + fault.for_s, self._turn, fault, False)

    def _turn(self, fault: Fault, on: bool) -> None:
        """Begin a fault, or end it."""
        server = self.servers[fault.replica]
        if fault.kind == "slow":
            server.slow(fault.factor if on else 1.0)
        elif fault.kind == "hang":
            server.hang(on)
        elif fault.kind == "down":
            self._crash(fault.replica) if on else server.restart()
            self.kernel.call_at(self.kernel.now + self.world.detect_s, self._notice, fault.replica, not on)
        elif fault.kind != "away":
            server.freeze(fault.kind if on else "")
        elif on:
            self.feed(ev.EndpointDown(server.endpoint.id))
        else:
            if server.idle:
                server.restart()
            self.join(fault.replica)

    def _crash(self, index: int) -> None:
        self.servers[index].crash()
        for job in self.jobs:
            if job.leg()[0] == index and job.leg()[1] is not None:
                self.broken(job, "connection lost", status=0)

    def _notice(self, index: int, up: bool) -> None:
        """The scheduler learns that a server went down or came back, unless that has changed since."""
        server = self.servers[index]
        if server.up and up:
            self.join(index)
        elif not (server.up or up):
            self.feed(ev.EndpointDown(server.endpoint.id))

    # ---- separate prefill and decode ----
    #
    # A request's prompt on one server, then its KV cache in transfer, then its answer on another server.
    #
    # What the sidecar of a decoding server does with the header `x-prefiller-host-port`, in order
    # * It has the prompt computed elsewhere, as a request for one token. The client does not see this token.
    # * It sends the request to its own server, which fetches the KV blocks that it lacks (`Handover.seconds`), computes
    #   the last token of the prompt again, because only a computed token gives logits, and decodes.
    #
    # Simplified: the blocks on the prefill server may be evicted as soon as the prompt is computed, and those on the
    # decoding server are taken when the KV has arrived. In reality, both are held a little longer. A prefill that fails
    # makes the request fail, as in the reference's sidecar.

    def _send_prefill(self, job: Job, prefill_address: str) -> None:
        job.prefill_server = self._by_address[prefill_address]
        # From the gateway to the decoder's sidecar, and from there to the prefill server.
        self.kernel.call_at(self.kernel.now + 2 * self.network, self._prefill, job)

    def _prefill(self, job: Job) -> None:
        if job.status != "waiting":
            return
        if not self.servers[job.server].up:
            self.broken(job, "connection refused")
            return
        if self._accepted(job, job.prefill_server, 1):
            job.prefilled = self._engine_request(job, job.prefill_server, max_tokens=1)
            self.put(job, job.prefill_server, job.prefilled)

    def _engine_request(self, job: Job, server: int, *, max_tokens: int = 0, loaded: int = 0) -> EngineRequest:
        size = self.servers[server].replica.engine.block_size
        return self.prompts.engine_request(job.index, job.record, size, max_tokens=max_tokens, loaded=loaded)

    def _prefilled(self, job: Job) -> None:
        """The prompt is computed; transfer its KV to the decoding server."""
        assert job.prefilled is not None
        job.cached_tokens = job.prefilled.cached_tokens
        served = self._engine_request(job, job.server, loaded=job.record.in_tokens)
        server = self.servers[job.server]
        moved = max(served.prompt_tokens - server.cached_tokens(served), 0)
        took = self.scenario.handover.seconds(moved * server.replica.kv_bytes)
        self.kernel.call_at(job.prefilled.finished_at + 2 * self.network + took, self._moved, job, served)

    def _moved(self, job: Job, served: EngineRequest) -> None:
        if job.status == "waiting":
            self.answer(job, served)

    # ---- progress ----

    def _stepped(self, result: StepResult) -> None:
        network, kernel = self.network, self.kernel
        for served in result.first:
            job = self.jobs[int(served.id)]
            if served is job.prefilled or job.first_at >= 0.0:
                continue
            job.first_at = served.first_token_at + network
            if job.prefilled is None:
                job.cached_tokens = served.cached_tokens
            if served.limit > 1:
                kernel.call_at(job.first_at, self._first_token, job)
        for served in result.finished:
            job = self.jobs[int(served.id)]
            if served is job.prefilled:
                self._prefilled(job)
                continue
            job.left -= 1
            if not job.left:
                kernel.call_at(served.finished_at + network, self._finished, job, served)

    def _first_token(self, job: Job) -> None:
        if job.status == "waiting" and job.record.stream and self.world.watched:
            self.feed(ev.FirstTokenSeen(job.index + 1))

    def _finished(self, job: Job, served: EngineRequest) -> None:
        if job.status != "waiting" or job.served is None:
            return
        job.ended_at = served.finished_at + self.network
        answers = (job.served, *job.siblings)
        job.output_tokens = sum(each.output for each in answers)
        job.preemptions = sum(each.preemptions for each in answers)
        self._over(job, "done")
        if self.world.watched and (served.limit == 1 or not job.record.stream):
            self.feed(ev.FirstTokenSeen(job.index + 1))
        self.kernel.call_at(self.kernel.now + self.world.end_report_ms * 1e-3, self._report_end, job)

    def _report_end(self, job: Job) -> None:
        usage = None
        self._usage_left -= 1
        if self._usage_left >= 0 or self._chance.random() < self.world.usage_share:
            usage = Usage(
                prompt_tokens=job.record.in_tokens, completion_tokens=job.output_tokens, cached_tokens=job.cached_tokens
            )
        self.feed(
            ev.ResponseEnded(
                request_id=job.index + 1,
                status=200,
                usage=usage,
                ttft_ms=job.ttft_ms,
                duration_ms=job.e2e_ms,
                response_bytes=self._response_bytes(job),
            )
        )

    def _response_bytes(self, job: Job) -> int:
        """Bytes of the response: 4.6 per token, give or take a tenth, and an envelope for each streamed token."""
        text = 4.6 * Random(f"answer/{job.index}").gauss(1.0, 0.1) * job.output_tokens
        return round(text + (180 * job.output_tokens if job.record.stream else 420))

    # ---- scrapes ----

    def _scrape_all(self) -> None:
        """Scrape all servers now. With jitter, each server has its own schedule from then on."""
        interval_s, jitter = self.world.scrape_interval_ms * 1e-3, self.world.scrape_jitter
        for index in range(len(self.servers)):
            self._scrape(index)
            if jitter:
                self.kernel.call_at(self.kernel.now + interval_s * self._scrape_chance.random(), self._scrape_on, index)
        if not jitter:
            self.kernel.call_at(self._after(interval_s), self._scrape_all)

    def _after(self, pause_s: float) -> float:
        """Return the time of the next scrape, if it is due in `pause_s`: later in a long pause of the workload."""
        now, coming = self.kernel.now, self._coming
        if self._going or not coming or self.scenario.faults or now < self._calm_since + QUIET_S:
            return now + pause_s
        return now + max(ceil((coming[0] - QUIET_S - now) / pause_s), 1) * pause_s

    def _scrape_on(self, index: int) -> None:
        self._scrape(index)
        jitter = self._scrape_chance.uniform(-self.world.scrape_jitter, self.world.scrape_jitter)
        pause_s = self.world.scrape_interval_ms * 1e-3 * (1.0 + jitter)
        self.kernel.call_at(self._after(pause_s), self._scrape_on, index)

    def _scrape(self, index: int) -> None:
        """Read a server's page now; the scheduler receives it `scrape_age_ms` later."""
        now, server = self.kernel.now, self.servers[index]
        sample = server.sample()
        before, reported_at = self._scraped[index]
        idle = sample is not None and not (sample.running or sample.waiting)
        if idle and sample == before and now < reported_at + 1.0:
            return
        self._scraped[index] = (sample, now)
        name = server.endpoint.id
        event = ev.MetricsFailed(name, "no answer") if sample is None else ev.MetricsSampled(name, now, sample)
        self.kernel.call_at(now + self.world.scrape_age_ms * 1e-3, self.feed, event)
