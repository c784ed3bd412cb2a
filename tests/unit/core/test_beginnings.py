"""Which beginnings are found, whose text is wanted, and what bounds it."""

from random import Random

from fairlead.core.beginnings import MOST, RECENT, Beginnings
from fairlead.core.request import RECOGNISED, Request
from fairlead.testing import builders

SYSTEM = "You are a patient assistant. " * 400


def prompt(system: str, rng: Random, **fields: object) -> Request:
    return builders.request(system + rng.randbytes(1500).hex(), **fields)


def test_the_text_of_a_beginning_is_wanted_once_enough_share_it() -> None:
    rng, found = Random(1), Beginnings(shared=4)
    wanted = [found.seen(prompt(SYSTEM, rng)) for _ in range(4)]
    assert wanted[:3] == [(0, 0)] * 3
    digest, end = wanted[3]
    assert 0.9 * len(SYSTEM) < end <= len(SYSTEM)
    found.keep(digest, "/v1/completions", b"text")
    assert found.seen(prompt(SYSTEM, rng)) == (0, 0)
    assert [kept.body for kept in found.hottest()] == [b"text"] and found.bytes == 4


def test_what_is_shared_no_more_is_forgotten() -> None:
    rng, found = Random(1), Beginnings(shared=2)
    found.seen(prompt(SYSTEM, rng))
    digest, _ = found.seen(prompt(SYSTEM, rng))
    found.keep(digest, "/", b"text")
    for _ in range(RECENT):
        found.seen(prompt("", rng))
    assert not found.hottest() and found.bytes == 0


def test_turns_of_one_conversation_share_nothing_with_others() -> None:
    rng, found = Random(1), Beginnings(shared=2)
    turns = [prompt(SYSTEM, rng, session=f"{RECOGNISED}ab") for _ in range(9)]
    assert {found.seen(turn) for turn in turns} == {(0, 0)}


def share(found: Beginnings, system: str, times: int, body: bytes) -> None:
    rng = Random(system)
    for _ in range(times):
        digest, end = found.seen(prompt(system, rng))
        if end:
            found.keep(digest, "/v1/completions", body)


def test_what_fewer_share_gives_way() -> None:
    found = Beginnings(shared=2, max_bytes=10)
    share(found, "a" * 4000, 3, b"first")
    share(found, "b" * 4000, 2, b"second")
    assert [one.body for one in found.hottest()] == [b"first"]
    assert found.seen(prompt("b" * 4000, Random(2))) == (0, 0), "asked for again although there is no room"
    share(found, "b" * 4000, 5, b"second")
    assert [one.body for one in found.hottest()] == [b"second"] and found.bytes == 6


def test_short_beginnings_and_media_are_left_out() -> None:
    rng, found = Random(1), Beginnings(shared=2)
    assert {found.seen(prompt("short" * 100, rng)) for _ in range(5)} == {(0, 0)}
    assert {found.seen(prompt(SYSTEM, rng, media=1)) for _ in range(5)} == {(0, 0)}


def test_the_number_is_bounded() -> None:
    found = Beginnings(shared=2)
    for digest in range(1, MOST + 50):
        found.keep(digest, "/", b"x")
    assert len(found) == MOST


def test_what_never_fits_makes_nothing_give_way() -> None:
    found = Beginnings(shared=2, max_bytes=10)
    share(found, "a" * 4000, 2, b"first")
    share(found, "b" * 4000, 9, b"much too long")
    assert [one.body for one in found.hottest()] == [b"first"]
