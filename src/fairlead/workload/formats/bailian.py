"""Bailian (Qwen): lines of JSON, `timestamp` in seconds, `hash_ids` of 16 tokens, sessions through `parent_chat_id`."""

from collections.abc import Iterable

from msgspec import Struct

from fairlead.workload.formats.jsonlines import checked, lines, rows
from fairlead.workload.record import Record

BLOCK_SIZE = 16
_NAMES = {"in_tokens": "input_length", "out_tokens": "output_length", "arrival_us": "timestamp"}
_NONE = -1


class Row(Struct, kw_only=True):
    chat_id: int | str
    parent_chat_id: int | str = _NONE
    timestamp: float
    input_length: int
    output_length: int
    type: str = "text"
    turn: int = 1
    hash_ids: tuple[int, ...] = ()


def read(data: bytes, source: str = "trace") -> list[Record]:
    """A chat whose parent is not in the file begins a session. Ids that repeat are made unique. Raises `TraceError`."""
    records: list[Record] = []
    sessions: dict[str, str] = {}
    for number, row in rows(data, Row, source):
        chat, parent = str(row.chat_id), "" if row.parent_chat_id == _NONE else str(row.parent_chat_id)
        if chat in sessions:
            chat = f"{chat}#{number}"
        sessions[chat] = sessions.get(parent, chat)
        record = Record(
            id=chat,
            arrival_us=round(row.timestamp * 1e6),
            session=sessions[chat],
            parent=parent if parent in sessions else "",
            tenant=row.type,
            in_tokens=row.input_length,
            out_tokens=max(row.output_length, 1) if row.output_length >= 0 else row.output_length,
            block_size=BLOCK_SIZE if row.hash_ids else 0,
            hash_ids=row.hash_ids[: -(-row.input_length // BLOCK_SIZE)],
        )
        records.append(checked(record, source, number, _NAMES))
    return records


def write(records: Iterable[Record]) -> bytes:
    turns: dict[str, int] = {}
    out = []
    for record in records:
        turns[record.id] = turns.get(record.parent, 0) + 1
        out.append(
            Row(
                chat_id=_number(record.id),
                parent_chat_id=_number(record.parent) if record.parent else _NONE,
                timestamp=record.arrival_us / 1e6,
                input_length=record.in_tokens,
                output_length=record.out_tokens,
                type=record.tenant or "text",
                turn=turns[record.id],
                hash_ids=record.hash_ids,
            )
        )
    return lines(out)


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() and str(int(text)) == text else text
