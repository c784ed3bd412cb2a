"""Published trace formats ↔ workloads: each has a `read` and a `write`, and a row in the table at the end.

Each format can represent only a part of a workload. `write` loses the rest (for example block ids in a table of token
counts); what the format represents is read back unchanged. Errors name the file, the line and the field."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from math import isfinite
from typing import TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from fairlead.core.errors import ConfigError
from fairlead.lab.workload.record import Dispatch, Outcome, Record, Workload, arranged, problem_of


class TraceError(ConfigError):
    """A trace cannot be read. `line` counts from 1; `field` is empty if the whole line is invalid."""

    def __init__(self, source: str, line: int, field: str, message: str) -> None:
        super().__init__(message, field, f"{source}:{line}" if line else source)


def shortened(text: str) -> str:
    """A bad value, cut to 60 characters, for a message."""
    return text if len(text) <= 60 else f"{text[:60]}…"


# Lines of JSON → checked structs. Errors name the line and the field.

T = TypeVar("T")


def rows(data: bytes, kind: type[T], source: str) -> Iterator[tuple[int, T]]:
    """(line number, row) of every non-blank line. Raises `TraceError`."""
    decoder = msgspec.json.Decoder(kind)
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            yield number, decoder.decode(line)
        except msgspec.ValidationError as error:
            raise TraceError(source, number, *_place(str(error))) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(source, number, "", f"no JSON object: {error}") from None


def lines(items: Iterable[object]) -> bytes:
    """One JSON document per line."""
    encoder = msgspec.json.Encoder()
    return b"".join(encoder.encode(item) + b"\n" for item in items)


def checked(record: Record, source: str, line: int, names: dict[str, str]) -> Record:
    """The record, if it is valid. `names`: our fields → their names in the format. Raises `TraceError`."""
    problem = problem_of(record)
    if problem is not None:
        field, text = problem
        raise TraceError(source, line, names.get(field, field), text)
    return record


def _following(records: Iterable[Record]) -> list[Record]:
    """The records in the order of their arrival. In a session, each one's parent is the one before it."""
    last: dict[str, str] = {}
    made = []
    for record in sorted(records, key=lambda record: record.arrival_us):
        before = last.get(record.session)
        if record.session:
            last[record.session] = record.id
        made.append(replace(record, parent=before) if before is not None else record)
    return made


def _microseconds(value: float) -> int:
    """The time as a whole number. One far beyond what `checked` takes is cut first, as infinity has no whole number."""
    return round(max(-1e18, min(value, 1e18)))


def _place(message: str) -> tuple[str, str]:
    """(field, problem) from the decoder's message."""
    text, _, path = message.partition(" - at `$")
    path = path.strip("`.")
    named = "missing required field" in text or "unknown field" in text
    inner = text.split("`")[1] if named and "`" in text else ""
    return ".".join(part for part in (path, inner) if part), text


# Rows of CSV with a header line → checked fields. Errors name the line and the field.


class TableRow(Struct, frozen=True):
    """One line, with access to its fields by name."""

    values: dict[str, str]
    source: str
    line: int

    def has(self, field: str) -> bool:
        """Whether the field is present and not empty."""
        return bool(self.values.get(field, "").strip())

    def number(self, field: str) -> float:
        try:
            value = float(self.values[field])
        except ValueError:
            value = float("nan")
        if not isfinite(value):
            raise self.error(field, f"expected a number, got {shortened(self.values[field])!r}")
        return value

    def count(self, field: str) -> int:
        value = self.number(field)
        if value != int(value) or value < 0:
            raise self.error(field, f"expected a whole number of at least 0, got {shortened(self.values[field])!r}")
        return int(value)

    def error(self, field: str, message: str) -> TraceError:
        return TraceError(self.source, self.line, field, message)


def read_table(data: bytes, fields: Sequence[str], source: str) -> Iterator[TableRow]:
    """The rows in order, without blank lines. Raises `TraceError` if a column is missing or a row is short."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TraceError(source, line, "", "is no UTF-8 text") from None
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        header = [name.strip() for name in next(reader, [])]
        missing = [name for name in fields if name not in header]
        if missing:
            raise TraceError(source, 1, missing[0], f"no such column; the header has {', '.join(header) or 'nothing'}")
        for values in reader:
            if not any(values):
                continue
            if len(values) < len(header):
                raise TraceError(source, reader.line_num, header[len(values)], "is missing, the line ends before it")
            yield TableRow(dict(zip(header, values, strict=False)), source, reader.line_num)
    except csv.Error as error:
        raise TraceError(source, reader.line_num, "", str(error)) from None


def write_table(fields: Sequence[str], rows: Iterable[Sequence[object]]) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(fields)
    writer.writerows(rows)
    return out.getvalue().encode()


NATIVE_MARK = b'{"fairlead_workload":'


class NativeHeader(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line of a native file. It is optional: a file without it starts with a record."""

    #: Version of the format.
    fairlead_workload: int = 1
    name: str = ""
    dispatch: Dispatch = "timestamp"


