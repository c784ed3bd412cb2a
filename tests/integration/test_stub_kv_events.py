"""`fairlead stub --kv-events` as a process: an index that hears its events knows what each answer says was cached."""

import asyncio
import random
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from msgspec import Struct

from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.keys import TOKEN_BYTES, prompt_keys
from fairlead.core.kv.match import BlockChain
from fairlead.core.kv.snapshot import Place
from fairlead.lab.stub.plans import render_chat
from fairlead.pool.kv_events.discovery import KvSource
from fairlead.pool.kv_events.subscriber import KvSubscriber

_REPLICAS = 2
_COMMAND = (
    *("--replicas", str(_REPLICAS), "--port", "0", "--model", "tiny", "--time-ratio", "500"),
    # Small enough that blocks are evicted all the time.
    *("--kv-tokens", "3200", "--max-model-len", "2048", "--kv-events", "--kv-events-port", "0"),
)
Messages = list[dict[str, str]]


class Run(Struct):
    """A stub process, its replicas' addresses, and an index that listens to them; slot = replica."""

    block_size: int
    addresses: list[str]
    session: aiohttp.ClientSession
    index: KvIndex
    events: KvSubscriber

    async def post(self, slot: int, path: str, body: object) -> Any:
        async with self.session.post(f"{self.addresses[slot]}{path}", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def get(self, slot: int, path: str) -> Any:
        async with self.session.get(f"{self.addresses[slot]}{path}") as answer:
            assert answer.status == 200
            return await answer.json()

    def predicted(self, slot: int, messages: Messages) -> tuple[int, int]:
        """Tokens of the prompt, and how many of them the replica has cached as far as the index knows."""
        tokens = render_chat(messages)
        count = len(tokens) // TOKEN_BYTES
        chain = BlockChain(prompt_keys(self.index.space.root("tiny", ""), tokens, self.block_size), self.block_size)
        found = self.index.look_up(chain, _REPLICAS)
        return count, int(found.hit_tokens(count)[slot]) if found is not None else 0

    async def chat(self, slot: int, messages: Messages, max_tokens: int = 1) -> tuple[int, str]:
        """Cached tokens as the replica reports them, and the answer's text."""
        answer = await self.post(slot, "/v1/chat/completions", {"messages": messages, "max_tokens": max_tokens})
        usage = answer["usage"]
        assert usage["prompt_tokens"] == self.predicted(slot, messages)[0]
        return usage["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["message"]["content"]

    def last(self, slot: int) -> int:
        """The last batch that the index has."""
        return (self.events.place_of(self.index.rank(slot, 0, "tiny")) or Place()).last

    async def caught_up(self, slot: int) -> None:
        wanted = (await self.get(slot, "/fault/kv_events"))["next_sequence"] - 1
        async with asyncio.timeout(10):
            while self.last(slot) != wanted or not self.index.idle:
                await asyncio.sleep(0.002)


@pytest.fixture(params=[(16, ()), (32, ("array", "bytes", "bin")), (24, ("v0.16", "signed", "map-batch"))])
async def run(request: pytest.FixtureRequest) -> AsyncIterator[Run]:
    block_size, encodings = request.param
    more = [word for encoding in encodings for word in ("--kv-encoding", encoding)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fairlead", "stub", *_COMMAND, "--block-size", str(block_size), *more),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        lines = [(await asyncio.wait_for(process.stdout.readline(), 30)).decode() for _ in range(1 + _REPLICAS)]
        index = KvIndex()
        async with aiohttp.ClientSession() as session, KvSubscriber(index) as events:
            run = Run(block_size, [line.split()[1] for line in lines[1:]], session, index, events)
            for slot, line in enumerate(lines[1:]):
                (source,) = (await run.get(slot, "/kv_event_sources")).values()
                assert line.split()[2:] == ["events", source["endpoint"], "replay", source["replay_endpoint"]]
                assert source["topic"] == f"kv@{run.addresses[slot].removeprefix('http://')}@tiny"
                index.add_slot(slot)
                events.watch(slot, KvSource(source["endpoint"], source["replay_endpoint"], "tiny"))
            yield run
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), 20)
        assert (process.returncode, errors) == (0, b"")
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(("river", "stone", "cloud", "fire", "tree", "salt")) for _ in range(count))


