"""Leases and columns under any mix of charges, ends, departures and readings, sensible or not."""

from math import inf, nan

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.fleet import Fleet
from fairlead.core.ledger import Lease, Ledger
from fairlead.core.request import Request
from fairlead.testing import builders

TTL = 100.0
OWN = ("inflight", "pending", "pending_tokens", "kv_tokens")
LOAD = (*OWN, "queue", "active")

names = st.sampled_from([f"default/vllm-{number}" for number in range(4)])
gauges = st.one_of(
    st.none(),
    st.integers(0, 12).map(float),
    st.sampled_from([-3.0, 0.5, nan, inf, -inf, 1e300, 2.0**70]),
)
samples = st.builds(
    Sample,
    waiting=gauges,
    running=gauges,
    kv_usage=st.one_of(gauges, st.floats(0, 1)),
    adapters=st.one_of(st.none(), st.frozensets(st.sampled_from("abc"))),
    max_adapters=st.sampled_from([0, 2, -1, 10**400]),
    block_size=st.sampled_from([0, 16, -16, 10**400]),
    num_blocks=st.sampled_from([0, 100, 10**400]),
)


class FleetMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(lease_ttl=TTL)
        self.now = 10.0
        self.number = 0
        #: Our own book: request id to (endpoint, pending, uncached tokens, KV tokens).
        self.book: dict[int, tuple[str, bool, float, float]] = {}
        #: All that there ever were.
        self.leases: dict[int, Lease] = {}

    def known(self) -> list[str]:
        return [name for name in self.fleet.table.ids if name]

    def gone(self, leases: list[Lease], name: str) -> None:
        """The fleet must have returned exactly this endpoint's leases."""
        expected = {number for number, entry in self.book.items() if entry[0] == name}
        assert {lease.request.id for lease in leases} == expected
        for number in expected:
            del self.book[number]

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 6.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=names, port=st.integers(1, 2), label=st.sampled_from("xy"))
    def up(self, name: str, port: int, label: str) -> None:
        slot = self.fleet.table.slot(name)
        before = self.fleet.table.endpoints[slot] if slot is not None else None
        endpoint = Endpoint(name, f"10.0.0.{port}:8000", {"label": label})
        leases = self.fleet.up(endpoint)
        if before is not None and before.address != endpoint.address:
            self.gone(leases, name)
        else:
            assert leases == []
        slot = self.fleet.table.slot(name)
        assert slot is not None
        assert self.fleet.table.endpoints[slot] == endpoint

    @rule(name=names)
    def down(self, name: str) -> None:
        self.gone(self.fleet.down(name), name)
        assert self.fleet.table.slot(name) is None

    @precondition(lambda self: self.fleet.table.count)
    @rule(
        data=st.data(),
        prompt=st.integers(0, 50_000),
        hit=st.integers(-10, 60_000),
        output=st.one_of(st.floats(0, 4_000), st.sampled_from([nan, inf, -inf, 1e300])),
    )
    def charge(self, data: st.DataObject, prompt: int, hit: int, output: float) -> None:
        name = data.draw(st.sampled_from(self.known()))
        slot = self.fleet.table.slot(name)
        assert slot is not None
        self.number += 1
        request = Request(id=self.number, arrived=self.now, prompt_tokens=prompt)
        lease = self.fleet.charge(request, slot, self.now, hit, output)
        self.book[self.number] = (name, True, lease.uncached_tokens, lease.kv_tokens)
        self.leases[self.number] = lease

    @precondition(lambda self: self.fleet.table.count)
    @rule(data=st.data(), prompt=st.integers(0, 50_000), stream=st.booleans())
    def reserve(self, data: st.DataObject, prompt: int, stream: bool) -> None:
        slot = self.fleet.table.slot(data.draw(st.sampled_from(self.known())))
        assert slot is not None
        self.number += 1
        request = Request(id=self.number, arrived=self.now, prompt_tokens=prompt, stream=stream)
        before = self.fleet.table.inflight[slot]
        self.fleet.charge(request, slot, self.now, 0, 100.0, reserved=True)
        assert self.fleet.table.inflight[slot] == before + 1

    @precondition(lambda self: self.fleet.ledger.reserved)
    @rule(data=st.data())
    def unreserve(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.fleet.ledger.reserved, key=lambda lease: lease.request.id)))
        self.fleet.ledger.release(lease)
        assert lease not in self.fleet.ledger.reserved

    @precondition(lambda self: self.book)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.leases)))
        news = number in self.book and self.book[number][1]
        assert self.fleet.ledger.first_token(self.leases[number]) == news
        if news:
            name, _, uncached, kv = self.book[number]
            self.book[number] = (name, False, uncached, kv)

    @precondition(lambda self: self.book)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.leases)))
        assert self.leases[number].held == (self.book.pop(number, None) is not None)
        self.fleet.ledger.release(self.leases[number])

    @rule()
    def expire(self) -> None:
        for lease in self.fleet.ledger.expired(self.now):
            self.fleet.ledger.release(lease)
            del self.book[lease.request.id]

    @rule(name=names, delay=st.sampled_from([0.0, 0.5, 3.0]), sample=samples)
    def sampled(self, name: str, delay: float, sample: Sample) -> None:
        for lease in self.fleet.sampled(name, self.now - delay, self.now, sample):
            self.fleet.ledger.release(lease)
            assert self.book.pop(lease.request.id)[0] == name
        for number, (at, pending, uncached, kv) in self.book.items():
            if pending and not self.leases[number].pending:
                assert at == name and self.leases[number].blind, "a scrape shows that they run"
                self.book[number] = (at, False, uncached, kv)

    @rule(name=names)
    def scrape_failed(self, name: str) -> None:
        self.fleet.scrape_failed(name, self.now)

    @precondition(lambda self: self.fleet.table.count)
    @rule(data=st.data(), ok=st.booleans())
    def answered(self, data: st.DataObject, ok: bool) -> None:
        slot = self.fleet.table.slot(data.draw(st.sampled_from(self.known())))
        assert slot is not None
        self.fleet.answered(slot, ok, self.now)

    @invariant()
    def columns_are_the_book(self) -> None:
        self.fleet.validate()
        ledger, before = self.fleet.ledger, self.fleet.table.floats.copy()
        assert len(ledger) - len(ledger.reserved) == len(self.book)
        with ledger.without_reserved():
            self.without_reservations()
        assert np.array_equal(self.fleet.table.floats, before, equal_nan=True)

    def without_reservations(self) -> None:
        table = self.fleet.table
        for slot, name in enumerate(table.ids):
            entries = [entry for entry in self.book.values() if entry[0] == name]
            pending = [entry for entry in entries if entry[1]]
            expected = (len(entries), len(pending), sum(e[2] for e in pending), sum(e[3] for e in entries))
            assert tuple(getattr(table, column)[slot] for column in OWN) == expected, "exactly, no rounding"
            if not name:
                assert not any(getattr(table, column)[slot] for column in LOAD)

    def teardown(self) -> None:
        for lease in [*self.leases.values(), *self.fleet.ledger.reserved]:
            self.fleet.ledger.release(lease)
        assert not self.fleet.ledger.reserved
        table = self.fleet.table
        assert len(self.fleet.ledger) == 0
        for column in OWN:
            assert not getattr(table, column).any(), column
        for slot in range(len(table)):
            self.fleet.ledger.own_accounting(slot)
        assert not np.concatenate([table.queue, table.active]).any()
        self.fleet.validate()


