"""A recorded or generated workload, sent to a live server.

Rules
* Equal block ids at equal places give equal bytes, in every run with the same seed: what was a prefix hit when the
  workload was recorded can be one again.
* A prompt's tail that no id names, and a prompt without ids, are nobody else's.
* A block cut short is a beginning of the whole one, so that the next turn of a conversation continues it.

The text of a block is an extendable-output hash of its id: shorter output is a prefix of longer output, and 16 tokens
cost 1 µs where seeding a generator costs 5 µs.
"""

from collections.abc import Iterator, Sequence
from hashlib import shake_128
from random import Random
from typing import Any

import msgspec

from fairlead.bench.words import spell
from fairlead.bench.workload import CHAT_PATH, Call
from fairlead.workload.arrivals import Arrivals
from fairlead.workload.record import Record


class Replay:
    """The requests of a workload, in the order of its records; ends with them."""

    def __init__(
        self,
        records: Sequence[Record],
        *,
        model: str = "",
        fallback_model: str = "default",
        output_tokens: int = 0,
        extra: dict[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        """`model` and `output_tokens` replace what the records say; `fallback_model` is for records that name none.

        `extra`: further top-level fields of every request.
        """
        self._records = records
        self._model = model
        self._fallback = fallback_model
        self._output_tokens = output_tokens
        self._extra = extra or {}
        self._seed = seed

    def calls(self) -> Iterator[Call]:
        for record in self._records:
            yield Call(body=self._body(record), path=CHAT_PATH)

    def _body(self, record: Record) -> bytes:
        fields: dict[str, Any] = {
            "model": self._model or record.lora or record.model or self._fallback,
            "messages": [{"role": "user", "content": record.text or self._prompt(record).decode("ascii")}],
            "max_tokens": self._output_tokens or record.out_tokens,
        }
        if record.stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(fields | self._extra)

    def _prompt(self, record: Record) -> bytes:
        size, left = record.block_size, record.in_tokens
        pieces = []
        for block in record.hash_ids:
            pieces.append(self._numbers(f"block/{block:x}", min(size, left)))
            left -= size
        if left > 0:
            pieces.append(self._numbers(f"own/{record.id}", left))
        return spell(b"".join(pieces))

    def _numbers(self, name: str, tokens: int) -> bytes:
        return shake_128(f"{self._seed}/{name}".encode("utf-8", "surrogatepass")).digest(tokens)


class Recorded:
    """Arrivals at the records' own times, `speedup` times as fast; the first at once."""

    def __init__(self, records: Sequence[Record], speedup: float = 1.0) -> None:
        self._records = records
        self._speedup = speedup

    def offsets(self) -> Iterator[float]:
        begin = self._records[0].arrival_us if self._records else 0
        for record in self._records:
            yield (record.arrival_us - begin) * 1e-6 / self._speedup


class Paced:
    """Arrivals of the workload generators (`fairlead.workload.arrivals`), seeded."""

    def __init__(self, arrivals: Arrivals, seed: int = 0) -> None:
        self._arrivals = arrivals
        self._seed = seed

    def offsets(self) -> Iterator[float]:
        return self._arrivals(Random(self._seed))
