"""Several schedulers in front of one simulated pool: each decides its share of the requests, and tells the others.

Rules
* A request goes to any of them with equal chance, and its first token and its end are told to that one only. Endpoints
  are told to all.
* Those that share take turns in scraping, as far as each still scrapes once per second. Others all scrape.
* Each tells what it did every `exchange_ms`; the others hear of it `lag_ms` later, or never (`loss`). Who misses
  something asks for a snapshot, which takes the lag twice. On one machine (`at_once`) each hears all that the others
  did before it handles an event.
* The seed of a run is that of the single scheduler: the same requests reach the same servers' engines.
"""

from collections import Counter
from random import Random

from msgspec import Struct

from fairlead.config.registry import Registry
from fairlead.config.schema import Config, ReplicaSettings
from fairlead.core import events as ev
from fairlead.core.fleet import Fleet
from fairlead.core.reports import SharedFleet
from fairlead.core.requests import OF_REQUEST
from fairlead.lab.simulator.simulation import Simulation
from fairlead.lab.simulator.world import Job, Scenario
from fairlead.server.replicas_files import LOOK_S


class Exchange(Struct, frozen=True, kw_only=True):
    """How schedulers hear of each other."""

    schedulers: int = 4
    #: False: they do not.
    shared: bool = True
    exchange_ms: float = 5.0
    lag_ms: float = 10.0
    #: Share of the messages to each that are lost.
    loss: float = 0.0
    #: False: each of those that share scrapes as often as one alone.
    turns: bool = True
    #: All are on one machine.
    at_once: bool = False


class ReplicatedSimulation(Simulation):
    """`exchange` says how many schedulers there are, and what they know of each other."""

    fleet_type: type[Fleet] = SharedFleet

    def __init__(
        self, scenario: Scenario, config: Config, exchange: Exchange, seed: int = 0, *, registry: Registry | None = None
    ) -> None:
        """Raises `ValueError` where KV events are simulated, which only one scheduler hears."""
        if scenario.world.kv_lag_ms >= 0:
            raise ValueError("several schedulers are simulated without KV events; leave out kv_lag_ms")
        super().__init__(scenario, config, seed, registry=registry)
        self.exchange = exchange
        self.pipelines = [self.pipeline]
        self.pipelines += [
            self.build(Random(f"pipeline/{seed}/{n}"), fleet=self.make_fleet()) for n in range(1, exchange.schedulers)
        ]
        chance = Random(f"schedulers/{seed}")
        self._whose = [chance.randrange(exchange.schedulers) for _ in self.jobs]
        self._chance_lost = Random(f"loss/{seed}")
        self._asked: dict[tuple[int, int], float] = {}
        most = round(1e3 / scenario.world.scrape_interval_ms) if exchange.shared and exchange.turns else 1
        self._turns = max(min(exchange.schedulers, most), 1)
        self._scrapes = Counter[str]()
        #: On one machine: what each has yet to read, with who wrote it and when.
        self._unread: list[list[tuple[int, float, bytes]]] = [[] for _ in self.pipelines]
        #: Of what was told: bytes of all batches, and snapshots that were asked for.
        self.bytes = self.snapshots = 0

    def begin(self) -> None:
        for number, pipeline in enumerate(self.pipelines):
            self._turn_to(number)
            self.do(pipeline.start())
            if self.exchange.at_once:
                self._look(number)
            elif self.exchange.shared:
                first = self.exchange.exchange_ms * 1e-3 * (number + 1) / len(self.pipelines)
                self.kernel.call_at(self.kernel.now + first, self._tell, number)

    def decide(self, job: Job) -> None:
        self._turn_to(self._whose[job.index])
        super().decide(job)

    def feed(self, event: ev.Event) -> None:
        if isinstance(event, ev.RequestArrived):
            self.fire(self._whose[event.request.id - 1], event)
        elif isinstance(event, OF_REQUEST):
            self.fire(self._whose[event.request_id - 1], event)
        elif isinstance(event, ev.MetricsSampled | ev.MetricsFailed):
            self._scrapes[event.endpoint_id] += 1
            for number in range(self._scrapes[event.endpoint_id] % self._turns, len(self.pipelines), self._turns):
                self.fire(number, event)
        else:
            for number in range(len(self.pipelines)):
                self.fire(number, event)

    def fire(self, number: int, event: ev.Event) -> None:
        if self.exchange.at_once:
            self._read(number)
        self._turn_to(number)
        super().feed(event)
        if self.exchange.at_once:
            self._write(number)

    def _read(self, number: int) -> None:
        unread, self._unread[number] = self._unread[number], []
        self._turn_to(number)
        for origin, written_at, payload in unread:
            lag_s = self.kernel.now - written_at
            super().feed(ev.PeerHeard(f"s{origin}", payload, lag_s, f"s{number}", at_once=True))
        if unread:
            self._write(number)

    def _write(self, number: int) -> None:
        fleet = self.pipelines[number].fleet
        if isinstance(fleet, SharedFleet):
            payload = fleet.reports.batch(self.kernel.now)
            self.bytes += len(payload)
            for peer in range(len(self.pipelines) if payload else 0):
                if peer != number:
                    self._unread[peer].append((number, self.kernel.now, payload))

    def _look(self, number: int) -> None:
        """Like `fairlead.server.replicas_files`: often while a request waits."""
        self._read(number)
        waits = bool(self.pipelines[number].flow_controller)
        self.kernel.call_at(self.kernel.now + (ReplicaSettings().interval if waits else LOOK_S), self._look, number)

    def _turn_to(self, number: int) -> None:
        self.number, self.pipeline = number, self.pipelines[number]

    def _tell(self, number: int) -> None:
        now, exchange = self.kernel.now, self.exchange
        fleet = self.pipelines[number].fleet
        assert isinstance(fleet, SharedFleet)
        payload = fleet.reports.batch(now)
        self.bytes += len(payload)
        for peer in range(len(self.pipelines)):
            if peer != number:
                if payload and self._chance_lost.random() >= exchange.loss:
                    event = ev.PeerHeard(f"s{number}", payload, exchange.lag_ms * 1e-3, f"s{peer}")
                    self.kernel.call_at(now + exchange.lag_ms * 1e-3, self.fire, peer, event)
                self._catch_up(peer, number, fleet)
        self.kernel.call_at(now + exchange.exchange_ms * 1e-3, self._tell, number)

    def _catch_up(self, number: int, origin: int, fleet: SharedFleet) -> None:
        """A heartbeat tells how many batches there were; who misses one for longer than they take asks."""
        now, lag_s = self.kernel.now, self.exchange.lag_ms * 1e-3
        view = self.pipelines[number].peers.views.get(f"s{origin}")
        missing = fleet.reports.sequence > 0 if view is None else view.gap
        if missing and self._asked.get((number, origin), 0.0) + 4.0 * lag_s + 0.05 < now:
            self._asked[number, origin] = now
            self.kernel.call_at(now + lag_s, self._answer, number, origin)

    def _answer(self, number: int, origin: int) -> None:
        fleet = self.pipelines[origin].fleet
        assert isinstance(fleet, SharedFleet)
        self.snapshots += 1
        payload = b"".join(fleet.reports.snapshot())
        snapshot = ev.PeerSnapshot(f"s{origin}", payload)
        self.kernel.call_at(self.kernel.now + self.exchange.lag_ms * 1e-3, self.fire, number, snapshot)
