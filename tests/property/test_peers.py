"""Whatever mix of loss, repetition and reordering: after quiet, all schedulers of a pool believe the same."""

from random import Random

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.events import (
    EndpointDown,
    EndpointUp,
    FirstTokenSeen,
    MetricsSampled,
    PeerHeard,
    PeerLost,
    PeerSnapshot,
    RequestArrived,
    ResponseEnded,
    StreamLost,
)
from fairlead.core.instructions import Route
from fairlead.core.policy import Picked
from fairlead.core.prefix import ChainHasher
from fairlead.core.reports import SharedFleet
from fairlead.core.request import Request, Usage
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.testing import SimClock

ENDPOINTS = [Endpoint(f"e{number}", f"10.0.0.{number}:8000") for number in range(3)]
HASHER = ChainHasher()
TEXT = Random(1).randbytes(20_000)
#: Of the table: what the leases of all add up to.
SUMS = ("inflight", "kv_tokens", "growth_tokens")


class Anywhere:
    """A policy that chooses by chance."""

    name = "anywhere"

    def choose(self, request, fleet, context):
        slots = fleet.table.slots()
        return Picked(slots[int(context.rng.random() * len(slots))][0])


class Replica:
    def __init__(self, number, clock):
        self.name, self.clock = f"r{number}", clock
        fleet = SharedFleet(lease_ttl=1e6)
        self.pipeline = Pipeline(clock, Random(number), fleet, Anywhere(), TokenEstimator())
        for endpoint in ENDPOINTS:
            self.feed(EndpointUp(endpoint))
        self.open = []
        #: Messages on their way here.
        self.inbox = []

    @property
    def fleet(self):
        return self.pipeline.fleet

    def feed(self, event):
        instructions = self.pipeline.handle(event)
        self.pipeline.validate()
        return instructions

    def arrive(self, random):
        self.open.append(number := len(self.open) + 1)
        size, branch = random.choice([300, 5000, 20_000]), random.choice([0, 0, 4000])
        prompt = TEXT[:branch] + random.choice([b"a", b"b"]) * 3000 if branch else TEXT[:size]
        request = Request(
            number, self.clock.time(), prompt_tokens=size // 4, prompt_bytes=size, stream=random.random() < 0.7,
            prefix=HASHER.chain(b"m", prompt),
        )  # fmt: skip
        assert any(isinstance(done, Route) for done in self.feed(RequestArrived(request)))

    def end(self, random):
        if self.open:
            number = random.choice(self.open)
            kind = random.randrange(5)
            if kind == 0:
                self.feed(FirstTokenSeen(number))
            elif kind == 1:
                self.feed(StreamLost(number))
            elif kind == 4:
                self.feed(ResponseEnded(request_id=number, status=503))
            else:
                self.feed(ResponseEnded(request_id=number, status=200, usage=Usage(completion_tokens=kind * 20)))

    def sums(self):
        table = self.fleet.table
        slots = [table.slot(endpoint.id) for endpoint in ENDPOINTS]
        return {name: getattr(table, name)[slots].tolist() for name in SUMS}

    def avoided(self):
        table = self.fleet.table
        return [bool(table.ejected_until[table.slot(endpoint.id)] > self.clock.time()) for endpoint in ENDPOINTS]

    def prefixes(self):
        index, table = self.fleet.prefix, self.fleet.table
        return [{block for block in index.newest(table.slot(e.id), 10_000) if block > 0} for e in ENDPOINTS]


def step(replicas, clock, random):
    replica, peers = (chosen := random.choice(replicas)), [other for other in replicas if other is not chosen]
    kind = random.randrange(12)
    clock.advance(0.001)
    if kind < 4:
        replica.arrive(random)
    elif kind < 6:
        replica.end(random)
    elif kind < 8:
        batch = replica.fleet.reports.batch(clock.time())
        for other in peers:
            if batch and random.random() < 0.8:
                other.inbox += [PeerHeard(replica.name, batch)] * random.choice([1, 1, 2])
    elif kind < 10 and replica.inbox:
        replica.feed(replica.inbox.pop(random.randrange(len(replica.inbox))))
    elif kind == 10:
        snapshot = b"".join(replica.fleet.reports.snapshot())
        random.choice(peers).inbox.append(PeerSnapshot(replica.name, snapshot))
    else:
        disturb(replica, peers, clock, random)


