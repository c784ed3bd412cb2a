"""What schedulers of one pool tell each other: the same load and prompts everywhere, and nothing from nonsense."""

from random import Random

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from fairlead.core import peers as module
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
    TimerFired,
)
from fairlead.core.facts import (
    CHAIN_BLOCKS,
    MOST_FACTS,
    Batch,
    Sent,
    Snapshot,
    block_bytes,
    encode,
    endpoint_hash,
    read_batch,
)
from fairlead.core.fleet import Fleet
from fairlead.core.instructions import SetTimer
from fairlead.core.peers import CHARGED_AT_ONCE, MOST_BLOCKS
from fairlead.core.peers import TIMER as PEERS_TIMER
from fairlead.core.policy import Picked
from fairlead.core.prefix import ChainHasher
from fairlead.core.reports import PART_LEASES, RECENT, SharedFleet
from fairlead.core.request import Request, Usage
from fairlead.core.scheduler import EXPIRY_TIMER, Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.testing import SimClock

HASHER = ChainHasher()
SYSTEM = Random(1).randbytes(16_000)


class First:
    """A policy that takes the first endpoint, with the second one for the prompt if it has the name of a pair."""

    def __init__(self, pairs=False):
        self.name, self.pairs = "first", pairs

    def choose(self, request, fleet, context):
        return Picked(0, prefill_slot=1 if self.pairs else -1)


class Scheduler:
    def __init__(self, clock, endpoints=2, fleet=SharedFleet, pairs=False):
        self.clock = clock
        self.pipeline = Pipeline(clock, Random(1), fleet(lease_ttl=60.0), First(pairs), TokenEstimator())
        for number in range(endpoints):
            self.feed(EndpointUp(Endpoint(f"e{number}", f"10.0.0.{number}:8000")))

    def feed(self, event):
        instructions = self.pipeline.handle(event)
        self.pipeline.validate()
        return instructions

    def send(self, number, prompt=SYSTEM, stream=True, tokens=4000):
        chain = HASHER.chain(b"m", prompt)
        self.feed(RequestArrived(Request(number, 0.0, prompt_tokens=tokens, stream=stream, prefix=chain)))

    def batch(self):
        return self.pipeline.fleet.reports.batch(self.clock.time())

    def column(self, name):
        return getattr(self.pipeline.fleet.table, name).tolist()

    def view(self):
        return self.pipeline.peers.views["a"]


@pytest.fixture
def clock():
    return SimClock()


@pytest.fixture
def pair(clock):
    return Scheduler(clock), Scheduler(clock)


def test_the_load_of_a_peer_is_known_from_its_leases(pair, clock):
    one, other = pair
    one.send(1)
    one.send(2)
    other.feed(PeerHeard("a", one.batch()))
    load = other.pipeline.peers.load
    assert (load.requests, load.tokens, load.cached_tokens) == (2, 8000, 0)
    two = Scheduler(clock, pairs=True)
    two.send(1)
    other.feed(PeerHeard("b", two.batch()))
    assert (load.requests, load.tokens, load.cached_tokens) == (3, 12_000, -1), "two leases, and one request"


def test_a_peer_with_another_policy_is_named(pair, clock):
    one, other = pair
    difference = other.pipeline.peers.difference
    assert difference("a") == "", "nothing was heard"
    one.send(1)
    other.feed(PeerHeard("a", one.batch()))
    assert difference("a") == "", "the same policy"
    one.pipeline.fleet.reports.decide_by("second")
    one.send(2)
    other.feed(PeerHeard("a", one.batch()))
    differs = "a decides by the policy second, this one by first: give all the same configuration"
    assert difference("a") == differs
    one.send(3)
    other.feed(PeerHeard("a", one.batch()))
    assert difference("a") == differs, "a batch without a name changes nothing"
    newcomer = Scheduler(clock)
    *_, snapshot = one.pipeline.fleet.reports.snapshot()
    newcomer.feed(PeerSnapshot("a", snapshot))
    assert newcomer.pipeline.peers.difference("a") == differs
    one.pipeline.fleet.reports.decide_by("first")
    one.send(4)
    other.feed(PeerHeard("a", one.batch()))
    assert difference("a") == ""


