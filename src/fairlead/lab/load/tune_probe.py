"""The requests of `fairlead tune` to a server: few, each for one purpose, bounded in number and time.

* Prompts of growing length, one after another on an otherwise idle server, all different, with answers of a few tokens,
  measure prefill.
* Groups of equal requests at the same moment, whose prompts the server has just computed, start and stop decoding
  together, so their time per token is that of a batch of known size. Short and long contexts separate the cost of a
  sequence from the cost of its cache. A group whose last members begin when the first ones end shows how many sequences
  the server runs at the same time.
* If a neighbour on the same machine is named, some of both while it computes: how much that slows the server down.

Rules
* The server must have no other work: other traffic would be measured as slowness.
* The requests fit the server: its context length, KV cache and slots. Sizes are in its own tokens.
* The plan is repeated a few times, so that a stop at any moment leaves some results of each kind. When the time is
  over, requests in progress are abandoned and earlier results are kept.
* Wall-clock times are multiplied by `time_ratio`, to get the model time of a faster stub.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from http.client import HTTPException
from random import Random
from statistics import median
from time import monotonic
from typing import Any

import msgspec
from msgspec import Struct

from fairlead.lab.load.probe import exchanged
from fairlead.lab.load.runner import run
from fairlead.lab.load.spec import Options, Record
from fairlead.lab.load.tune import Facts, Observation, TooLittle
from fairlead.lab.load.workload import CHAT_PATH, Call, ClosedLoop, text

PREFILL_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8000, 16_000)
#: Prompt tokens of groups: short for many sequences, long for few.
SHORT, LONG = 64, 3000
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
#: Limit on the prompt tokens of a group in total, because long prompts take long to compute.
MOST_GROUP_TOKENS = 100_000
ANSWER_TOKENS = 64
#: Answer tokens of prefill probes, enough to measure the time per token too.
SHORT_ANSWER = 2
ROUNDS = 3
#: If the first tokens of a group spread over more than this share of its decoding, it did not decode together.
TOGETHER = 0.3
#: Load on the neighbour: number of clients, prompt tokens and answer tokens.
NEIGHBOUR_LOAD = (4, 300, 50)
#: Context length of a server that does not report it.
_USUAL_LENGTH = 8192
#: Called with (probes done, total probes, description of the next one).
OnProgress = Callable[[int, int, str], object]
#: Called after each probe with its observations and what is known about the server.
Keep = Callable[[list[Observation], Facts], object]


class Ask(Struct, frozen=True, kw_only=True):
    """The servers to probe, and how."""

    target: str
    #: `http://host:port` of a server on the same machine; empty = none.
    neighbour: str = ""
    #: Without a `model`, requests use `default`.
    facts: Facts = Facts()
    seed: int = 0
    time_ratio: float = 1.0
    headers: dict[str, str] = {}
    #: Additional fields of every request; answers must have the requested length.
    extra: dict[str, Any] = msgspec.field(default_factory=lambda: {"ignore_eos": True})
    #: Wall-clock seconds after which probing ends.
    seconds: float = 180.0


class Probe(Struct, frozen=True):
    """`batch` equal requests at the same time; 0 = a prompt alone."""

    batch: int
    tokens: int
    beside: bool = False

    def __str__(self) -> str:
        what = (
            f"{self.batch} answers at once behind {self.tokens:,} tokens" if self.batch else f"{self.tokens:,} tokens"
        )
        return what + " beside a busy neighbour" * self.beside


def plan(facts: Facts, beside: bool = False) -> list[Probe]:
    """The probes of one round. Its first probes already measure something of each kind."""
    room = (facts.max_model_len or _USUAL_LENGTH) - 2 * ANSWER_TOKENS
    memory = 0.9 * (facts.kv_tokens or room * 4)
    longest = int(0.85 * room)
    prompts = [tokens for tokens in PREFILL_TOKENS if tokens <= longest]
    if not prompts or prompts[-1] < 0.7 * longest <= PREFILL_TOKENS[-1]:
        prompts.append(max(longest, 1))
    slots = facts.max_num_seqs or BATCHES[-1]
    batches = sorted({batch for batch in BATCHES if batch < slots} | {min(slots, BATCHES[-1])})
    groups = [
        Probe(batch, tokens)
        for batch in batches
        for tokens in (min(SHORT, longest), min(LONG, int(0.6 * room)))
        if batch * (tokens + ANSWER_TOKENS) <= min(memory, MOST_GROUP_TOKENS)
    ]
    alone = [Probe(0, tokens) for tokens in prompts]
    made = [*alone[1::2], *groups, *alone[::2]]
    if beside:
        typical = dict.fromkeys((alone[len(alone) // 2], *groups[:4], *groups[-2:]))
        made += [msgspec.structs.replace(probe, beside=True) for probe in typical]
    return made


async def probe(ask: Ask, keep: Keep, on_progress: OnProgress | None = None) -> None:
    """Probe a server. Observations already passed to `keep` stay valid if this is cancelled or raises.

    Raises `TooLittle` if requests fail, `ConfigError` for a target or header that cannot be used."""
    prober = _Prober(ask)
    await prober.begin()
    took: dict[Probe, float] = {}
    done = 0
    for _ in range(ROUNDS):
        items = plan(prober.facts, bool(ask.neighbour))
        total = ROUNDS * len(items)
        for item in items:
            begun = monotonic()
            if item.batch > (prober.facts.max_num_seqs or item.batch) or begun + took.get(item, 0.0) >= prober.ends:
                continue
            if on_progress is not None:
                on_progress(done, total, str(item))
            keep(await prober.observe(item), prober.facts)
            took[item] = monotonic() - begun
            done += 1
    if on_progress is not None:
        on_progress(done, done, "done")


class _Calls:
    """A workload of given requests, for `fairlead.lab.load.runner.run`."""

    def __init__(self, calls: Iterator[Call]) -> None:
        self._calls = calls

    def calls(self) -> Iterator[Call]:
        return self._calls


class _Together:
    """Arrivals all at the same time."""

    def __init__(self, count: int) -> None:
        self._count = count

    def offsets(self) -> Iterator[float]:
        return iter([0.0] * self._count)


def _decoding(records: list[Record]) -> float:
    """Seconds from the first token of an answer to its last."""
    return median(record.last_data - record.first_data for record in records)


def _at_once(records: list[Record]) -> int:
    """How many of them had a sequence slot from the beginning."""
    # Requests that wait for a slot begin when others end: half an answer is clear even on a busy machine.
    latest = min(record.first_data for record in records) + 0.5 * _decoding(records)
    return sum(record.first_data < latest for record in records)


class _Prober:
    """Sends the probes. `facts` may be extended while it runs."""

    def __init__(self, ask: Ask) -> None:
        self.ask, self.facts = ask, ask.facts
        self.ends = monotonic() + ask.seconds
        self._rng = Random(ask.seed)
        #: Tokens that the server counts for a prompt in addition to its words, and tokens per word.
        self._frame, self._per_word = 0.0, 1.0

    async def begin(self) -> None:
        """Warm up a server that was just started, and measure how its tokenizer counts."""
        lengths = []
        for words in (8, 40):
            records = await self._send([self._call(self._words(words), SHORT_ANSWER)], together=False)
            lengths += [record.prompt_tokens for record in records]
        if len(lengths) == 2:
            self._per_word = max((lengths[1] - lengths[0]) / 32, 0.1)
            self._frame = max(lengths[0] - 8 * self._per_word, 0.0)

    async def observe(self, item: Probe) -> list[Observation]:
        async with self._busy_neighbour(item.beside):
            return await (self._group(item) if item.batch else self._prefill(item))

    async def _prefill(self, item: Probe) -> list[Observation]:
        records = await self._send([self._call(self._prompt(item.tokens), SHORT_ANSWER)], together=False)
        return [self._observed(record, 1, item.beside, max(record.cached_tokens, 0)) for record in records]

    async def _group(self, item: Probe) -> list[Observation]:
        prompts = [self._prompt(item.tokens) for _ in range(item.batch)]
        await self._send([self._call(prompt, 1) for prompt in prompts], together=False)
        records = await self._together(prompts)
        if len(records) < item.batch:
            return []
        at_once = _at_once(records)
        if at_once < item.batch:
            # A longer prompt may have to wait for memory, which is not a limit on sequences.
            if item.tokens <= SHORT:
                await self._find_slots(prompts, at_once)
            return []
        first, decoding = [record.first_data for record in records], _decoding(records)
        if max(first) - min(first) > TOGETHER * decoding:
            return []
        # If a server does not report cached tokens, its requests are not used for prefill here.
        return [self._observed(record, item.batch, item.beside, record.cached_tokens) for record in records]

    async def _together(self, prompts: list[bytes]) -> list[Record]:
        return await self._send([self._call(prompt, ANSWER_TOKENS) for prompt in prompts], together=True)

    async def _find_slots(self, prompts: list[bytes], seen: int) -> None:
        """A pause of a busy machine looks like a limit, so the middle of three counts."""
        groups = [group for _ in range(2) if len(group := await self._together(prompts)) == len(prompts)]
        at_once = sorted([seen, *map(_at_once, groups)])[(len(groups) + 1) // 2]
        if at_once < len(prompts):
            self.facts = msgspec.structs.replace(self.facts, max_num_seqs=at_once)

    def _prompt(self, tokens: int) -> bytes:
        return self._words(max(1, int((tokens - self._frame) / self._per_word)))

    def _words(self, count: int) -> bytes:
        return text(count, self._rng)

    def _call(self, prompt: bytes, answer: int) -> Call:
        fields = {
            "model": self.facts.model or "default",
            "messages": [{"role": "user", "content": prompt.decode("ascii")}],
            "max_tokens": answer,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.ask.extra,
        }
        return Call(body=msgspec.json.encode(fields), path=CHAT_PATH)

    async def _send(self, calls: list[Call], together: bool) -> list[Record]:
        """Send requests and return those answered in time. Raises `TooLittle` with the server's message on failure."""
        left = self.ends - monotonic()
        if left <= 0:
            return []
        options = Options(
            requests=len(calls), headers=self.ask.headers, gaps=False, timeout_s=max(left, 60.0), time_limit_s=left
        )
        arrivals = _Together(len(calls)) if together else ClosedLoop(workers=1)
        result = await run(self.ask.target, _Calls(iter(calls)), arrivals, options)
        good = [record for record in result.records if not record.error and record.prompt_tokens >= 0]
        failed = [record for record in result.records if record not in good]
        if failed and not result.cut:
            why = failed[0].error or "no usage in the answer (stream_options.include_usage)"
            words = await asyncio.to_thread(self._words_of, calls[0]) if failed[0].status >= 400 else ""
            raise TooLittle(f"{len(failed)} of {len(calls)} probes failed: {why}{words}")
        # Let the server become idle before the next probe.
        await asyncio.sleep(0.02)
        return good

    def _words_of(self, call: Call) -> str:
        """The server's own message about a request that it refuses."""
        headers = {"content-type": "application/json", **self.ask.headers}
        try:
            _, said = exchanged(self.ask.target, call.path, headers, body=call.body)
        except (OSError, HTTPException):
            return ""
        words = said[:500].decode("utf-8", "replace")
        return ": " + "".join(letter if letter.isprintable() else " " for letter in words)

    @asynccontextmanager
    async def _busy_neighbour(self, wanted: bool) -> AsyncIterator[None]:
        if not wanted:
            yield
            return
        workers, tokens, answer = NEIGHBOUR_LOAD
        calls = iter(lambda: self._call(self._prompt(tokens), answer), None)
        options = Options(duration_s=self.ask.seconds, headers=self.ask.headers, gaps=False)
        load = asyncio.create_task(run(self.ask.neighbour, _Calls(calls), ClosedLoop(workers=workers), options))
        try:
            await asyncio.sleep(0.5)
            yield
        finally:
            load.cancel()
            with suppress(asyncio.CancelledError):
                await load

    def _observed(self, record: Record, batch: int, beside: bool, cached: int) -> Observation:
        scale = 1e3 * self.ask.time_ratio
        # End at the last token's chunk, without the usage and the end of the stream.
        return Observation(
            prompt_tokens=record.prompt_tokens,
            cached_tokens=cached,
            completion_tokens=record.completion_tokens,
            ttft_ms=(record.first_data - record.sent) * scale,
            e2e_ms=(record.last_data - record.sent) * scale,
            batch=batch,
            neighbours=int(beside),
        )