async def _converse(run: Run, rng: random.Random, requests: int) -> list[int]:
    """Conversations over both replicas that begin alike and come back; each answer is compared. Returns the hits."""
    systems = [_words(rng, 250) for _ in range(8)]
    open_conversations: list[Messages] = []
    hits = []
    for _ in range(requests):
        if open_conversations and rng.random() < 0.5:
            messages = open_conversations.pop(rng.randrange(len(open_conversations)))
        else:
            messages = [{"role": "system", "content": rng.choice(systems)}]
        messages.append({"role": "user", "content": _words(rng, rng.choice((4, 20, 60)))})
        slot = rng.randrange(_REPLICAS)
        expected = run.predicted(slot, messages)[1]
        reported, answer = await run.chat(slot, messages, rng.choice((1, 40)))
        assert reported == expected
        hits.append(reported)
        await run.caught_up(slot)
        if len(messages) < 8:
            open_conversations.append([*messages, {"role": "assistant", "content": answer}])
    run.index.validate()
    return hits


async def _lose_and_recover(run: Run, rng: random.Random) -> None:
    before = run.events.counts(0)[0].replays
    replayed = run.events.counts(0)[0].replayed
    known = run.last(0)
    await run.post(0, "/fault/kv_events", {"lose": 2})
    unheard: list[Messages] = [[{"role": "user", "content": _words(rng, 50)}] for _ in range(2)]
    for messages in unheard:
        await run.chat(0, messages)
    state = await run.get(0, "/fault/kv_events")
    assert state["next_sequence"] == known + 3
    assert run.last(0) == known
    assert run.predicted(0, unheard[0])[1] == 0
    # The next batch shows that two are missing.
    await run.chat(0, [{"role": "user", "content": _words(rng, 50)}])
    await run.caught_up(0)
    count = run.events.counts(0)[0]
    assert (count.replays - before, count.replayed - replayed, count.lost) == (1, 2, 0)
    for messages in unheard:
        expected = run.predicted(0, messages)[1]
        assert expected > 0
        assert (await run.chat(0, messages))[0] == expected


async def _restart_and_agree(run: Run, rng: random.Random) -> None:
    messages = [{"role": "user", "content": _words(rng, 80)}]
    await run.chat(0, messages)
    await run.caught_up(0)
    assert await run.post(0, "/fault/kv_events", {"restart": True}) == {"next_sequence": 0}
    # Nothing tells of it until the engine speaks again.
    assert run.predicted(0, messages)[1] > 0
    assert (await run.chat(0, messages))[0] == 0
    await run.caught_up(0)
    count = run.events.counts(0)[0]
    assert (count.restarts, run.events.counts(1)[0].restarts, run.last(0)) == (1, 0, 0)
    expected = run.predicted(0, messages)[1]
    assert expected > 0
    assert (await run.chat(0, messages))[0] == expected
    await run.caught_up(0)


async def test_predicted_hits_are_those_that_the_answers_report(run: Run) -> None:
    rng = random.Random(7)
    hits = await _converse(run, rng, 40)
    assert sum(hit > 0 for hit in hits) > 10
    assert hits.count(0) > 1
    await _lose_and_recover(run, rng)
    await _converse(run, rng, 6)
    await _restart_and_agree(run, rng)
    await _converse(run, rng, 10)
    for slot in range(_REPLICAS):
        told = run.index.rank(slot, 0, "tiny").counts
        assert told.removed > 10
        assert not told.removed_unknown
        assert not told.orphaned
        assert not told.malformed