def test_schedulers_with_and_without_the_name_of_the_policy_understand_each_other(pair):
    """The name is the last field, so an older one ignores it, and its messages end before it."""
    one, other = pair
    one.send(1)
    payload = one.batch()
    assert msgspec.msgpack.decode(payload)[-1] == "first"
    older = msgspec.defstruct("Batch", ["version", "sequence"], array_like=True, tag="batch")
    assert msgspec.msgpack.decode(payload, type=older).sequence == 1
    other.feed(PeerHeard("a", msgspec.msgpack.encode(msgspec.msgpack.decode(payload)[:-1])))
    assert len(other.view().leases) == 1
    assert other.pipeline.peers.difference("a") == ""


def test_the_prompts_of_a_peer_that_may_be_split_are_known_too(pair, clock):
    one, other = pair
    load = other.pipeline.peers.load
    load.may_split = lambda api, prompt, lacking: lacking >= 1000
    one.send(1)
    one.send(2, b"another" * 999, tokens=900)
    other.feed(PeerHeard("a", one.batch()))
    assert (load.prompts.requests, load.prompts.tokens, load.prompts.cached_tokens) == (1, 4000, 0)
    two = Scheduler(clock, pairs=True)
    two.send(1)
    other.feed(PeerHeard("b", two.batch()))
    assert (load.prompts.requests, load.prompts.tokens, load.prompts.cached_tokens) == (2, 8000, 0), "it was split"


def test_leases_that_a_snapshot_repeats_are_no_new_load(pair, clock):
    one, other = pair
    load = other.pipeline.peers.load
    one.send(1)
    other.feed(PeerHeard("a", one.batch()))
    assert (load.requests, load.breaks) == (1, 1)
    other.feed(PeerLost("a"))
    other.feed(PeerLost("a"))
    for number in range(2):
        other.feed(MetricsSampled(f"e{number}", clock.time(), Sample(waiting=0.0, running=1.0)))
    assert not other.pipeline.peers.leases
    other.feed(PeerSnapshot("a", b"".join(one.pipeline.fleet.reports.snapshot())))
    assert len(other.pipeline.peers.leases) == 1
    assert (load.requests, load.breaks) == (1, 3)
    one.send(2)
    other.feed(PeerHeard("a", one.batch()))
    assert (load.requests, load.breaks) == (2, 3)


def test_a_lease_counts_at_the_peer_from_its_charge_to_its_end(pair, clock):
    one, other = pair
    one.send(1)
    other.feed(PeerHeard("a", one.batch()))
    assert other.column("queue") == one.column("queue") == [1, 0]
    assert other.column("kv_tokens") == one.column("kv_tokens")
    assert other.pipeline.fleet.match(Request(9, 0.0, prompt_bytes=16_000, prefix=HASHER.chain(b"m", SYSTEM)))[0] > 0.9
    clock.advance(0.05)
    one.feed(FirstTokenSeen(1))
    clock.advance(0.01)
    other.feed(PeerHeard("a", one.batch()))
    assert other.column("active") == [1, 0] and other.column("pending") == [0, 0]
    one.feed(ResponseEnded(request_id=1, status=200, usage=Usage(completion_tokens=100)))
    other.feed(PeerHeard("a", one.batch()))
    assert other.column("inflight") == [0, 0] and not len(other.pipeline.fleet.ledger)
    assert one.batch() == b""


def test_what_a_peer_tells_is_not_told_on(pair):
    one, other = pair
    one.send(1)
    other.feed(PeerHeard("a", one.batch()))
    one.feed(FirstTokenSeen(1))
    one.feed(ResponseEnded(request_id=1, status=200))
    other.feed(PeerHeard("a", one.batch()))
    assert other.batch() == b""


def test_a_fleet_of_one_scheduler_takes_nothing_down(clock):
    alone = Scheduler(clock, fleet=Fleet)
    alone.send(1)
    assert [lease.number for lease in alone.pipeline.fleet.ledger] == [0]


def test_a_batch_that_came_already_changes_nothing(pair):
    one, other = pair
    one.send(1)
    first = one.batch()
    one.feed(ResponseEnded(request_id=1, status=200))
    for payload in (first, first, one.batch(), first):
        other.feed(PeerHeard("a", payload))
    assert other.column("inflight") == [0, 0] and not other.view().gap


