"""What is told over the wire is what is known here: columns, and the decisions made from them."""

import random

import numpy as np
import pytest
from leases import lease_of
from msgspec.structs import replace

from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.fleet import Fleet
from fairlead.core.instructions import AskRemote
from fairlead.core.mirror import MirrorFleet
from fairlead.core.policy import Context
from fairlead.core.table import FLOATS
from fairlead.plugins.policies.cost_model import CostModel
from fairlead.server.remote.client import StateFeed, asked
from fairlead.server.remote.messages import COLUMNS, Ask, decode_ask, encode_ask
from fairlead.testing import builders


class Wire:
    """A feed, the bytes between, and a mirror."""

    def __init__(self, fleet: Fleet) -> None:
        self.feed, self.mirror, self.states = StateFeed(fleet), MirrorFleet(), 0

    def tell(self, settled: int = 0) -> bool:
        state = self.feed.changes(settled)
        if state is None:
            return False
        self.states += 1
        back = decode_ask(encode_ask(Ask(state=state))).state
        assert back is not None and back.version == self.states
        for slot in back.gone:
            self.mirror.leave(slot)
        for one in back.endpoints:
            adapters = None if one.adapters is None else frozenset(one.adapters)
            self.mirror.join(one.slot, Endpoint(one.id, one.address, one.labels), adapters)
        self.mirror.load(back.slots.tolist(), {COLUMNS[number]: c for number, c in back.columns.items()})
        if back.speeds is not None:
            self.mirror.learned(back.speeds.hold_ms, back.speeds.answer_steps)
        self.mirror.settle(back.settled)
        return True


def same(fleet: Fleet, mirror: MirrorFleet) -> None:
    ours, theirs = fleet.table, mirror.table
    assert {e.id for _, e in ours.slots()} == {e.id for _, e in theirs.slots()}
    for slot, endpoint in ours.slots():
        there = theirs.slot(endpoint.id)
        assert there is not None and theirs.endpoints[there] == endpoint
        assert ours.adapters[slot] == theirs.adapters[there]
        for row, name in enumerate(FLOATS):
            assert ours.floats[row, slot] == theirs.floats[row, there], (name, endpoint.id)
        for column in ("kappa", "tpot_kappa"):
            assert getattr(fleet.predictor, column)[slot] == getattr(mirror.predictor, column)[there]


def test_the_mirror_follows_whatever_happens() -> None:
    """A long random life: endpoints come, go and come again at reused slots, load moves."""
    chance = random.Random(5)
    fleet = builders.fleet("e0", "e1", "e2")
    wire = Wire(fleet)
    held: list[int] = []
    for step in range(400):
        name = f"e{chance.randrange(6)}"
        kind = chance.randrange(6)
        now = 10.0 + step
        if kind == 0:
            fleet.up(Endpoint(name, f"10.0.0.{chance.randrange(3)}:1", {"zone": str(chance.randrange(2))}))
        elif kind == 1 and fleet.table.count > 1:
            fleet.down(name)
        elif kind == 2:
            adapters = frozenset(chance.sample(["a", "b", "c"], 2)) if chance.random() < 0.5 else None
            sample = Sample(
                waiting=chance.randrange(5),
                running=chance.randrange(9),
                kv_usage=chance.random(),
                block_size=16,
                num_blocks=chance.choice([0, 100]),
                adapters=adapters,
                max_adapters=2,
            )
            fleet.sampled(name, now, now, sample)
        elif kind == 3 and held:
            lease = chance.choice(held)
            if lease.held and lease.pending:
                fleet.first_token(lease, now)
        elif kind == 4 and held:
            fleet.ledger.release(held.pop())
        elif fleet.table.slot(name) is not None:
            one = builders.request("x" * 400, stream=True)
            held.append(fleet.charge(one, fleet.table.slot(name), now, 0, 50.0))
        if chance.random() < 0.6:
            wire.tell()
            same(fleet, wire.mirror)
    wire.tell()
    same(fleet, wire.mirror)
    assert not wire.tell(), "nothing has changed"
    assert wire.states > 100


def test_a_policy_decides_the_same_there() -> None:
    chance = random.Random(3)
    fleet = builders.fleet(*(f"e{i}" for i in range(12)))
    wire = Wire(fleet)
    policy = CostModel()
    for step in range(120):
        now = 1.0 + step / 100
        prompt = "shared " * chance.choice([0, 300, 900]) + f"tail {chance.random()} " * chance.randrange(1, 80)
        request = builders.request(prompt, stream=True)
        wire.tell(step)
        hits = fleet.match(request)
        question = asked(AskRemote("s", request, hits, None, 100.0), fleet, now, False)
        told = request
        if len(question.hit_slots):
            column = np.zeros(len(wire.mirror.table))
            column[wire.mirror.slots_of(question.hit_slots.tolist())] = question.hit_shares
            told = replace(request, blocks=column)
        seed = chance.random()
        here = policy.choose(request, fleet, Context(now, random.Random(seed)))
        there = policy.choose(told, wire.mirror, Context(now, random.Random(seed)))
        assert fleet.table.ids[here.slot] == wire.mirror.table.ids[there.slot]
        fleet.charge(request, here.slot, now, int(here.hit_share * request.prompt_tokens), 100.0)


def test_own_picks_count_until_they_are_told() -> None:
    fleet = builders.fleet("e0", "e1")
    wire = Wire(fleet)
    wire.tell()
    mirror = wire.mirror
    one = builders.request("x" * 4000)
    mirror.take(one, 1, 0.0, 100.0, batch=1)
    mirror.take(one, 1, 0.5, 100.0, batch=2)
    assert mirror.table.queue.tolist() == [0.0, 2.0]
    assert mirror.table.queued_tokens[1] == 1500.0
    fleet.charge(one, 1, 5.0, 0, 100.0)
    wire.tell(settled=1)
    assert mirror.table.queue.tolist() == [0.0, 2.0], "one told, one not yet"
    fleet.ledger.release(lease_of(fleet, one.id))
    wire.tell(settled=2)
    assert mirror.table.queue.tolist() == [0.0, 0.0]
    same(fleet, mirror)


def test_what_was_never_told_is_refused() -> None:
    wire = Wire(builders.fleet("e0"))
    wire.tell()
    with pytest.raises(ValueError, match="slot 7"):
        wire.mirror.load([7], {"queue": np.array([1.0])})
    with pytest.raises(ValueError, match="two slots"):
        wire.mirror.join(5, builders.endpoint("e0"), None)


def test_a_newcomer_with_the_same_numbers_at_the_same_slot_is_told_in_full() -> None:
    fleet = builders.fleet("e0", "e1")
    sample = Sample(waiting=3.0, running=2.0, kv_usage=0.5, block_size=16, num_blocks=100)
    fleet.sampled("e1", 5.0, 5.0, sample)
    wire = Wire(fleet)
    wire.tell()
    fleet.down("e1")
    fleet.up(builders.endpoint("e7"))
    fleet.sampled("e7", 5.0, 5.0, sample)
    wire.tell()
    same(fleet, wire.mirror)
    assert wire.mirror.table.queue.tolist() == [0.0, 3.0]
