"""Scorers of affinity: prefix-aware, lora-aware, session-affinity."""

from collections import Counter
from random import Random

import numpy as np
import pytest

from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.fleet import Fleet
from fairlead.core.policy import CANDIDATES, Context, Cycle, Scorer
from fairlead.core.prefix import ChainHasher
from fairlead.core.request import PrefixChain, Request
from fairlead.plugins.params import NoParams
from fairlead.plugins.scorers.lora import LoraAware
from fairlead.plugins.scorers.prefix import PrefixAware, PrefixAwareParams
from fairlead.plugins.scorers.session_affinity import SessionAffinity

HASHER = ChainHasher()


def fleet_of(count: int, **labels: str) -> Fleet:
    fleet = Fleet()
    for number in range(count):
        fleet.up(Endpoint(f"e{number}", f"10.0.0.{number}:8000", labels))
    return fleet


def cycle(candidates: list[bool] | None = None) -> Cycle:
    made = Cycle(Context(0.0, Random(0)))
    if candidates is not None:
        made.once(CANDIDATES, lambda: np.array(candidates))
    return made


def scores(plugin: Scorer, fleet: Fleet, request: Request, at: Cycle | None = None) -> list[float] | None:
    column = plugin.score(request, fleet, at or cycle())
    if column is None:
        return None
    assert column.shape == (len(fleet.table),)
    assert ((column >= 0) & (column <= 1)).all()
    return [float(score) for score in column]


def prompt(text: bytes) -> Request:
    return Request(id=1, arrived=0.0, prompt_bytes=len(text), prefix=HASHER.chain(b"m", text))


def test_prefix_share_is_the_contiguous_part_only() -> None:
    fleet = fleet_of(4)
    text = bytes(range(256)) * 16
    chain = HASHER.chain(b"m", text)
    half = len(chain.hashes) // 2
    fleet.prefix.insert(0, chain)
    fleet.prefix.insert(1, PrefixChain(chain.hashes[:half], chain.ends[:half]))
    fleet.prefix.insert(3, HASHER.chain(b"m", text[:256] + b"another way" + text[267:]))
    expected = [1.0, 0.5, 0.0, 256 / 4096]
    assert scores(PrefixAware(PrefixAwareParams()), fleet, prompt(text)) == pytest.approx(expected)


def test_blocks_behind_a_gap_are_worth_nothing() -> None:
    fleet = fleet_of(1)
    text = bytes(range(256)) * 16
    chain = HASHER.chain(b"m", text)
    tail = PrefixChain(chain.hashes[1:], chain.ends[1:])
    fleet.prefix.insert(0, tail)
    assert scores(PrefixAware(PrefixAwareParams()), fleet, prompt(text)) is None


def test_a_longer_prompt_has_a_smaller_share() -> None:
    fleet = fleet_of(1)
    fleet.prefix.insert(0, HASHER.chain(b"m", b"s" * 2048))
    assert scores(PrefixAware(PrefixAwareParams()), fleet, prompt(b"s" * 2048 + b"u" * 2048)) == [0.5]


def test_prefix_aware_is_silent_when_nobody_holds_anything() -> None:
    fleet = fleet_of(2)
    assert scores(PrefixAware(PrefixAwareParams()), fleet, prompt(b"cold" * 1000)) is None
    assert scores(PrefixAware(PrefixAwareParams()), fleet, Request(id=1, arrived=0.0)) is None


def test_every_endpoint_of_a_large_fleet_holds_the_system_prompt() -> None:
    fleet = fleet_of(50)
    system = b"s" * 4096
    for slot in range(50):
        fleet.prefix.insert(slot, HASHER.chain(b"m", system))
    deep = HASHER.chain(b"m", system + b"t" * 4096)
    fleet.prefix.insert(33, deep)
    expected = [0.5] * 50
    expected[33] = 1.0
    assert scores(PrefixAware(PrefixAwareParams()), fleet, prompt(system + b"t" * 4096)) == expected


def lora_fleet() -> Fleet:
    fleet = fleet_of(4)
    loaded = [frozenset({"poet", "critic"}), frozenset({"critic"}), frozenset({"a", "b"}), None]
    for slot, adapters in enumerate(loaded):
        fleet.sampled(f"e{slot}", 0.0, 0.0, Sample(adapters=adapters, max_adapters=2))
    return fleet


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("poet", [1.0, 0.5, 0.0, 0.0]),
        ("critic", [1.0, 1.0, 0.0, 0.0]),
        ("unknown", [0.0, 0.5, 0.0, 0.0]),
        ("", None),
    ],
)
def test_lora_aware(model: str, expected: list[float] | None) -> None:
    request = Request(id=1, arrived=0.0, model=model)
    assert scores(LoraAware(NoParams()), lora_fleet(), request) == expected