def test_a_batch_that_is_missing_is_a_gap_until_it_comes_or_a_snapshot_does(pair):
    one, other = pair
    one.send(1)
    first = one.batch()
    one.feed(ResponseEnded(request_id=1, status=200))
    one.send(2, SYSTEM[:4000])
    late = one.batch()
    other.feed(PeerHeard("a", late))
    assert other.view().gap and other.column("inflight") == [1, 0]
    # It refers to blocks that were told in the first batch.
    assert other.pipeline.fleet.match(Request(9, 0.0, prefix=HASHER.chain(b"m", SYSTEM))) is None
    other.feed(PeerHeard("a", first))
    assert other.column("inflight") == [1, 0], "the first one's end was known before its charge"
    other.feed(PeerSnapshot("a", b"".join(one.pipeline.fleet.reports.snapshot())))
    assert not other.view().gap and other.column("inflight") == [1, 0]
    assert other.pipeline.fleet.match(Request(9, 0.0, prefix=HASHER.chain(b"m", SYSTEM)))[0] > 0.2


def test_a_snapshot_is_all_that_a_joiner_needs(pair, clock):
    one, other = pair
    for number in range(1, RECENT + 10):
        one.send(number, SYSTEM + b"%d" % number * 1000)
        one.feed(FirstTokenSeen(number))
        if number > 5:
            one.feed(ResponseEnded(request_id=number, status=200))
        one.batch()
    other.feed(PeerSnapshot("a", b"".join(one.pipeline.fleet.reports.snapshot())))
    assert other.column("active") == [5, 0] and other.column("kv_tokens") == one.column("kv_tokens")
    one.send(9999)
    other.feed(PeerHeard("a", one.batch()))
    assert not other.view().gap and other.column("inflight") == [6, 0]


def test_an_older_snapshot_changes_nothing(pair):
    one, other = pair
    one.send(1)
    old = b"".join(one.pipeline.fleet.reports.snapshot())
    other.feed(PeerHeard("a", one.batch()))
    one.feed(ResponseEnded(request_id=1, status=200))
    other.feed(PeerHeard("a", one.batch()))
    other.feed(PeerSnapshot("a", old))
    assert other.column("inflight") == [0, 0]


GOOD = Batch(2, 1, 1, (endpoint_hash("e0"),), 1, (), (), (), (), b"", b"")


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"", "truncated"),
        (b"\xff\x00nonsense", "Expected"),
        (msgspec.msgpack.encode(GOOD)[:-3], "truncated"),
        (msgspec.msgpack.encode(replace(GOOD, version=1)), "it speaks version 1, this one 2: upgrade that one"),
        (msgspec.msgpack.encode(["batch", 3, {"of": "another shape"}]), "version 3, this one 2: upgrade this one"),
        (msgspec.msgpack.encode(["greeting", 3]), "version 3, this one 2: upgrade this one"),
        (msgspec.msgpack.encode(replace(GOOD, charged=((3, 0, 1, 1, 1, 1, True, 0, ""),))), "does not list"),
        (msgspec.msgpack.encode(replace(GOOD, charged=((0, 0, -1, 1, 1, 1, True, 0, ""),))), ">= 0"),
        (msgspec.msgpack.encode(replace(GOOD, charged=((0, 0, 1e30, 1, 1, 1, True, 0, ""),))), "int"),
        (msgspec.msgpack.encode(replace(GOOD, sent=((0, 0, 2),))), "do not match"),
        (msgspec.msgpack.encode(replace(GOOD, failed=(1,))), "does not list"),
        (msgspec.msgpack.encode(replace(GOOD, avoided=((1, 10),))), "does not list"),
        (msgspec.msgpack.encode(replace(GOOD, ended=((1, -7),))), ">= -2"),
        (msgspec.msgpack.encode(Snapshot(2, 1, (), 1, (1,), (), (), (), b"", b"")), "Invalid value"),
        *[
            (msgspec.msgpack.encode(replace(GOOD, **{name: (fact,) * (MOST_FACTS + 1)})), f"length <= {MOST_FACTS}")
            for name, fact in [
                ("charged", (0, 0, 1, 1, 1, 1, True, 0, "")),
                ("first_tokens", (1, 0)),
                ("ended", (1, -2)),
                ("sent", (0, 0, 0)),
                ("held", (0, "m", "t", 1, 0, 1, 0.0)),
                ("failed", 0),
            ]
        ],
    ],
)
def test_a_message_that_makes_no_sense_is_refused_with_a_reason(clock, payload, why):
    scheduler = Scheduler(clock)
    before = scheduler.pipeline.fleet.table.floats.copy()
    assert scheduler.feed(PeerHeard("a", payload)) == []
    view = scheduler.view()
    assert (view.refused, view.messages, view.sequence) == (1, 0, 0) and why in view.problem
    assert view.gap, "what it should have said is asked for"
    assert (scheduler.pipeline.fleet.table.floats == before).all()
    scheduler.feed(PeerHeard("a", msgspec.msgpack.encode(GOOD)))
    assert not view.problem