def read_native(data: bytes, source: str = "workload", name: str = "workload") -> Workload:
    """Read the native format. Raises `TraceError`; ids must be unique, and a parent must precede its followers."""
    header = NativeHeader()
    if data.startswith(NATIVE_MARK):
        first, _, _ = data.partition(b"\n")
        (_, header), *_ = rows(first, NativeHeader, source)
        if header.fairlead_workload != 1:
            message = f"version {header.fairlead_workload} is not supported; this program reads version 1"
            raise TraceError(source, 1, "fairlead_workload", message)
        # The header's text is removed, but not its line break, so that lines keep their numbers.
        data = data[len(first) :]
    records: list[Record] = []
    seen: set[str] = set()
    for number, record in rows(data, Record, source):
        records.append(checked(record, source, number, {}))
        if record.id in seen:
            raise TraceError(source, number, "id", f"{record.id[:40]!r} is there already")
        if record.parent and record.parent not in seen:
            raise TraceError(source, number, "parent", f"no earlier record has the id {record.parent[:40]!r}")
        seen.add(record.id)
    return arranged(header.name or name, records, header.dispatch)


def write_native(workload: Workload) -> bytes:
    return lines([NativeHeader(name=workload.name, dispatch=workload.dispatch), *workload.records])


# Mooncake (FAST'25): one JSON object per line, `timestamp` in ms, `hash_ids` of 512 tokens each.
#
# Also the variants of other replay tools, which add `session_id` and `delay` (ms after the session's previous answer).


MOONCAKE_BLOCK = 512
_MOONCAKE_NAMES = {
    "in_tokens": "input_length",
    "out_tokens": "output_length",
    "arrival_us": "timestamp",
    "think_ms": "delay",
    "block_size": "hash_ids",
}


class MooncakeRow(Struct, kw_only=True):
    timestamp: float | UnsetType = UNSET
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    session_id: str | UnsetType = UNSET
    delay: float | UnsetType = UNSET


def read_mooncake(data: bytes, source: str = "trace") -> list[Record]:
    """Read a trace. A row of a session that has no timestamp gets that of the row before it; in `think` dispatch,
    `delay` and the session decide when it starts. If no row has one, all start at once. Raises `TraceError`."""
    records: list[Record] = []
    arrival_ms, timed = 0.0, False
    for number, row in rows(data, MooncakeRow, source):
        session = row.session_id or ""
        if row.timestamp is not UNSET:
            arrival_ms, timed = row.timestamp, True
        elif timed and not session:
            raise TraceError(source, number, "timestamp", "is missing; only a row with a session_id may lack it")
        record = Record(
            id=str(len(records)),
            arrival_us=_microseconds(arrival_ms * 1e3),
            session=session,
            think_ms=row.delay or 0.0,
            in_tokens=row.input_length,
            out_tokens=max(row.output_length, 1) if row.output_length >= 0 else row.output_length,
            block_size=MOONCAKE_BLOCK if row.hash_ids else 0,
            hash_ids=row.hash_ids,
        )
        records.append(checked(record, source, number, _MOONCAKE_NAMES))
    return _following(records)


def write_mooncake(records: Iterable[Record]) -> bytes:
    """Write what the format can represent: times in ms, lengths, hash ids, sessions."""
    return lines(
        MooncakeRow(
            timestamp=record.arrival_us // 1000 if record.arrival_us % 1000 == 0 else record.arrival_us / 1000,
            input_length=record.in_tokens,
            output_length=record.out_tokens,
            hash_ids=record.hash_ids,
            session_id=record.session or UNSET,
            delay=record.think_ms or UNSET,
        )
        for record in records
    )


BAILIAN_BLOCK = 16
_BAILIAN_NAMES = {"in_tokens": "input_length", "out_tokens": "output_length", "arrival_us": "timestamp"}
_NO_PARENT = -1


class BailianRow(Struct, kw_only=True):
    chat_id: int | str
    parent_chat_id: int | str = _NO_PARENT
    timestamp: float
    input_length: int
    output_length: int
    type: str = "text"
    turn: int = 1
    hash_ids: tuple[int, ...] = ()


