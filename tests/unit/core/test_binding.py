from math import inf

import numpy as np
import pytest
from leases import lease_of
from waiting_rules import AbleRules

from fairlead.core.binding import AGEING, LOOK_S, PairBinder
from fairlead.core.endpoint import Endpoint
from fairlead.core.fleet import Fleet
from fairlead.core.flow import Waiting
from fairlead.core.prefix import ChainHasher
from fairlead.core.request import Request

NOW = 100.0
HASHER = ChainHasher()
ALL = np.array([True, True, True])


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    for i in range(3):
        fleet.up(Endpoint(f"e{i}", f"10.0.0.{i}:80"))
    return fleet


class Queue:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, tokens: int, since: float = NOW, text: bytes = b"", session: str = "") -> Waiting:
        self.count += 1
        chain = HASHER.chain(b"", text)
        request = Request(
            id=self.count,
            arrived=since,
            prompt_tokens=tokens,
            prompt_bytes=len(text),
            prefix=chain,
            stream=True,
            session=session,
        )
        return Waiting(request, since, 1e9, tokens, self.count)


@pytest.fixture
def queue() -> Queue:
    return Queue()


class Binder(PairBinder):
    """Looks at what it has not seen yet, as flow control does when a request arrives."""

    def bind(self, window, fleet, opened, now):
        for waiting in window:
            if waiting.known is None:
                _, waiting.known = self.look(waiting.request, fleet, now)
        return super().bind(window, fleet, opened, now)


def binder(able=lambda request, fleet, now: None) -> PairBinder:
    return Binder(AbleRules(able))


def test_the_least_work_goes_first_to_the_least_busy(fleet, queue):
    long, short = queue(20_000), queue(100)
    fleet.charge(queue(5000).request, 0, NOW, 0, 10)
    bound = binder().bind([long, short], fleet, np.array([True, True, False]), NOW)
    assert (bound.waiting, bound.slot) == (short, 1)
    assert bound.cost == 100


def test_waiting_makes_up_for_work(fleet, queue):
    # 20,000 tokens cost about 1200 ms more than 100: with an ageing of 0.05 that is 24 s of waiting.
    short = queue(100)
    assert binder().bind([queue(20_000, NOW - 10), short], fleet, ALL, NOW).waiting is short
    long = queue(20_000, NOW - 1.5 / AGEING)
    assert binder().bind([long, short], fleet, ALL, NOW).waiting is long


def test_a_request_goes_where_its_beginning_is(fleet, queue):
    text = bytes(range(256)) * 100
    fleet.charge(queue(6000, text=text).request, 2, NOW - 10, 0, 10)
    fleet.ledger.release(lease_of(fleet, 1))
    bound = binder().bind([queue(6000, text=text)], fleet, ALL, NOW)
    assert bound.slot == 2
    assert bound.hit_share > 0.9
    assert bound.cost < 600


def test_alone_it_goes_where_it_would_without_flow_control(fleet, queue):
    """Its endpoint is closed, and another one is open that nobody wants: the pool is not full."""
    text = bytes(range(256)) * 100
    fleet.charge(queue(6000, text=text).request, 2, NOW - 10, 0, 10)
    fleet.ledger.release(lease_of(fleet, 1))
    assert binder().bind([queue(6000, text=text)], fleet, np.array([True, True, False]), NOW).slot == 2


def test_those_that_are_held_for_an_endpoint_go_there_first(fleet, queue):
    """30,000 tokens take 2 s, and each of 30 answers would pause so long: 6 s at a tenth of the weight. So the first
    three are held for the endpoint that runs none, and the fourth would not go there sooner than elsewhere."""
    fleet.table.active[:] = [30.0, 30.0, 0.0]
    one_open = np.array([True, False, False])
    window = [queue(30_000) for _ in range(6)]
    bound = binder().bind(window, fleet, one_open, NOW)
    assert bound.slot == 0 and bound.waiting in window[2:]
    assert binder().bind(window[:2], fleet, one_open, NOW).slot == 2, "nobody wants the open one"


def test_those_that_are_held_for_several_engines_wait_less_for_each_other(fleet, queue):
    """As above; but with eight engines, none of ten that are held for them waits long enough to go elsewhere."""
    fleet.table.set_ranks(2, 8.0)
    fleet.table.active[:] = [30.0, 30.0, 0.0]
    one_open = np.array([True, False, False])
    bound = binder().bind([queue(30_000) for _ in range(10)], fleet, one_open, NOW)
    assert bound.slot == 2, "nobody wants the open one"


def test_only_endpoints_that_are_able_count(fleet, queue):
    def able(request, fleet, now):
        return np.array([False, True, False]) if request.session == "one" else None

    pairs = binder(able)
    alone = pairs.bind([queue(100, session="one")], fleet, np.array([True, False, True]), NOW)
    assert alone == pytest.approx(NOW + LOOK_S)
    bound = pairs.bind([queue(50, session="one"), queue(100)], fleet, np.array([True, False, False]), NOW)
    assert (bound.waiting.request.session, bound.slot) == ("", 0)