def test_what_one_told_the_others_need_not_tell_again(clock):
    one, other, third = (Scheduler(clock) for _ in range(3))
    one.send(1)
    first = one.batch()
    for scheduler in (other, third):
        scheduler.feed(PeerHeard("a", first))
    other.send(1, SYSTEM + b"more" * 300)
    payload = other.batch()
    assert len(payload) < 150 < len(first)
    one.feed(PeerHeard("b", payload))
    third.feed(PeerHeard("b", payload))
    blocks = {scheduler.pipeline.fleet.prefix.entries for scheduler in (one, other, third)}
    assert len(blocks) == 1 and third.pipeline.peers.gaps() == one.pipeline.peers.gaps() == []


def test_blocks_without_a_size_are_not_believed(clock):
    scheduler = Scheduler(clock)
    blocks = {"blocks": block_bytes([1, 2]), "sizes": b"\x00\x01\x00\x00"}
    scheduler.feed(PeerHeard("a", msgspec.msgpack.encode(replace(GOOD, sent=((0, 0, 2),), **blocks))))
    assert scheduler.view().gap and not scheduler.pipeline.fleet.prefix.entries


@pytest.mark.parametrize(("most", "kept"), [(MOST_BLOCKS, CHAIN_BLOCKS), (1000, 45)])
def test_chains_that_grow_block_by_block_are_bounded(clock, monkeypatch, most, kept):
    monkeypatch.setattr("fairlead.core.peers.MOST_BLOCKS", most)
    scheduler, count = Scheduler(clock), CHAIN_BLOCKS + 100
    sent = tuple(Sent(0, number, 1) for number in range(count))
    blocks = {"blocks": block_bytes(range(1, count + 1)), "sizes": b"\x01\x00" * count}
    scheduler.feed(PeerHeard("a", encode(replace(GOOD, sent=sent, **blocks))))
    assert scheduler.view().gap and len(scheduler.view().dictionary.blocks) == kept


@pytest.mark.parametrize("cut", [HASHER, ChainHasher(finest=100)])
def test_where_blocks_end_is_told_as_it_is(pair, cut):
    one, other = pair
    for number, size in ((1, 16_000), (2, 700), (3, 9_000)):
        chain = cut.chain(b"m", SYSTEM[:size])
        one.feed(RequestArrived(Request(number, 0.0, prompt_tokens=4000, prefix=chain)))
        payload = one.batch()
        assert number > 1 or bool(read_batch(payload).sizes) == (cut is not HASHER)
        other.feed(PeerHeard("a", payload))
    own, theirs = (scheduler.pipeline.fleet.prefix for scheduler in pair)
    assert (blocks := own.newest(0, 10_000)) == theirs.newest(0, 10_000)
    assert own.sizes(0, blocks) == theirs.sizes(0, blocks)


