"""The probes of `fairlead tune`: a few requests to a server, each for one purpose, bounded in number and time.

* Prompts of growing length, one after another on an otherwise idle server, all different, with answers of a few tokens,
  measure prefill.
* Groups of equal requests at the same moment, whose prompts the server has just computed, start and stop decoding
  together, so their time per token is that of a batch of known size. Short and long contexts separate the cost of a
  sequence from the cost of its cache. A group whose last members begin when the first ones end shows how many sequences
  the server runs at the same time.
* A few clients that each send one request after another measure prefill and decode together, as in real traffic.
* If a neighbour on the same machine is named, clients and short prompts are measured again while it is busy, to learn
  how much it slows the server down.

Rules
* The server must have no other work: other traffic would be measured as slowness. But its metrics page is fetched as
  often as a scheduler does, because that makes the steps of a small server up to a tenth longer.
* The requests fit the server: its context length, KV cache and slots, and no prompt takes more than `MOST_SHARE` of the
  time. Sizes are in the server's own tokens.
* The plan is repeated a few times, so that a stop at any moment leaves some results of each kind. When the time is
  over, requests in progress are abandoned and earlier results are kept.
* Wall-clock times are multiplied by `time_ratio`, to get the model time of a stub that runs faster than real time.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from http.client import HTTPException
from itertools import repeat
from math import inf
from random import Random
from statistics import median
from time import monotonic
from typing import Any

import msgspec
from msgspec import Struct

from fairlead.core.text import plain
from fairlead.lab.load.probe import exchanged
from fairlead.lab.load.runner import run
from fairlead.lab.load.spec import Options, Record
from fairlead.lab.load.tune import Facts, Observation, TooLittle
from fairlead.lab.load.workload import CHAT_PATH, Call, ClosedLoop, Paced, text

PREFILL_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8000, 16_000)
#: Prompt tokens of groups: short for many sequences, long for few.
SHORT, LONG = 64, 3000
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
#: Limit on the prompt tokens of a group in total, because long prompts take long to compute.
MOST_GROUP_TOKENS = 100_000
ANSWER_TOKENS = 48
#: Answer tokens of prefill probes, enough to measure the time per token too.
SHORT_ANSWER = 2
ROUNDS = 3
#: If the first tokens of a group spread over more than this share of its decoding, the group did not decode together.
TOGETHER = 0.3
#: A group that did not run at the same time is sent up to this many times again before it shows a limit of the server.
SLOT_TRIES = 4
#: The most clients, the prompt and answer tokens of their requests, and the number of requests of each client.
CLIENTS, CLIENT_TOKENS, CLIENT_ANSWER, CLIENT_REQUESTS = 8, 256, 32, 3
#: Prompts that take longer to compute than this share of the probing time are left out.
MOST_SHARE = 1 / 40
#: Seconds between two fetches of a metrics page, and the timeout of one: the defaults of `metrics.interval` and
#: `metrics.timeout`.
FETCH_S, FETCH_TIMEOUT_S = 0.2, 1.0
#: The assumed context length of a server that does not report it.
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
    #: What is known about the server. If `model` is empty, requests use `default`.
    facts: Facts = Facts()
    seed: int = 0
    time_ratio: float = 1.0
    headers: dict[str, str] = {}
    #: Additional fields of every request; answers must have the requested length.
    extra: dict[str, Any] = msgspec.field(default_factory=lambda: {"ignore_eos": True})
    #: Wall-clock seconds after which probing ends.
    seconds: float = 180.0


class Probe(Struct, frozen=True):
    """One measurement with prompts of `tokens` tokens. `batch`: equal requests at the same time; 0 = one prompt alone.
    `clients`: the number of clients that each send one request after another; 0 = none. `beside`: with a busy
    neighbour."""

    batch: int
    tokens: int
    beside: bool = False
    clients: int = 0

    def __str__(self) -> str:
        what = f"{self.tokens:,} tokens"
        if self.clients:
            what = f"{self.clients} clients with prompts of {what}"
        elif self.batch:
            what = f"{self.batch} answers at once behind {what}"
        return what + " beside a busy neighbour" * self.beside


def plan(facts: Facts, beside: bool = False, most_tokens: float = inf) -> list[Probe]:
    """The probes of one round. The first probes already measure something of each kind. `most_tokens`: the most prompt
    tokens of a probe that do not take too long."""
    window = (facts.max_model_len or _USUAL_LENGTH) - 2 * ANSWER_TOKENS
    memory = 0.9 * (facts.kv_tokens or window * 4)
    longest = int(min(0.85 * window, max(most_tokens, SHORT)))
    prompts = [tokens for tokens in PREFILL_TOKENS if tokens <= longest]
    if not prompts or prompts[-1] < 0.7 * longest <= PREFILL_TOKENS[-1]:
        prompts.append(max(longest, 1))
    slots = facts.max_num_seqs or BATCHES[-1]
    batches = sorted({batch for batch in BATCHES if batch < slots} | {min(slots, BATCHES[-1])})
    groups = [
        Probe(batch, tokens)
        for batch in batches
        for tokens in (min(SHORT, longest), int(min(LONG, 0.6 * window, max(most_tokens / batch, 4 * SHORT))))
        if batch * (tokens + ANSWER_TOKENS) <= min(memory, MOST_GROUP_TOKENS)
    ]
    alone = [Probe(0, tokens) for tokens in prompts]
    tokens = min(CLIENT_TOKENS, longest)
    clients = int(min(CLIENTS, slots, memory // (tokens + CLIENT_ANSWER)))
    traffic = [Probe(0, tokens, clients=clients)] if clients else []
    if beside:
        traffic += [msgspec.structs.replace(item, beside=True) for item in (*traffic, *alone[:2])]
    # If the limit of sequences is unknown, groups come first: they show how many clients can have a slot.
    middle = [*traffic, *groups] if facts.max_num_seqs else [*groups, *traffic]
    return [*alone[1::2], *middle, *alone[::2]]


async def probe(ask: Ask, keep: Keep, on_progress: OnProgress | None = None) -> None:
    """Probe a server. Observations already passed to `keep` stay valid if this is cancelled or raises.

    Raises `TooLittle` if requests fail, `ConfigError` for a target or header that cannot be used."""
    fetching = [asyncio.create_task(_fetch_metrics(target, ask)) for target in (ask.target, ask.neighbour) if target]
    try:
        await _probe(_Prober(ask), keep, on_progress)
    finally:
        for task in fetching:
            task.cancel()
        await asyncio.gather(*fetching, return_exceptions=True)


async def _fetch_metrics(target: str, ask: Ask) -> None:
    while True:
        with suppress(OSError, HTTPException):
            await asyncio.to_thread(exchanged, target, "/metrics", ask.headers, None, FETCH_TIMEOUT_S)
        await asyncio.sleep(FETCH_S)


async def _probe(prober: "_Prober", keep: Keep, on_progress: OnProgress | None) -> None:
    ask = prober.ask
    await prober.begin()
    took: dict[Probe, float] = {}
    done = 0
    for _ in range(ROUNDS):
        items = plan(prober.facts, bool(ask.neighbour), prober.most_tokens)
        total = ROUNDS * len(items)
        for item in items:
            begun, sequences = monotonic(), max(item.batch, item.clients)
            if sequences > (prober.facts.max_num_seqs or sequences) or begun + took.get(item, 0.0) >= prober.ends:
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


def _at_once(records: list[Record]) -> int:
    """The largest number of these requests that had a sequence slot at the same time."""
    # If requests wait for a slot, one answer begins as another ends. Counting at the middles of answers separates these
    # two even if this machine was too busy to read both in time.
    middles = [(record.first_data + record.last_data) / 2 for record in records]
    return max(1, *(sum(record.first_data <= middle < record.last_data for record in records) for middle in middles))


class _Prober:
    """Sends the probes. `facts` may be extended while it runs."""

    def __init__(self, ask: Ask) -> None:
        self.ask, self.facts = ask, ask.facts
        self.ends = monotonic() + ask.seconds
        #: See `plan`; set by `begin`.
        self.most_tokens = inf
        self._rng = Random(ask.seed)
        #: Tokens that the server counts for a prompt in addition to its words, and tokens per word.
        self._frame, self._per_word = 0.0, 1.0

    async def begin(self) -> None:
        """Warm up a server that was just started. Measure its tokens per word, and how long prompts take."""
        lengths, seconds = [], 0.0
        for words in (8, 40, 160):
            for record in await self._send([self._call(self._words(words), SHORT_ANSWER)]):
                lengths.append(record.prompt_tokens)
                seconds = record.first_data - record.sent
        if len(lengths) == 3:
            self._per_word = max((lengths[1] - lengths[0]) / 32, 0.1)
            self._frame = max(lengths[0] - 8 * self._per_word, 0.0)
            self.most_tokens = MOST_SHARE * self.ask.seconds / max(seconds, 1e-6) * lengths[2]

    async def observe(self, item: Probe) -> list[Observation]:
        async with self._busy_neighbour(item):
            if item.clients:
                return await self._traffic(item)
            return await (self._group(item) if item.batch else self._prefill(item))

    async def _traffic(self, item: Probe) -> list[Observation]:
        prompts = [self._prompt(item.tokens) for _ in range(CLIENT_REQUESTS * item.clients)]
        records = await self._send([self._call(prompt, CLIENT_ANSWER) for prompt in prompts], item.clients)
        if len(records) < len(prompts):
            return []
        return [self._observed(record, item, max(record.cached_tokens, 0)) for record in records]

    async def _prefill(self, item: Probe) -> list[Observation]:
        records = await self._send([self._call(self._prompt(item.tokens), SHORT_ANSWER)])
        return [self._observed(record, item, max(record.cached_tokens, 0)) for record in records]

    async def _group(self, item: Probe) -> list[Observation]:
        prompts = [self._prompt(item.tokens) for _ in range(item.batch)]
        await self._send([self._call(prompt, 1) for prompt in prompts])
        records = await self._together(prompts)
        if len(records) < item.batch:
            return []
        at_once = _at_once(records)
        if at_once < item.batch:
            # A longer prompt may have to wait for memory, which is not a limit on sequences.
            if item.tokens <= SHORT:
                await self._find_slots(prompts, at_once)
            return []
        first = [record.first_data for record in records]
        # Seconds from the first token of an answer to its last.
        decoding = median(record.last_data - record.first_data for record in records)
        if max(first) - min(first) > TOGETHER * decoding:
            return []
        # If the server does not report cached tokens (-1), these requests are not used for prefill.
        return [self._observed(record, item, record.cached_tokens) for record in records]

    async def _together(self, prompts: list[bytes]) -> list[Record]:
        return await self._send([self._call(prompt, ANSWER_TOKENS) for prompt in prompts], workers=0)

    async def _find_slots(self, prompts: list[bytes], seen: int) -> None:
        """Find the server's limit of sequences. `seen`: requests that ran at the same time so far. A pause of a busy
        machine can only make this number too low, so the highest number of some tries counts."""
        tries = 0
        while seen < len(prompts) and tries < SLOT_TRIES:
            tries += 1
            group = await self._together(prompts)
            if len(group) == len(prompts):
                seen = max(seen, _at_once(group))
        if seen < len(prompts):
            self.facts = msgspec.structs.replace(self.facts, max_num_seqs=seen)

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

    async def _send(self, calls: list[Call], workers: int = 1) -> list[Record]:
        """Send requests and return those answered in time. `workers`: the number of requests at a time; 0 = all at
        once. Raises `TooLittle` with the server's message on failure."""
        left = self.ends - monotonic()
        if left <= 0:
            return []
        options = Options(
            requests=len(calls), headers=self.ask.headers, gaps=False, timeout_s=max(left, 60.0), time_limit_s=left
        )
        arrivals = ClosedLoop(workers=workers) if workers else Paced(lambda _: repeat(0.0, len(calls)))
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
        return ": " + str(plain(said[:500].decode("utf-8", "replace")))

    @asynccontextmanager
    async def _busy_neighbour(self, item: Probe) -> AsyncIterator[None]:
        if not item.beside:
            yield
            return
        workers = item.clients or min(CLIENTS, self.facts.max_num_seqs or CLIENTS)
        tokens = min(CLIENT_TOKENS, item.tokens)
        calls = iter(lambda: self._call(self._prompt(tokens), CLIENT_ANSWER), None)
        options = Options(duration_s=self.ask.seconds, headers=self.ask.headers, gaps=False)
        load = asyncio.create_task(run(self.ask.neighbour, _Calls(calls), ClosedLoop(workers=workers), options))
        try:
            await asyncio.sleep(0.5)
            yield
        finally:
            load.cancel()
            with suppress(asyncio.CancelledError):
                await load

    def _observed(self, record: Record, item: Probe, cached: int) -> Observation:
        scale = 1e3 * self.ask.time_ratio
        # E2E ends with the last data, not with the end of the stream.
        return Observation(
            prompt_tokens=record.prompt_tokens,
            cached_tokens=cached,
            completion_tokens=record.completion_tokens,
            ttft_ms=(record.first_data - record.sent) * scale,
            e2e_ms=(record.last_data - record.sent) * scale,
            batch=0 if item.clients else max(item.batch, 1),
            clients=item.clients,
            neighbours=int(item.beside),
        )
