"""What `fairlead tune` asks of a server: few requests, each for one thing, bounded in number and time.

* Prompts of growing length, one after another on an otherwise idle server, each never seen before, with answers of a
  few tokens: how long prefill takes.
* Groups of equal requests at the same moment, whose prompts the server has just computed: they begin to decode together
  and end together, so their time per token is that of a batch of known size. Short and long contexts tell what a
  sequence costs from what its cache costs.

Rules
* The server must have nothing else to do; other traffic is measured as slowness.
* Wall-clock times are multiplied by `time_ratio`: model time of a stub that runs faster.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from random import Random
from statistics import median
from time import monotonic
from typing import Any

import msgspec
from msgspec import Struct

from fairlead.lab.load.runner import run
from fairlead.lab.load.spec import Options, Record
from fairlead.lab.load.tune import Observation, TooLittle
from fairlead.lab.load.workload import CHAT_PATH, Call, ClosedLoop, text

PREFILL_TOKENS = (128, 512, 1024, 2048, 4096, 8000, 16_000)
PREFILL_REPEATS = 3
#: Groups by their prompts' tokens: many sequences with little behind them, few with much.
BATCHES = {64: (1, 4, 16, 48, 128), 3000: (1, 2, 4, 8, 16, 32)}
ANSWER_TOKENS = 64
#: Time per token of prefill probes is measured as well.
SHORT_ANSWER = 2
#: First tokens of a group farther apart than this share of its decoding: its requests did not decode together.
TOGETHER = 0.3
#: Told (probes done, probes in all, what comes next).
OnProgress = Callable[[int, int, str], object]


class Ask(Struct, frozen=True, kw_only=True):
    """Whom to ask, and how."""

    target: str
    model: str
    #: Prompt plus answer.
    max_model_len: int = 40_960
    seed: int = 0
    time_ratio: float = 1.0
    headers: dict[str, str] = {}
    #: Further fields of every request; answers must have the length asked for.
    extra: dict[str, Any] = msgspec.field(default_factory=lambda: {"ignore_eos": True})
    #: No further probe begins after so many wall-clock seconds.
    seconds: float = 180.0


class _Calls:
    """Requests that are given; for `fairlead.lab.load.runner.run`."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls

    def calls(self) -> Iterator[Call]:
        return iter(self._calls)


class _Together:
    """All at once."""

    def __init__(self, count: int) -> None:
        self._count = count

    def offsets(self) -> Iterator[float]:
        return iter([0.0] * self._count)


async def probe(ask: Ask, on_progress: OnProgress | None = None) -> list[Observation]:
    """Observations in the order in which they were made. Raises `TooLittle` when requests fail, `ConfigError` for a
    target or header that cannot be used."""
    rng = Random(ask.seed)
    observations: list[Observation] = []
    begun = monotonic()
    steps = _plan(ask)
    for done, (batch, tokens) in enumerate(steps):
        if monotonic() - begun > ask.seconds:
            break
        if on_progress is not None:
            what = f"prompts of {tokens:,} tokens" if not batch else f"{batch} answers at once behind {tokens:,} tokens"
            on_progress(done, len(steps), what)
        observations += await (_batch(ask, rng, batch, tokens) if batch else _prefill(ask, rng, tokens))
    if on_progress is not None:
        on_progress(len(steps), len(steps), "done")
    return observations


def _plan(ask: Ask) -> list[tuple[int, int]]:
    """(batch, prompt tokens); batch 0 = prefill. Decoding first with little: an early end still leaves some of each."""
    room = ask.max_model_len - 2 * ANSWER_TOKENS
    prefills = [(0, tokens) for tokens in PREFILL_TOKENS if tokens < 0.9 * room]
    groups = [(tokens, batches) for tokens, batches in BATCHES.items() if tokens < 0.9 * room]
    decodes = sorted((batch, tokens) for tokens, batches in groups for batch in batches)
    return [*prefills[:3], *decodes, *prefills[3:]]


async def _prefill(ask: Ask, rng: Random, tokens: int) -> list[Observation]:
    calls = [_call(ask, text(tokens, rng), SHORT_ANSWER) for _ in range(PREFILL_REPEATS)]
    records = await _send(ask, calls, together=False)
    return [_observed(ask, record, 1) for record in records]


async def _batch(ask: Ask, rng: Random, batch: int, tokens: int) -> list[Observation]:
    prompts = [text(tokens, rng) for _ in range(batch)]
    await _send(ask, [_call(ask, prompt, 1) for prompt in prompts], together=False)
    records = await _send(ask, [_call(ask, prompt, ANSWER_TOKENS) for prompt in prompts], together=True)
    first = max(record.first_data for record in records) - min(record.first_data for record in records)
    decoding = median(record.last_data - record.first_data for record in records)
    if first > TOGETHER * decoding:
        return []
    return [_observed(ask, record, batch) for record in records]


def _call(ask: Ask, prompt: bytes, answer: int) -> Call:
    fields = {
        "model": ask.model,
        "messages": [{"role": "user", "content": prompt.decode("ascii")}],
        "max_tokens": answer,
        "stream": True,
        "stream_options": {"include_usage": True},
        **ask.extra,
    }
    return Call(body=msgspec.json.encode(fields), path=CHAT_PATH)


async def _send(ask: Ask, calls: list[Call], together: bool) -> list[Record]:
    options = Options(requests=len(calls), headers=ask.headers, gaps=False, time_limit_s=max(2 * ask.seconds, 60.0))
    arrivals = _Together(len(calls)) if together else ClosedLoop(workers=1)
    result = await run(ask.target, _Calls(calls), arrivals, options)
    failed = [record for record in result.records if record.error or record.prompt_tokens < 0]
    if failed:
        error = failed[0].error or "no usage in the answer (stream_options.include_usage)"
        raise TooLittle(f"{len(failed)} of {len(calls)} probes failed: {error}")
    # The next probe finds an idle server.
    await asyncio.sleep(0.02)
    return result.records


def _observed(ask: Ask, record: Record, batch: int) -> Observation:
    scale = 1e3 * ask.time_ratio
    # The last token's chunk, not the usage and the end behind it.
    return Observation(
        prompt_tokens=record.prompt_tokens,
        cached_tokens=max(record.cached_tokens, 0),
        completion_tokens=record.completion_tokens,
        ttft_ms=(record.first_data - record.sent) * scale,
        e2e_ms=(record.last_data - record.sent) * scale,
        batch=batch,
    )