def test_prompts_that_a_peer_cuts_in_another_way_are_not_taken_over(pair, clock):
    one, other = pair
    chain = ChainHasher(finest=20).chain(b"m", SYSTEM)
    one.feed(RequestArrived(Request(1, 0.0, prompt_tokens=4000, prefix=chain)))
    other.feed(PeerHeard("a", one.batch()))
    peers = other.pipeline.peers
    assert not peers.problem("a"), "it has cut none itself"
    other.send(1)
    other.batch()
    before = other.pipeline.fleet.prefix.entries
    one.feed(RequestArrived(Request(2, 0.0, prompt_tokens=4000, prefix=ChainHasher(finest=20).chain(b"x", SYSTEM))))
    other.feed(PeerHeard("a", one.batch()))
    assert "blocks of 20 bytes, this one of 256" in peers.problem("a") and not peers.problem("b")
    assert other.pipeline.fleet.prefix.entries == before and peers.gaps() == []
    assert other.column("queue") == [3, 0], "its leases count"


def test_what_is_heard_late_counts_from_its_charge(pair, clock):
    one, other = pair
    one.send(1)
    clock.advance(0.02)
    other.feed(MetricsSampled("e0", clock.time(), Sample(waiting=0.0, running=1.0)))
    clock.advance(0.01)
    payload = one.batch()
    clock.advance(0.05)
    other.feed(PeerHeard("a", payload, lag_s=0.05))
    lease = next(iter(other.pipeline.fleet.ledger))
    assert lease.charged_at == pytest.approx(clock.time() - 0.08)
    assert other.column("queue") == [0, 0] and other.column("active") == [1, 0], "the scrape showed it, once"


def fails(scheduler, numbers):
    for number in numbers:
        scheduler.send(number)
        scheduler.feed(ResponseEnded(request_id=number, status=503))


def avoided(*schedulers):
    return [(each.pipeline.fleet.table.ejected_until > each.clock.time()).tolist() for each in schedulers]


def test_failures_count_over_all_schedulers_and_all_avoid_the_endpoint_at_once(clock):
    one, other, third = (Scheduler(clock) for _ in range(3))
    fails(one, [1, 2])
    other.feed(PeerHeard("a", one.batch()))
    fails(other, [1])
    assert avoided(one, other, third) == [[False, False], [True, False], [False, False]]
    told = other.batch()
    one.feed(PeerHeard("b", told))
    third.feed(PeerHeard("b", told))
    assert avoided(one, third) == [[True, False], [True, False]]
    assert one.pipeline.fleet.table.troubled and third.pipeline.fleet.table.troubled


def test_what_works_again_at_one_scheduler_is_avoided_by_none(clock):
    one, other = Scheduler(clock), Scheduler(clock)
    fails(one, [1, 2, 3])
    other.feed(PeerHeard("a", one.batch()))
    other.send(1)
    other.feed(ResponseEnded(request_id=1, status=200, usage=Usage(completion_tokens=9)))
    one.feed(PeerHeard("b", other.batch()))
    other.feed(PeerHeard("a", one.batch()))
    assert avoided(one, other) == [[False, False], [False, False]]
    assert not one.pipeline.fleet.table.troubled and not other.pipeline.fleet.table.troubled


def test_a_joiner_avoids_what_others_do_until_they_are_lost_or_its_time_is_over(clock):
    one = Scheduler(clock)
    fails(one, [1, 2, 3])
    one.batch()
    lost, over = Scheduler(clock), Scheduler(clock, endpoints=0)
    for joiner in (lost, over):
        joiner.feed(PeerSnapshot("a", b"".join(one.pipeline.fleet.reports.snapshot())))
    over.feed(EndpointUp(Endpoint("e0", "10.0.0.0:8000")))
    assert avoided(lost, over) == [[True, False], [True]]
    lost.feed(PeerLost("a"))
    clock.advance(4.0)
    over.feed(TimerFired(EXPIRY_TIMER))
    for joiner in (lost, over):
        assert not joiner.pipeline.fleet.table.troubled


def test_of_endpoints_that_cost_the_same_each_scheduler_prefers_others(clock):
    one, other = Scheduler(clock, endpoints=4), Scheduler(clock, endpoints=4)
    for scheduler, name, peer in ((one, "a", other), (other, "b", one)):
        scheduler.send(1)
        to = "b" if name == "a" else "a"
        peer.feed(PeerHeard(name, scheduler.batch(), lag_s=0.05, to=to))
    ours, theirs = (np.array(each.column("collisions")) > 0.0 for each in (one, other))
    assert (ours != theirs).all() and ours.sum() == 2
    other.feed(PeerLost("a"))
    assert other.pipeline.fleet.table.collisions is None, "alone, nothing is left to anybody"