def test_lora_aware_is_silent_for_base_models_and_without_lora() -> None:
    request = Request(id=1, arrived=0.0, model="llama")
    fleet = lora_fleet()
    fleet.up(Endpoint("e4", "10.0.0.4:8000", {"model-id": "llama"}))
    assert scores(LoraAware(NoParams()), fleet, request) is None
    assert scores(LoraAware(NoParams()), fleet_of(2), request) is None


def test_lora_aware_follows_the_number_of_slots() -> None:
    fleet = lora_fleet()
    request = Request(id=1, arrived=0.0, model="poet")
    fleet.sampled("e2", 1.0, 1.0, Sample(adapters=frozenset({"a", "b"}), max_adapters=3))
    assert scores(LoraAware(NoParams()), fleet, request) == [1.0, 0.5, 0.5, 0.0]


def homes(plugin: SessionAffinity, fleet: Fleet, count: int = 400) -> dict[str, str]:
    found = {}
    for number in range(count):
        session = f"session-{number}"
        column = scores(plugin, fleet, Request(id=1, arrived=0.0, session=session))
        assert column is not None
        assert sorted(column)[-2:] == [0.0, 1.0]
        found[session] = fleet.table.ids[column.index(1.0)]
    return found


def test_sessions_spread_evenly() -> None:
    counts = Counter(homes(SessionAffinity(NoParams()), fleet_of(8), 4000).values())
    assert len(counts) == 8
    assert all(400 < count < 600 for count in counts.values()), counts


def test_only_the_sessions_of_an_endpoint_that_left_move() -> None:
    fleet = fleet_of(8)
    plugin = SessionAffinity(NoParams())
    before = homes(plugin, fleet)
    fleet.down("e3")
    after = homes(plugin, fleet)
    assert "e3" not in after.values()
    moved = {session for session in before if before[session] != after[session]}
    assert moved == {session for session, home in before.items() if home == "e3"}
    assert moved
    fleet.up(Endpoint("e3", "10.0.0.3:8000"))
    assert homes(plugin, fleet) == before


def test_a_newcomer_takes_sessions_only_for_itself() -> None:
    fleet = fleet_of(4)
    plugin = SessionAffinity(NoParams())
    before = homes(plugin, fleet)
    fleet.up(Endpoint("e9", "10.0.0.9:8000"))
    after = homes(plugin, fleet)
    assert {after[session] for session in before if before[session] != after[session]} == {"e9"}


def test_schedulers_agree_whatever_order_endpoints_came_in() -> None:
    fleet, other = fleet_of(6), Fleet()
    for number in (4, 1, 5, 0, 3, 2):
        other.up(Endpoint(f"e{number}", f"10.0.0.{number}:8000"))
    assert homes(SessionAffinity(NoParams()), fleet) == homes(SessionAffinity(NoParams()), other)


def test_load_and_adapters_do_not_move_sessions() -> None:
    fleet = fleet_of(4)
    plugin = SessionAffinity(NoParams())
    before = homes(plugin, fleet)
    fleet.sampled("e0", 0.0, 0.0, Sample(waiting=99.0, running=99.0, adapters=frozenset("a")))
    assert homes(plugin, fleet) == before


def test_a_session_lives_among_those_that_can_serve_it() -> None:
    """Half of the endpoints only prefill: without the candidates half of the sessions had no home at all."""
    fleet = fleet_of(4)
    plugin = SessionAffinity(NoParams())
    able = [True, False, True, False]
    for number in range(50):
        request = Request(id=1, arrived=0.0, session=f"s{number}")
        everywhere = scores(plugin, fleet, request)
        column = scores(plugin, fleet, request, cycle(able))
        assert column is not None
        assert everywhere is not None
        assert able[column.index(1.0)]
        assert column == everywhere or not able[everywhere.index(1.0)], "who is at home already stays"
        assert scores(plugin, fleet, request) == everywhere


def test_session_affinity_is_silent_without_a_session() -> None:
    assert scores(SessionAffinity(NoParams()), fleet_of(2), Request(id=1, arrived=0.0)) is None


def test_odd_and_many_sessions() -> None:
    fleet = fleet_of(3)
    plugin = SessionAffinity(NoParams())
    for session in ("\udcff\ud800", "x" * 100_000, "é"):
        assert scores(plugin, fleet, Request(id=1, arrived=0.0, session=session)) is not None
    for number in range(5000):
        plugin.score(Request(id=1, arrived=0.0, session=str(number)), fleet, cycle())
    assert len(plugin._homes) <= 4096


def test_one_plugin_serves_several_fleets() -> None:
    plugin = SessionAffinity(NoParams())
    request = Request(id=1, arrived=0.0, session="s")
    small, large = fleet_of(1), fleet_of(9)
    for _ in range(2):
        assert scores(plugin, small, request) == [1.0]
        column = scores(plugin, large, request)
        assert column is not None
        assert len(column) == 9