def test_who_is_able_is_looked_up_again_only_when_endpoints_change(fleet, queue):
    asked = []
    pairs, waiting = binder(lambda request, fleet, now: asked.append(request)), queue(100)
    _, waiting.known = pairs.look(waiting.request, fleet, NOW)
    assert [pairs.able(waiting, fleet, NOW).tolist() for _ in range(3)] == [[True] * 3] * 3 and len(asked) == 1
    fleet.down("e1")
    assert pairs.able(waiting, fleet, NOW).tolist() == [True, False, True] and len(asked) == 2


def test_where_an_endpoint_left_nobody_is_sent(fleet, queue):
    fleet.down("e1")
    bound = binder().bind([queue(100)], fleet, fleet.table.alive & np.array([False, True, True]), NOW)
    assert bound.slot == 2


def test_what_was_just_sent_somewhere_is_known_there_at_once(fleet, queue):
    text = bytes(range(256)) * 100
    first, second = queue(6000, text=text), queue(6000, text=text)
    pairs = binder()
    pairs.bind([first, second], fleet, ALL, NOW)
    bound = pairs.bind([first, second], fleet, ALL, NOW)
    fleet.charge(bound.waiting.request, bound.slot, NOW, 0, 10)
    rest = [w for w in (first, second) if w is not bound.waiting]
    again = pairs.bind(rest, fleet, ALL, NOW + 0.25)
    assert again.slot == bound.slot
    assert again.hit_share > 0.9


def test_one_endpoint_has_no_elsewhere(queue):
    fleet = Fleet()
    fleet.up(Endpoint("only", "10.0.0.1:80"))
    assert binder().bind([queue(100)], fleet, np.array([True]), NOW).slot == 0


def test_new_tokens_go_where_there_is_memory(fleet, queue):
    table = fleet.table
    table.capacity_tokens[:] = 100_000.0
    table.per_capacity[:] = 1e-5
    table.kv[:] = [0.95, 0.2, 0.95]
    for i, slot in enumerate((1, 1, 1, 1)):  # more to do there, but room
        fleet.charge(queue(500 + i).request, slot, NOW, 0, 10)
    assert binder().bind([queue(4000)], fleet, ALL, NOW).slot == 1
    table.kv[:] = 0.2
    assert binder().bind([queue(4000)], fleet, ALL, NOW).slot != 1


def without_memory_but_at_one(fleet):
    table = fleet.table
    table.capacity_tokens[:] = 100_000.0
    table.per_capacity[:] = 1e-5
    table.kv[:] = [1.0, 0.2, 1.0]
    table.active[:] = 50.0


def test_what_is_cached_elsewhere_is_not_copied_to_where_there_is_no_memory(fleet, queue):
    """Waiting a little is cheaper than making all wait that are there, even where recomputing takes no time."""
    text = bytes(range(256)) * 10
    fleet.charge(queue(600, text=text).request, 1, NOW - 10, 0, 10)
    fleet.ledger.release(lease_of(fleet, 1))
    only_full_ones = np.array([True, False, True])
    assert not isinstance(binder().bind([queue(600, text=text)], fleet, only_full_ones, NOW), float)
    without_memory_but_at_one(fleet)
    again = binder().bind([queue(600, text=text)], fleet, only_full_ones, NOW)
    assert isinstance(again, float) and again > NOW


def test_what_is_cached_nowhere_goes_where_memory_is_cheap(fleet, queue):
    without_memory_but_at_one(fleet)
    fleet.table.kv[:] = [0.9, 0.2, 0.9]
    assert binder().bind([queue(4000)], fleet, ALL, NOW).slot == 1


def full_but_for(fleet, free: float) -> None:
    """Memory for `free` of 100,000 tokens, everywhere."""
    table = fleet.table
    table.capacity_tokens[:] = 100_000.0
    table.per_capacity[:] = 1e-5
    table.kv[:] = 1.0 - free * 1e-5
    table.active[:] = 20.0


def test_a_prompt_waits_until_an_engine_has_room_for_it(fleet, queue):
    full_but_for(fleet, 5000)
    long = queue(30_000)
    # 25,000 tokens are a quarter of what is given back within 10 s: some 2.7 s, worth over two minutes of waiting.
    again = binder().bind([long], fleet, ALL, NOW)
    assert again == pytest.approx(NOW + LOOK_S), "memory comes back without an event of ours"
    assert long.kept_by == "room"
    assert isinstance(binder().bind([queue(30_000, NOW - 100)], fleet, ALL, NOW), float)
    fleet.table.kv[2] = 0.69
    assert binder().bind([long], fleet, ALL, NOW).slot == 2


