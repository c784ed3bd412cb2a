"""Mooncake (FAST'25): one JSON object per line, `timestamp` in ms, `hash_ids` of 512 tokens each.

Also the variants of other replay tools that add `session_id` and `delay` (ms after the session's previous answer).
"""

from collections.abc import Iterable

from msgspec import UNSET, Struct, UnsetType

from fairlead.workload.formats.jsonlines import checked, lines, rows
from fairlead.workload.record import Record

BLOCK_SIZE = 512
_NAMES = {
    "in_tokens": "input_length",
    "out_tokens": "output_length",
    "arrival_us": "timestamp",
    "think_ms": "delay",
    "block_size": "hash_ids",
}


class Row(Struct, kw_only=True):
    timestamp: float | UnsetType = UNSET
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    session_id: str | UnsetType = UNSET
    delay: float | UnsetType = UNSET


def read(data: bytes, source: str = "trace", block_size: int = BLOCK_SIZE) -> list[Record]:
    """Raises `TraceError`. A row without a timestamp continues its session, or starts with the row before."""
    records: list[Record] = []
    last: dict[str, str] = {}
    at = 0.0
    for number, row in rows(data, Row, source):
        at = row.timestamp if row.timestamp is not UNSET else at
        session = row.session_id or ""
        record = Record(
            id=str(len(records)),
            arrival_us=round(at * 1000),
            session=session,
            parent=last.get(session, "") if session else "",
            think_ms=row.delay or 0.0,
            in_tokens=row.input_length,
            out_tokens=max(row.output_length, 1) if row.output_length >= 0 else row.output_length,
            block_size=block_size if row.hash_ids else 0,
            hash_ids=row.hash_ids,
        )
        records.append(checked(record, source, number, _NAMES))
        if session:
            last[session] = record.id
    return records


def write(records: Iterable[Record]) -> bytes:
    """What the format can hold of them: times in ms, lengths, hash ids, sessions."""
    return lines(
        Row(
            timestamp=record.arrival_us // 1000 if record.arrival_us % 1000 == 0 else record.arrival_us / 1000,
            input_length=record.in_tokens,
            output_length=record.out_tokens,
            hash_ids=record.hash_ids,
            session_id=record.session or UNSET,
            delay=record.think_ms or UNSET,
        )
        for record in records
    )
