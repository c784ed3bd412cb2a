"""A pool that an autoscaler makes larger and smaller while a simulation runs, by one signal or another.

The controller is Kubernetes' HorizontalPodAutoscaler with what its users set: it looks every `SYNC_S`, grows at once,
and shrinks to the largest number that the last `STABLE_S` asked for. A server serves `startup_s` after it was ordered,
with an empty cache. One that goes gets nothing new and ends what it has; it is paid for until then.
"""

from collections import deque
from collections.abc import Callable
from math import ceil

from fairlead.compat.load import load
from fairlead.core.demand import Demand, Objective, Totals
from fairlead.core.endpoint import Sample
from fairlead.core.events import EndpointDown
from fairlead.core.records import DecisionRecord, OutcomeRecord, StallRecord
from fairlead.lab.simulator.simulation import START, Simulation
from fairlead.lab.simulator.world import WARM_UP, Scenario, replicas
from fairlead.lab.workload.arrivals import tides
from fairlead.lab.workload.conversation import SharedPrefix, conversation, shared_prefix
from fairlead.lab.workload.generate import CATALOGUE

SYNC_S, STABLE_S = 15.0, 300.0
#: A metric within this share of its target changes nothing (the autoscaler's tolerance).
TOLERANCE = 0.1
#: How many servers there should be; the present number where it cannot be told.
Signal = Callable[["Autoscaler"], int]


def day(workload: str, seconds: float, servers: int, seed: int = 0) -> Scenario:
    """A day for an autoscaler, with ten times as much load at noon as at night. `groups`: 60 groups that each share a
    prompt of 6,000 tokens, 20 requests per second at noon. `chat`: conversations with nothing in common, of which 3
    begin per second at noon."""
    if workload == "groups":
        spec, arrivals = SharedPrefix(groups=60, output_tokens=300), tides(2.0, 20.0, seconds)
        made = shared_prefix(spec, arrivals=arrivals, seconds=seconds, seed=seed)
    else:
        chat = CATALOGUE["interactive-chat"].spec
        made = conversation(chat, arrivals=tides(0.3, 3.0, seconds), seconds=seconds, seed=seed)
    pool = replicas(servers, block_size=80 if workload == "groups" else 64)
    return Scenario(name=f"day of {workload}", workload=made, replicas=pool)


class Autoscaler:
    """Run once. All of the scenario's servers may be used, from `least` on; `first` are there at the beginning."""

    def __init__(
        self, scenario: Scenario, policy: str, signal: Signal, *, first: int, least: int = 1,
        objective: Objective | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        self.simulation = Simulation(scenario, load(policy, need_endpoints=False), seed, watch=self._watch)
        self.demand = Demand(objective)
        self._signal, self._least = signal, least
        #: Servers that serve, were ordered, or end what they have, by index.
        self.serving = set(range(first))
        self._ordered: dict[int, float] = {}
        self._leaving: set[int] = set()
        self._asked: deque[tuple[float, int]] = deque()
        self._routed = self._tokens = self._cached = 0
        self._paid_to = START + WARM_UP
        self.server_seconds = 0.0

    def run(self) -> Simulation:
        sim = self.simulation
        sim.kernel.call_at(START, self._begin)
        sim.kernel.call_at(START + WARM_UP + SYNC_S, self._tick)
        sim.run()
        self._pay()
        return sim

    def waiting(self) -> float:
        """Requests that wait, in Fairlead and in engines."""
        flow = self.simulation.pipeline.flow_controller
        return (0 if flow is None else len(flow.flow)) + sum(sample.waiting or 0.0 for sample in self._samples())

    def memory(self) -> float:
        """Sum of the shares of KV memory in use."""
        return sum(sample.kv_usage or 0.0 for sample in self._samples())

    def wanted(self) -> int:
        """What `fairlead_desired_replicas` says."""
        pipeline, now = self.simulation.pipeline, self.simulation.kernel.now
        desired = self.demand.desired(pipeline.fleet, pipeline.flow_controller, now)
        return len(self.serving) if desired is None else desired

    def _samples(self) -> list[Sample]:
        samples = [self.simulation.servers[index].sample() for index in sorted(self.serving)]
        return [sample for sample in samples if sample is not None]

    def _watch(self, record: DecisionRecord | OutcomeRecord | StallRecord) -> None:
        if isinstance(record, DecisionRecord) and record.endpoint:
            self._routed += 1
            self._tokens += record.request.prompt_tokens
            self._cached += record.hit_tokens

    def _begin(self) -> None:
        for index in range(len(self.simulation.servers)):
            if index not in self.serving:
                self.simulation.feed(EndpointDown(self.simulation.servers[index].endpoint.id))

    def _tick(self) -> None:
        now = self.simulation.kernel.now
        self._pay()
        self.demand.observe(Totals(now, self._routed, self._tokens, self._cached))
        self._asked.append((now, self._signal(self)))
        while self._asked[0][0] < now - STABLE_S:
            self._asked.popleft()
        there = len(self.serving) + len(self._ordered)
        asked = self._asked[-1][1]
        number = asked if asked > there else min(there, max(count for _, count in self._asked))
        number = min(max(number, self._least), len(self.simulation.servers))
        for _ in range(there, number):
            self._order(now)
        for _ in range(number, there):
            self._release()
        self.simulation.kernel.call_at(now + SYNC_S, self._tick)

    def _order(self, now: float) -> None:
        used = self.serving | self._leaving | self._ordered.keys()
        free = [index for index in range(len(self.simulation.servers)) if index not in used]
        if free:
            self._ordered[free[0]] = now
            self.simulation.kernel.call_at(now + self.demand.objective.startup_s, self._serves, free[0], now)

    def _serves(self, index: int, ordered: float) -> None:
        if self._ordered.get(index) == ordered:  # else it is not wanted any more
            del self._ordered[index]
            self.simulation.servers[index].restart()
            self.simulation.join(index)
            self.serving.add(index)

    def _release(self) -> None:
        if self._ordered:
            self._ordered.popitem()
            return
        index = max(self.serving)
        self.serving.discard(index)
        self._leaving.add(index)
        self.simulation.feed(EndpointDown(self.simulation.servers[index].endpoint.id))

    def _pay(self) -> None:
        sim = self.simulation
        self._leaving = {index for index in self._leaving if not sim.servers[index].idle}
        there = len(self.serving) + len(self._ordered) + len(self._leaving)
        self.server_seconds += there * (sim.kernel.now - self._paid_to)
        self._paid_to = sim.kernel.now


def by_demand(pool: Autoscaler) -> int:
    return pool.wanted()


def by_queue(target: float) -> Signal:
    """Requests that wait per server, at most `target`."""
    return lambda pool: _proportional(len(pool.serving), pool.waiting() / max(len(pool.serving), 1), target)


def by_memory(target: float) -> Signal:
    """Share of KV memory in use per server, at most `target`."""
    return lambda pool: _proportional(len(pool.serving), pool.memory() / max(len(pool.serving), 1), target)


def _proportional(there: int, metric: float, target: float) -> int:
    ratio = metric / target
    return there if abs(ratio - 1.0) <= TOLERANCE else ceil(there * ratio)