def test_where_a_peer_sent_a_long_prompt_others_keep_away_too(pair):
    one, other = pair
    one.send(1, tokens=50_000)
    assert max(one.column("long_until_ms")) > 0.0
    other.feed(PeerHeard("a", one.batch()))
    assert other.column("long_until_ms") == pytest.approx(one.column("long_until_ms"), abs=1.0)


def test_what_a_lost_peer_left_stays_until_a_scrape_shows_it(pair, clock):
    one, other = pair
    one.send(1)
    other.feed(PeerHeard("a", one.batch()))
    clock.advance(1.0)
    other.feed(PeerLost("a"))
    assert other.column("queue") == [1, 0]
    other.feed(MetricsSampled("e0", clock.time() - 0.5, Sample(waiting=0.0, running=1.0)))
    assert other.column("inflight") == [1, 0], "that scrape was sent before"
    clock.advance(0.1)
    other.feed(MetricsSampled("e0", clock.time(), Sample(waiting=0.0, running=1.0)))
    assert other.column("inflight") == [0, 0] and other.column("active") == [1, 0]


def test_what_a_lost_peer_left_at_endpoints_that_are_gone_is_forgotten_in_time(pair, clock):
    one, other = pair
    one.send(1)
    other.feed(PeerHeard("a", one.batch()))
    other.feed(EndpointDown("e0"))
    other.feed(EndpointDown("e1"))
    other.feed(PeerLost("a"))
    clock.advance(other.pipeline.fleet.ledger.ttl + 1.0)
    other.feed(TimerFired(EXPIRY_TIMER))
    assert other.pipeline.peers.orphans == {}


def test_a_peer_that_comes_back_is_believed_where_it_stopped(pair, clock):
    one, other = pair
    one.send(1)
    other.feed(PeerHeard("a", one.batch()))
    other.feed(PeerLost("a"))
    one.send(2)
    other.feed(PeerHeard("a", one.batch()))
    assert other.view().gap and other.column("queue") == [2, 0]
    other.feed(PeerSnapshot("a", b"".join(one.pipeline.fleet.reports.snapshot())))
    assert not other.view().gap and other.column("queue") == [2, 0]


def test_scrapes_take_peers_requests_for_what_they_are(pair, clock):
    one, other = pair
    one.send(1)
    other.send(1)
    other.feed(PeerHeard("a", one.batch()))
    clock.advance(0.1)
    other.feed(MetricsSampled("e0", clock.time(), Sample(waiting=2.0, running=0.0)))
    assert other.column("queue") == [2, 0]
    one.feed(ResponseEnded(request_id=1, status=200))
    other.feed(PeerHeard("a", one.batch()))
    assert other.column("queue") == [1, 0], "nothing is left of it as the load of strangers"


def test_leases_of_a_silent_peer_end_with_their_time(pair, clock):
    one, other = pair
    one.send(1)
    other.feed(PeerHeard("a", one.batch()))
    clock.advance(61.0)
    other.feed(TimerFired(EXPIRY_TIMER))
    assert other.column("inflight") == [0, 0]


def test_an_endpoint_that_is_not_here_yet_is_asked_for_when_it_comes(clock):
    one, other = Scheduler(clock), Scheduler(clock, endpoints=0)
    one.send(1)
    other.feed(PeerHeard("a", one.batch()))
    other.feed(PeerSnapshot("a", b"".join(one.pipeline.fleet.reports.snapshot())))
    other.feed(EndpointUp(Endpoint("e0", "10.0.0.0:8000")))
    assert other.pipeline.peers.gaps() == ["a"]
    other.feed(PeerSnapshot("a", b"".join(one.pipeline.fleet.reports.snapshot())))
    assert other.column("queue") == [1] and other.pipeline.peers.gaps() == []


def test_a_joiner_misses_nothing_of_an_endpoint_that_left_before(pair):
    one, joiner = pair
    one.send(1)
    one.batch()
    one.feed(EndpointDown("e0"))
    one.batch()
    joiner.feed(EndpointDown("e0"))
    joiner.feed(PeerSnapshot("a", b"".join(one.pipeline.fleet.reports.snapshot())))
    assert joiner.pipeline.peers.gaps() == []


