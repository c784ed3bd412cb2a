"""Vidur and Splitwise: `arrived_at` in seconds, `num_prefill_tokens`, `num_decode_tokens`."""

from collections.abc import Iterable

from fairlead.workload.formats.jsonlines import checked
from fairlead.workload.formats.table import read_table, write_table
from fairlead.workload.record import Record

FIELDS = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
_NAMES = dict(zip(("arrival_us", "in_tokens", "out_tokens"), FIELDS, strict=True))


def read(data: bytes, source: str = "trace") -> list[Record]:
    """Raises `TraceError`."""
    records: list[Record] = []
    for row in read_table(data, FIELDS, source):
        record = Record(
            id=str(len(records)),
            arrival_us=round(row.number("arrived_at") * 1e6),
            in_tokens=row.count("num_prefill_tokens"),
            out_tokens=max(row.count("num_decode_tokens"), 1),
        )
        records.append(checked(record, source, row.line, _NAMES))
    return records


def write(records: Iterable[Record]) -> bytes:
    return write_table(FIELDS, ((f"{r.arrival_us / 1e6:.6f}", r.in_tokens, r.out_tokens) for r in records))
