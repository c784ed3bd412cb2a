"""Azure Public Dataset 2023: `TIMESTAMP,ContextTokens,GeneratedTokens`, wall-clock time with seven decimals."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from fairlead.workload.formats.jsonlines import checked
from fairlead.workload.formats.table import TableRow, read_table, write_table
from fairlead.workload.record import Record

FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_NAMES = {"in_tokens": "ContextTokens", "out_tokens": "GeneratedTokens", "arrival_us": "TIMESTAMP"}
#: Written traces begin here: a record knows only how long after the beginning it came.
_ORIGIN = datetime(2023, 11, 16, 18, 0, 0, tzinfo=UTC)


def read(data: bytes, source: str = "trace") -> list[Record]:
    """Times count from the first row. Raises `TraceError`."""
    records: list[Record] = []
    first = 0
    for row in read_table(data, FIELDS, source):
        at = _microseconds(row)
        first = first if records else at
        record = Record(
            id=str(len(records)),
            arrival_us=at - first,
            in_tokens=row.count("ContextTokens"),
            out_tokens=max(row.count("GeneratedTokens"), 1),
        )
        records.append(checked(record, source, row.line, _NAMES))
    return records


def write(records: Iterable[Record]) -> bytes:
    return write_table(FIELDS, ((_text(r.arrival_us), r.in_tokens, r.out_tokens) for r in records))


def _microseconds(row: TableRow) -> int:
    text = row.text("TIMESTAMP").strip()
    whole, _, fraction = text.partition(".")
    fraction = fraction.split("+")[0].rstrip("Z")
    try:
        at = datetime.strptime(whole.replace("T", " "), "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
        micros = int(fraction[:6].ljust(6, "0")) if fraction else 0
    except ValueError:
        raise row.error("TIMESTAMP", f"expected a time like 2023-11-16 18:17:03.9799600, got {text[:40]!r}") from None
    return (at - _ORIGIN) // timedelta(microseconds=1) + micros


def _text(micros: int) -> str:
    at = _ORIGIN + timedelta(microseconds=micros)
    return f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond:06d}0"
