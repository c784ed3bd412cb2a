"""BurstGPT: seconds, session, model, request and response tokens, log type. Rows that failed have 0 response tokens."""

from collections.abc import Iterable

from fairlead.workload.formats.jsonlines import checked
from fairlead.workload.formats.table import read_table, write_table
from fairlead.workload.record import Outcome, Record

FIELDS = (
    "Timestamp", "Session ID", "Elapsed time", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type",
)  # fmt: skip
#: Older releases lack session and elapsed time.
_NEEDED = ("Timestamp", "Model", "Request tokens", "Response tokens")
_NAMES = {"arrival_us": "Timestamp", "in_tokens": "Request tokens", "out_tokens": "Response tokens"}
_CONVERSATION = "Conversation log"


def read(data: bytes, source: str = "trace") -> list[Record]:
    """Failed rows (no response tokens) are left out, as there is nothing to replay. Raises `TraceError`."""
    records: list[Record] = []
    last: dict[str, str] = {}
    for row in read_table(data, _NEEDED, source):
        tokens = row.count("Response tokens")
        if tokens == 0:
            continue
        session = row.text("Session ID").strip() if row.has("Session ID") else ""
        elapsed = row.number("Elapsed time") * 1e3 if row.has("Elapsed time") else -1.0
        record = Record(
            id=str(len(records)),
            arrival_us=round(row.number("Timestamp") * 1e6),
            session=session,
            parent=last.get(session, "") if session else "",
            model=row.text("Model").strip(),
            in_tokens=row.count("Request tokens"),
            out_tokens=tokens,
            outcome=Outcome(e2e_ms=round(elapsed, 3)) if elapsed >= 0 else None,
        )
        records.append(checked(record, source, row.line, _NAMES))
        if session:
            last[session] = record.id
    return records


def write(records: Iterable[Record]) -> bytes:
    return write_table(FIELDS, map(_row, records))


def _row(record: Record) -> tuple[object, ...]:
    elapsed = f"{record.outcome.e2e_ms / 1e3:g}" if record.outcome and record.outcome.e2e_ms >= 0 else ""
    kind = _CONVERSATION if record.session else "API log"
    total = record.in_tokens + record.out_tokens
    at = f"{record.arrival_us / 1e6:.6f}".rstrip("0").rstrip(".")
    return at, record.session, elapsed, record.model, record.in_tokens, record.out_tokens, total, kind