TestFleet = FleetMachine.TestCase
TestFleet.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


class Engine:
    """An engine that tells the truth, shared with other clients: (ours, waiting) per request."""

    def __init__(self) -> None:
        self.requests: dict[int, tuple[bool, bool]] = {}

    def counts(self) -> tuple[int, int]:
        waiting = sum(waits for _, waits in self.requests.values())
        return waiting, len(self.requests) - waiting


steps = st.lists(
    st.tuples(st.sampled_from(["ours", "others", "start", "first", "end", "scrape"]), st.integers(0, 10**6)),
    max_size=60,
)


@given(steps=steps)
@settings(deadline=None)
def test_against_a_truthful_engine_the_effective_load_is_exact_at_each_scrape(steps: list[tuple[str, int]]) -> None:
    """Whatever happened before, a reading that knows all our requests makes queue and active what the engine says.

    Between two readings only the requests of others can be unknown: our own must be in the total, each once.
    """
    ledger, engine, ours = Ledger(builders.fleet("e").table), Engine(), dict[int, Lease]()
    account = ledger.account(0)
    now = 0.0
    others_then = 0
    for number, (what, which) in enumerate(steps):
        now += 0.01
        chosen = sorted(engine.requests)[which % len(engine.requests)] if engine.requests else None
        if what in ("ours", "others"):
            engine.requests[number] = (what == "ours", True)
            if what == "ours":
                request = Request(id=number, arrived=now)
                lease = Lease(request, 0, "e", now, uncached_tokens=1.0, kv_tokens=1.0, hit_tokens=0)
                ours[number] = lease
                ledger.charge(lease)
        elif what == "start" and chosen is not None:
            engine.requests[chosen] = (engine.requests[chosen][0], False)
        elif what in ("first", "end") and chosen is not None:
            lease = ours.get(chosen)
            if what == "first" and lease is not None and lease.pending and not engine.requests[chosen][1]:
                ledger.first_token(lease)
            elif what == "end":
                del engine.requests[chosen]
                if lease is not None:
                    ledger.release(ours.pop(chosen))
        elif what == "scrape":
            waiting, running = engine.counts()
            assert account.reconcile(now + 0.005, float(waiting), float(running)) == []
            queue, active, *_ = account.row()
            assert queue + active == waiting + running
            if all(lease.pending or not engine.requests[n][1] for n, lease in ours.items()):
                assert (queue, active) == (waiting, running)
            others_then = sum(not ours for ours, _ in engine.requests.values())
        account.validate()
        queue, active, *_ = account.row()
        assert queue >= 0 <= active
        assert queue + active == len(account.leases) + others_then