def read_bailian(data: bytes, source: str = "trace") -> list[Record]:
    """A chat whose parent is not in the file begins a session. Repeated ids are made unique. Raises `TraceError`."""
    records: list[Record] = []
    sessions: dict[str, str] = {}
    for number, row in sorted(rows(data, BailianRow, source), key=lambda item: item[1].timestamp):
        chat, parent = str(row.chat_id), "" if row.parent_chat_id == _NO_PARENT else str(row.parent_chat_id)
        if chat in sessions:
            chat = f"{chat}#{number}"
        sessions[chat] = sessions.get(parent, chat)
        record = Record(
            id=chat,
            arrival_us=_microseconds(row.timestamp * 1e6),
            session=sessions[chat],
            parent=parent if parent in sessions else "",
            tenant=row.type,
            in_tokens=row.input_length,
            out_tokens=max(row.output_length, 1) if row.output_length >= 0 else row.output_length,
            block_size=BAILIAN_BLOCK if row.hash_ids else 0,
            hash_ids=row.hash_ids[: -(-row.input_length // BAILIAN_BLOCK)],
        )
        records.append(checked(record, source, number, _BAILIAN_NAMES))
    return records


def write_bailian(records: Iterable[Record]) -> bytes:
    turns: dict[str, int] = {}
    out = []
    for record in records:
        turns[record.id] = turns.get(record.parent, 0) + 1
        out.append(
            BailianRow(
                chat_id=_chat_id(record.id),
                parent_chat_id=_chat_id(record.parent) if record.parent else _NO_PARENT,
                timestamp=record.arrival_us / 1e6,
                input_length=record.in_tokens,
                output_length=record.out_tokens,
                type=record.tenant or "text",
                turn=turns[record.id],
                hash_ids=record.hash_ids,
            )
        )
    return lines(out)


def _chat_id(text: str) -> int | str:
    return int(text) if text.isdecimal() and str(int(text)) == text else text


AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
#: The time at which written traces begin, because a record has only its time since the start of the workload.
_AZURE_ORIGIN = datetime(2023, 11, 16, 18, 0, 0, tzinfo=UTC)


def _times_and_lengths(
    table: Sequence[TableRow], arrivals_us: Sequence[int], fields: Sequence[str], source: str
) -> list[Record]:
    """The records of a table with nothing but times and lengths. `fields`: the columns with arrival times, prompt
    tokens and answer tokens."""
    names = dict(zip(("arrival_us", "in_tokens", "out_tokens"), fields, strict=True))
    records = []
    for index, (row, arrival_us) in enumerate(zip(table, arrivals_us, strict=True)):
        prompt, answer = row.count(fields[1]), max(row.count(fields[2]), 1)
        record = Record(id=str(index), arrival_us=arrival_us, in_tokens=prompt, out_tokens=answer)
        records.append(checked(record, source, row.line, names))
    return records


def read_azure(data: bytes, source: str = "trace") -> list[Record]:
    """Read a trace. Arrivals count from the earliest timestamp. Raises `TraceError`."""
    table = list(read_table(data, AZURE_FIELDS, source))
    arrivals_us = [_azure_microseconds(row) for row in table]
    first = min(arrivals_us, default=0)
    return _times_and_lengths(table, [arrival_us - first for arrival_us in arrivals_us], AZURE_FIELDS, source)


def write_azure(records: Iterable[Record]) -> bytes:
    return write_table(AZURE_FIELDS, ((_azure_time(r.arrival_us), r.in_tokens, r.out_tokens) for r in records))


def _azure_microseconds(row: TableRow) -> int:
    """Microseconds since `_AZURE_ORIGIN`. A time without an offset is in UTC."""
    text = row.values["TIMESTAMP"].strip()
    try:
        if len(text) < len("2023-11-16 18:17:03"):
            raise ValueError
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise row.error("TIMESTAMP", f"expected a time like 2023-11-16 18:17:03.9799600, got {text[:40]!r}") from None
    return ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _AZURE_ORIGIN) // timedelta(microseconds=1)


def _azure_time(micros: int) -> str:
    moment = _AZURE_ORIGIN + timedelta(microseconds=micros)
    return f"{moment:%Y-%m-%d %H:%M:%S}.{moment.microsecond:06d}0"


VIDUR_FIELDS = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")


def read_vidur(data: bytes, source: str) -> list[Record]:
    """Read a trace. Raises `TraceError`."""
    table = list(read_table(data, VIDUR_FIELDS, source))
    return _times_and_lengths(
        table, [_microseconds(row.number("arrived_at") * 1e6) for row in table], VIDUR_FIELDS, source
    )


def write_vidur(records: Iterable[Record]) -> bytes:
    return write_table(VIDUR_FIELDS, ((f"{r.arrival_us / 1e6:.6f}", r.in_tokens, r.out_tokens) for r in records))


BURSTGPT_FIELDS = (
    "Timestamp", "Session ID", "Elapsed time", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type",
)  # fmt: skip
#: Older releases lack session and elapsed time.
_BURSTGPT_NEEDED = ("Timestamp", "Model", "Request tokens", "Response tokens")
_BURSTGPT_NAMES = {"arrival_us": "Timestamp", "in_tokens": "Request tokens", "out_tokens": "Response tokens"}
_BURSTGPT_CONVERSATION = "Conversation log"


def read_burstgpt(data: bytes, source: str = "trace") -> list[Record]:
    """Read a trace. Failed rows (no response tokens) are left out, because they cannot be replayed. Raises
    `TraceError`."""
    records: list[Record] = []
    for row in read_table(data, _BURSTGPT_NEEDED, source):
        tokens = row.count("Response tokens")
        if tokens == 0:
            continue
        session = row.values.get("Session ID", "").strip()
        elapsed = row.number("Elapsed time") * 1e3 if row.has("Elapsed time") else -1.0
        record = Record(
            id=str(len(records)),
            arrival_us=_microseconds(row.number("Timestamp") * 1e6),
            session=session,
            model=row.values["Model"].strip(),
            in_tokens=row.count("Request tokens"),
            out_tokens=tokens,
            outcome=Outcome(e2e_ms=round(elapsed, 3)) if elapsed >= 0 else None,
        )
        records.append(checked(record, source, row.line, _BURSTGPT_NAMES))
    return _following(records)


def write_burstgpt(records: Iterable[Record]) -> bytes:
    return write_table(BURSTGPT_FIELDS, map(_burstgpt_row, records))


def _burstgpt_row(record: Record) -> tuple[object, ...]:
    elapsed = f"{record.outcome.e2e_ms / 1e3:g}" if record.outcome and record.outcome.e2e_ms >= 0 else ""
    kind = _BURSTGPT_CONVERSATION if record.session else "API log"
    total = record.in_tokens + record.out_tokens
    arrival_s = f"{record.arrival_us / 1e6:.6f}".rstrip("0").rstrip(".")
    return arrival_s, record.session, elapsed, record.model, record.in_tokens, record.out_tokens, total, kind


class Format(Struct, frozen=True):
    """The functions of a trace format. `read(name, data, source)` raises `TraceError` that names source, line and
    field. `help` describes the format in `--help`."""

    read: Callable[[str, bytes, str], Workload]
    write: Callable[[Workload], bytes]
    help: str


def _of_records(
    read: Callable[[bytes, str], list[Record]], write: Callable[[Iterable[Record]], bytes], text: str
) -> Format:
    return Format(
        lambda name, data, source: arranged(name, read(data, source)), lambda workload: write(workload.records), text
    )


FORMATS: Mapping[str, Format] = {
    "native": Format(
        lambda name, data, source: read_native(data, source, name), write_native, "Fairlead's own: everything"
    ),
    "mooncake": _of_records(read_mooncake, write_mooncake, "Mooncake: lengths, block ids of 512 tokens, sessions"),
    "bailian": _of_records(read_bailian, write_bailian, "Bailian (Qwen): lengths, block ids of 16 tokens, sessions"),
    "azure": _of_records(read_azure, write_azure, "Azure 2023: times and lengths"),
    "vidur": _of_records(read_vidur, write_vidur, "Vidur and Splitwise: times and lengths"),
    "burstgpt": _of_records(read_burstgpt, write_burstgpt, "BurstGPT: times, lengths, models, sessions"),
}


def guess(data: bytes) -> str:
    """The name of the trace format, recognized by the first line; empty if no format matches."""
    head = data.lstrip(b"\xef\xbb\xbf\r\n\t ").split(b"\n", 1)[0]
    if head.startswith(b"{"):
        signs = {
            "native": (NATIVE_MARK[1:-1], b'"in_tokens"'),
            "bailian": (b'"chat_id"',),
            "mooncake": (b'"input_length"',),
        }
        return next((name for name, marks in signs.items() if any(mark in head for mark in marks)), "")
    columns = {"azure": AZURE_FIELDS[0], "vidur": VIDUR_FIELDS[0], "burstgpt": "Request tokens"}
    return next((name for name, column in columns.items() if column.encode() in head), "")
