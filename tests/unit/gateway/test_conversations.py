import json
from random import Random
from typing import Any

import pytest

from fairlead.core.prefix import ChainHasher
from fairlead.core.request import RECOGNISED
from fairlead.gateway import understand as module
from fairlead.gateway.understand import MAX_ALIKE, MAX_BRANCHES, Conversations

HASHER = ChainHasher()


def met(known: Conversations, prompt: bytes, root: bytes = b"chat") -> str:
    found = known.of(HASHER.chain(root, prompt), prompt)
    known.validate()
    return found


def words(rng: Random, size: int) -> str:
    return rng.randbytes(size // 2).hex()


def prompt(*turns: str) -> bytes:
    """A chat's messages as they are hashed: without the closing bracket."""
    roles = ["user", "assistant"]
    return json.dumps([{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]).encode()[:-1]


class Talk:
    """A conversation that grows by an answer and a question."""

    def __init__(self, rng: Random, system: str = "", size: int = 400) -> None:
        self._rng, self._size = rng, size
        self.turns = [system + words(rng, size)]

    def ask(self) -> bytes:
        asked = prompt(*self.turns)
        self.turns += [words(self._rng, self._size), words(self._rng, self._size)]
        return asked


@pytest.mark.parametrize("size", [300, 2_000, 20_000])
def test_a_conversation_keeps_its_id(size: int) -> None:
    known, talk = Conversations(), Talk(Random(1), size=size)
    ids = [met(known, talk.ask()) for _ in range(12)]
    assert ids[0] == ""
    assert ids[1].startswith(RECOGNISED)
    assert set(ids[1:]) == {ids[1]}


def test_conversations_are_told_apart() -> None:
    rng, known = Random(2), Conversations()
    talks = [Talk(rng, size=300 + 100 * (i % 5)) for i in range(60)]
    rounds = [[met(known, talk.ask()) for talk in talks] for _ in range(5)]
    assert rounds[0] == [""] * 60
    assert len(set(rounds[1])) == 60
    assert rounds[1] == rounds[2] == rounds[3] == rounds[4]


@pytest.mark.parametrize("size", [40, 100, 700])
def test_a_shared_system_prompt_does_not_join_them(size: int) -> None:
    rng, known = Random(3), Conversations()
    system = words(rng, 20_000)
    talks = [Talk(rng, system, size) for _ in range(60)]
    for _ in range(2):
        latest = [met(known, talk.ask()) for talk in talks]
    assert len(set(latest)) == 60
    assert [met(known, talk.ask()) for talk in talks] == latest


def test_a_repeated_request_is_no_new_turn() -> None:
    rng, known = Random(4), Conversations()
    talk = Talk(rng)
    first = talk.ask()
    assert [met(known, first) for _ in range(50)] == [""] * 50
    second = talk.ask()
    named = met(known, second)
    assert [met(known, second) for _ in range(50)] == [named] * 50
    assert met(known, talk.ask()) == named
    assert len(known) == 3


def test_another_scope_is_another_conversation() -> None:
    known, talk = Conversations(), Talk(Random(5))
    first, second = talk.ask(), talk.ask()
    assert met(known, first, b"model a") == ""
    assert met(known, second, b"model b") == ""
    assert met(known, second, b"model a") != ""


def test_a_short_prompt_is_none_yet() -> None:
    known = Conversations()
    assert met(known, b"x" * 200) == ""
    assert len(known) == 0
    assert met(known, b"x" * 300) == ""
    assert met(known, b"x" * 400) != ""


def test_ids_are_those_of_any_other_process() -> None:
    def ids() -> list[str]:
        known, talk = Conversations(), Talk(Random(6))
        return [met(known, talk.ask()) for _ in range(4)]

    assert ids() == ids()


def test_an_edited_last_message_is_recognised_by_an_earlier_turn() -> None:
    rng, known = Random(7), Conversations()
    talk = Talk(rng)
    ids = [met(known, talk.ask()) for _ in range(4)]
    edited = prompt(*talk.turns[:-3], words(rng, 500))
    assert met(known, edited) == ids[-1]


def test_a_fork_goes_on_under_its_id_and_a_shared_beginning_does_not() -> None:
    rng, known = Random(8), Conversations()
    stem = words(rng, 5_000)
    met(known, prompt(stem))
    ids = [met(known, prompt(stem, words(rng, 400))) for _ in range(MAX_BRANCHES + 20)]
    assert len(set(ids[:MAX_BRANCHES])) == 1
    assert ids[0] != ""
    assert ids[MAX_BRANCHES:] == [""] * 20
    grown = [met(known, prompt(stem, words(rng, 400), "a", words(rng, 400))) for _ in range(3)]
    assert grown == [""] * 3


def test_memory_is_bounded_and_what_goes_on_stays() -> None:
    rng, known = Random(9), Conversations(limit=50)
    talk = Talk(rng)
    named = [met(known, talk.ask()) for _ in range(2)][1]
    for _ in range(30):
        for _ in range(10):
            met(known, Talk(rng).ask())
        assert met(known, talk.ask()) == named
        assert len(known) <= 50
    for _ in range(60):
        met(known, Talk(rng).ask())
    assert met(known, talk.ask()) == ""


def test_very_many_alike_are_bounded() -> None:
    known = Conversations()
    head = b"x" * 300
    for i in range(100):
        met(known, head + b"%02d" % i)
    assert len(known) == MAX_ALIKE
    assert met(known, head + b"99 and more") != ""
    assert met(known, head + b"00 and more") == ""


def test_prompts_longer_than_their_chain() -> None:
    hasher, known, text = ChainHasher(max_bytes=4096), Conversations(), words(Random(10), 40_000).encode()
    found = [known.of(hasher.chain(b"", text[:size]), text[:size]) for size in (20_000, 30_000, 40_000)]
    known.validate()
    # Beyond the chain they are not told apart: equal beginnings of this length are one prompt.
    assert found == ["", "", ""]
    assert len(known) == 1


@pytest.mark.parametrize("size", [2_000, 24_000, 490_000])
def test_the_work_is_bounded(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, known = Random(11), Conversations()
    hashed: list[int] = []
    digest = module.xxh3_64_intdigest

    def counting(data: memoryview, seed: int) -> int:
        hashed.append(len(data))
        return digest(data, seed)

    monkeypatch.setattr(module, "xxh3_64_intdigest", counting)
    text = words(rng, size).encode()
    chain = HASHER.chain(b"", text)
    for prompt_ in (text, text, text + b"x" * 50):
        hashed.clear()
        known.of(HASHER.chain(b"", prompt_) if prompt_ is not text else chain, prompt_)
        assert len(hashed) <= 24
        assert sum(hashed) <= max(1_500, size // 8)


def test_a_limit_is_needed() -> None:
    with pytest.raises(ValueError, match="limit"):
        Conversations(limit=0)


def test_a_slow_model_of_it_agrees() -> None:
    """Against a table of whole prompts, over random conversations that fork, repeat and edit."""
    rng, known = Random(12), Conversations()
    seen: dict[bytes, tuple[str, int]] = {}
    branches: dict[bytes, set[bytes]] = {}
    names: dict[str, str] = {}
    talks: list[list[str]] = [[words(rng, 300)] for _ in range(6)]
    for step in range(300):
        turns = talks[rng.randrange(len(talks))]
        choice = rng.random()
        if choice < 0.6:
            turns += [words(rng, 200), words(rng, 200)]
        elif choice < 0.7 and len(turns) > 2:
            del turns[-2:]
        elif choice < 0.75:
            talks.append([*turns, words(rng, 100)])
        text = prompt(*turns)
        found = met(known, text)
        expected: Any = max((known_ for known_ in seen if text.startswith(known_)), key=len, default=None)
        if expected == text:
            id_, turn = seen[text]
        elif expected is not None and len(branches.setdefault(expected, set()) | {text}) <= MAX_BRANCHES:
            branches[expected].add(text)
            id_, turn = seen[expected][0], seen[expected][1] + 1
        else:
            id_, turn = f"new {step}", 1
        seen.setdefault(text, (id_, turn))
        if turn == 1:
            assert found == ""
        else:
            # Ids are named by the first prompt here, by its hash there: the same pairs must be equal.
            assert found != ""
            assert names.setdefault(id_, found) == found