def disturb(replica, peers, clock, random):
    endpoint = random.choice(ENDPOINTS)
    kind = random.randrange(3)
    if kind == 0:
        replica.feed(PeerLost(random.choice(peers).name))
    elif kind == 1:
        page = Sample(waiting=random.choice([0.0, 2.0]), running=random.choice([0.0, 1.0, 5.0]))
        replica.feed(MetricsSampled(endpoint.id, clock.time() - random.choice([0.0, 0.01]), page))
    elif len(replica.fleet.table.slots()) > 1:
        # It is away for a moment here, and the others do not see that.
        replica.feed(EndpointDown(endpoint.id))
        replica.feed(EndpointUp(endpoint))


def quiet(replicas, clock):
    """All that is on its way arrives, and whoever misses something is given it, until nobody has anything to tell."""
    for _ in range(100):
        busy = tell_all(replicas, clock)
        for replica in replicas:
            busy |= bool(replica.inbox)
            for event in replica.inbox:
                replica.feed(event)
            replica.inbox = []
        busy |= catch_up(replicas)
        if not busy:
            return
    raise AssertionError("somebody always has something to tell")


def tell_all(replicas, clock):
    told = False
    for replica in replicas:
        batch = replica.fleet.reports.batch(clock.time())
        for other in replicas:
            if other is not replica and batch:
                other.inbox.append(PeerHeard(replica.name, batch))
                told = True
    return told


def catch_up(replicas):
    missed = False
    for replica in replicas:
        for other in replicas:
            view = other.pipeline.peers.views.get(replica.name)
            sequence = replica.fleet.reports.sequence
            if other is not replica and sequence and (view is None or view.gap or view.sequence < sequence):
                other.feed(PeerSnapshot(replica.name, b"".join(replica.fleet.reports.snapshot())))
                missed = True
    return missed


def known(lease):
    """When a prompt is computed whose first token nobody sees, each scheduler finds by its own scrapes."""
    return lease.endpoint_id, lease.blind, lease.blind or lease.pending


@given(seed=st.integers(0, 1 << 32), count=st.integers(2, 4), steps=st.integers(0, 120))
def test_all_believe_the_same_after_quiet(seed, count, steps):
    random, clock = Random(seed), SimClock()
    replicas = [Replica(number, clock) for number in range(count)]
    for _ in range(steps):
        step(replicas, clock, random)
    quiet(replicas, clock)
    for replica in replicas:
        assert replica.pipeline.peers.gaps() == []
    own = {replica.name: [lease for lease in replica.fleet.ledger if lease.number] for replica in replicas}
    for replica in replicas:
        for name, leases in own.items():
            if name != replica.name and leases:
                view = replica.pipeline.peers.views[name]
                assert {number: known(lease) for number, lease in view.leases.items()} == {
                    lease.number: known(lease) for lease in leases
                }
    assert len({tuple(replica.avoided()) for replica in replicas}) == 1
    sums = [replica.sums() for replica in replicas]
    assert all(np.allclose(list(sums[0].values()), list(other.values())) for other in sums)


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=40)
def test_prompts_that_one_sent_are_known_to_all(seed):
    """Without endpoints that go: each scheduler learns by itself that a cache is empty."""
    random, clock = Random(seed), SimClock()
    replicas = [Replica(number, clock) for number in range(3)]
    for _ in range(60):
        replica = random.choice(replicas)
        replica.arrive(random)
        batch = replica.fleet.reports.batch(clock.time()) if random.random() < 0.7 else b""
        for other in replicas:
            if other is not replica and batch and random.random() < 0.7:
                other.inbox.append(PeerHeard(replica.name, batch))
        random.shuffle(replica.inbox)
    quiet(replicas, clock)
    assert replicas[0].prefixes() == replicas[1].prefixes() == replicas[2].prefixes()
    assert any(replicas[0].prefixes())