def test_what_fits_passes_it(fleet, queue):
    full_but_for(fleet, 5000)
    long, short = queue(30_000, NOW - 60), queue(4000)
    assert binder().bind([long, short], fleet, ALL, NOW).waiting is short


def test_it_does_not_wait_for_room_for_ever(fleet, queue):
    full_but_for(fleet, 5000)
    assert binder().bind([queue(30_000, NOW - 200)], fleet, ALL, NOW).slot in (0, 1, 2)


def test_what_no_engine_could_hold_waits_for_no_room(fleet, queue):
    """Others would pass it for ever: there is never as much."""
    full_but_for(fleet, 5000)
    assert binder().bind([queue(100_001)], fleet, ALL, NOW).slot in (0, 1, 2)
    fleet.table.capacity_tokens[1], fleet.table.per_capacity[1] = 200_000.0, 5e-6
    assert isinstance(binder().bind([queue(100_001)], fleet, ALL, NOW), float), "one could"
    fleet.down("e1")
    assert binder().bind([queue(100_001)], fleet, ALL, NOW).slot in (0, 2)


def test_prompts_on_their_way_take_room(fleet, queue):
    full_but_for(fleet, 8000)
    fleet.table.queued_tokens[:] = 5000.0
    assert isinstance(binder().bind([queue(4500)], fleet, ALL, NOW), float)
    fleet.table.queued_tokens[1] = 0.0
    assert binder().bind([queue(4500)], fleet, ALL, NOW).slot == 1


def test_who_runs_nothing_gives_nothing_back(fleet, queue):
    """A gauge that shows full memory where nothing runs is wrong, or about something that does not go away."""
    full_but_for(fleet, 0)
    fleet.table.active[:] = 0.0
    assert binder().bind([queue(30_000)], fleet, ALL, NOW).slot in (0, 1, 2)


def test_unknown_memory_is_not_waited_for(fleet, queue):
    full_but_for(fleet, 0)
    fleet.table.kv[:] = 1.0
    fleet.table.capacity_tokens[:] = fleet.table.per_capacity[:] = 0.0
    assert binder().bind([queue(30_000)], fleet, ALL, NOW).slot in (0, 1, 2)


def test_what_waits_there_is_load(fleet, queue):
    """The endpoint without answers has 8 s of prompts to compute first."""
    fleet.table.active[:] = [30.0, 30.0, 0.0]
    fleet.charge(queue(80_000).request, 2, NOW, 0, 10)
    assert binder().bind([queue(30_000)], fleet, np.array([True, True, False]), NOW).slot in (0, 1)


def test_work_that_nobody_can_do_is_infinite(fleet, queue):
    nobody = binder(lambda request, fleet, now: np.zeros(len(fleet.table), dtype=np.bool_))
    assert nobody.look(queue(100).request, fleet, NOW)[0] == inf
    assert nobody.look(queue(100).request, Fleet(), NOW)[0] == 100, "somebody may come who can"


def test_the_fallback_endpoint_is_who_computes_the_prompt_soonest(fleet, queue):
    text = bytes(range(256)) * 100
    fleet.charge(queue(6000, text=text).request, 2, NOW - 10, 0, 10)
    fleet.ledger.release(lease_of(fleet, 1))
    pairs = binder()
    assert pairs.bind([queue(6000, text=text)], fleet, ALL, NOW).fallback_slot == 0, "alike: the first"
    fleet.charge(queue(9000).request, 0, NOW, 0, 10)
    assert pairs.bind([queue(6000, text=text)], fleet, ALL, NOW).fallback_slot == 1, "e0 has a prompt to compute"
    late = queue(6000, NOW - 60.0, text=text)
    only = pairs.bind([late], fleet, np.array([True, False, False]), NOW)
    assert (only.slot, only.fallback_slot) == (2, 0), "where its beginning is, and who is open"


def test_no_other_able_endpoint_is_no_fallback_endpoint(fleet, queue):
    pairs = binder(lambda request, fleet, now: np.array([False, True, False]))
    bound = pairs.bind([queue(100)], fleet, ALL, NOW)
    assert (bound.slot, bound.fallback_slot) == (1, -1)


def test_waiting_requests_share_the_columns_that_say_the_same(fleet, queue):
    """Tens of thousands may wait for thousands of endpoints."""
    binder_of_some = binder(lambda request, fleet, now: np.array([True, request.prompt_tokens < 500, True]))
    short, other, long = (binder_of_some.look(queue(tokens).request, fleet, NOW)[1] for tokens in (100, 200, 1000))
    assert short.able is other.able and short.able_bits is other.able_bits
    assert (short.able.tolist(), long.able.tolist()) == ([True] * 3, [True, False, True])
    assert short.share is other.share is long.share and not short.share.any()
    fleet.up(Endpoint("e3", "10.0.0.3:80"))
    _, later = binder(lambda request, fleet, now: None).look(queue(100).request, fleet, NOW)
    assert (len(later.share), later.able.tolist()) == (4, [True] * 4)