def test_an_endpoint_that_leaves_takes_what_peers_have_there(pair):
    one, other = pair
    one.send(1)
    other.feed(PeerHeard("a", one.batch()))
    other.feed(EndpointDown("e0"))
    one.feed(EndpointDown("e0"))
    other.feed(PeerHeard("a", one.batch()))
    assert not len(other.pipeline.fleet.ledger) and not other.view().leases


def test_both_parts_of_a_pair_are_told(clock):
    one, other = Scheduler(clock, pairs=True), Scheduler(clock)
    one.send(1)
    other.feed(PeerHeard("a", one.batch()))
    assert other.column("inflight") == one.column("inflight") == [1, 1]
    one.feed(FirstTokenSeen(1))
    other.feed(PeerHeard("a", one.batch()))
    assert other.column("inflight") == one.column("inflight") == [1, 0]


def test_a_prompt_that_a_scrape_shows_computed_is_told(pair, clock):
    one, other = pair
    one.send(1, stream=False)
    clock.advance(30.0)
    one.feed(MetricsSampled("e0", clock.time(), Sample(waiting=0.0, running=1.0)))
    other.feed(PeerHeard("a", one.batch()))
    assert other.column("pending") == one.column("pending") == [0, 0]
    assert other.column("inflight") == [1, 0]


def test_who_fetches_nothing_loses_it_and_others_see_the_gap(pair):
    one, other = pair
    one.send(1)
    other.feed(PeerHeard("a", one.batch()))
    reports = one.pipeline.fleet.reports
    lease = next(iter(one.pipeline.fleet.ledger))
    for _ in range(MOST_FACTS + 1):
        reports.first_token(lease, 0.0)
    reports.first_token(lease, 0.0)
    payload = one.batch()
    assert len(read_batch(payload).first_tokens) == 1
    other.feed(PeerHeard("a", payload))
    assert other.view().gap


def test_a_growing_conversation_costs_only_what_is_new(pair):
    one, other = pair
    sizes = []
    for turn in range(1, 40):
        one.send(turn, SYSTEM + b"x" * 1500 * turn)
        sizes.append(len(payload := one.batch()))
        other.feed(PeerHeard("a", payload))
    assert sum(sizes[1:]) / len(sizes[1:]) < 120
    own, theirs = (scheduler.pipeline.fleet.prefix.newest(0, 10_000) for scheduler in pair)
    assert own == theirs


def test_an_endpoint_that_joins_is_nobodys_until_all_are_dealt_again(clock, monkeypatch):
    """Thousands may join at once, so not all are dealt for each."""
    one, other = Scheduler(clock), Scheduler(clock)
    other.send(1, stream=False)
    one.feed(PeerHeard("b", other.batch(), 0.0, "a"))
    hashed = []
    monkeypatch.setattr(module, "endpoint_hash", lambda name: hashed.append(name) or endpoint_hash(name))
    for number in range(2, 50):
        one.feed(EndpointUp(Endpoint(f"e{number}", f"10.0.0.{number}:8000")))
    assert hashed == [f"e{number}" for number in range(2, 50)]
    assert one.column("collisions")[2:] == [0.0] * 48
    clock.advance(2.0)
    other.send(2, stream=False)
    one.feed(PeerHeard("b", other.batch(), 0.1, "a"))
    assert any(one.column("collisions")[2:])


def test_a_large_snapshot_is_taken_in_in_several_calls_while_batches_go_on(clock):
    one, late = Scheduler(clock), Scheduler(clock)
    many = 3 * CHARGED_AT_ONCE
    for number in range(many):
        one.send(number, prompt=b"")
    one.feed(FirstTokenSeen(1))
    one.batch()
    snapshot = b"".join(one.pipeline.fleet.reports.snapshot())
    instructions = late.feed(PeerSnapshot("a", snapshot))
    assert len(late.pipeline.fleet.ledger) == CHARGED_AT_ONCE
    for number in (0, many - 1):
        one.feed(ResponseEnded(request_id=number, status=200))
    one.feed(FirstTokenSeen(many - 2))
    one.send(many, prompt=b"")
    late.feed(PeerHeard("a", one.batch()))
    calls = 1
    while instructions:
        assert instructions == [SetTimer(PEERS_TIMER, clock.time())]
        instructions = late.feed(TimerFired(PEERS_TIMER))
        calls += 1
    assert (calls, late.view().gap) == (3, False)
    assert len(late.pipeline.fleet.ledger) == many - 1
    for name in ("inflight", "pending", "pending_tokens", "kv_tokens"):
        assert late.column(name) == one.column(name)
    one.feed(ResponseEnded(request_id=1, status=200))
    late.feed(PeerHeard("a", one.batch()))
    assert late.column("inflight") == one.column("inflight")


def test_leases_of_a_snapshot_expire_in_time_behind_newer_ones(pair, clock):
    one, other = pair
    one.send(1)
    one.batch()
    clock.advance(50.0)
    one.send(2)
    other.feed(PeerHeard("a", one.batch()))
    other.feed(PeerSnapshot("a", b"".join(one.pipeline.fleet.reports.snapshot())))
    assert len(other.pipeline.peers.leases) == 2
    clock.advance(11.0)
    other.feed(TimerFired(EXPIRY_TIMER))
    assert len(other.pipeline.peers.leases) == 1


def test_snapshots_of_many_peers_are_taken_in_in_turn(clock):
    one, late = Scheduler(clock), Scheduler(clock)
    for number in range(3 * CHARGED_AT_ONCE):
        one.send(number, prompt=b"")
    one.batch()
    snapshot = b"".join(one.pipeline.fleet.reports.snapshot())
    charged = 0
    for origin in "abc":
        instructions = late.feed(PeerSnapshot(origin, snapshot))
        charged += CHARGED_AT_ONCE
        assert len(late.pipeline.fleet.ledger) == charged
    views = late.pipeline.peers.views
    while instructions:
        instructions = late.feed(TimerFired(PEERS_TIMER))
        charged += CHARGED_AT_ONCE
        assert len(late.pipeline.fleet.ledger) == charged
        counts = [len(view.leases) for view in views.values()]
        assert max(counts) - min(counts) <= CHARGED_AT_ONCE
    assert charged == 9 * CHARGED_AT_ONCE


def test_who_is_lost_during_its_snapshot_leaves_what_was_charged(clock):
    one, late = Scheduler(clock), Scheduler(clock)
    for number in range(2 * CHARGED_AT_ONCE):
        one.send(number, prompt=b"")
    one.batch()
    snapshot = b"".join(one.pipeline.fleet.reports.snapshot())
    late.feed(PeerSnapshot("a", snapshot))
    late.feed(PeerLost("a"))
    assert late.feed(TimerFired(PEERS_TIMER)) == []
    assert len(late.pipeline.fleet.ledger) == CHARGED_AT_ONCE
    late.feed(PeerSnapshot("a", snapshot))
    late.feed(TimerFired(PEERS_TIMER))
    assert len(late.pipeline.fleet.ledger) == 2 * CHARGED_AT_ONCE


def test_a_large_snapshot_is_made_in_parts_while_requests_go_on(clock):
    one, late = Scheduler(clock), Scheduler(clock)
    many = 2 * PART_LEASES
    for number in range(many):
        one.pipeline.handle(RequestArrived(Request(number, 0.0, prompt_tokens=100, stream=True)))
    one.batch()
    parts = one.pipeline.fleet.reports.snapshot()
    assert [next(parts), next(parts)] == [b"", b""], "nothing yet"
    for number in (0, many - 1):
        one.feed(ResponseEnded(request_id=number, status=200))
    one.feed(FirstTokenSeen(1))
    one.send(many)
    batch = one.batch()
    message = b"".join(parts)
    late.feed(PeerHeard("a", batch))
    late.pipeline.handle(PeerSnapshot("a", message))
    while late.pipeline.peers.unfinished:
        late.pipeline.handle(TimerFired(PEERS_TIMER))
    late.pipeline.validate()
    assert len(late.pipeline.fleet.ledger) == many - 1 and not late.view().gap
    for name in ("inflight", "pending", "pending_tokens", "kv_tokens"):
        assert late.column(name) == one.column(name)
