"""Lines of JSON → checked structs, with the line and the field of whatever is wrong."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec

from fairlead.workload.formats.problems import TraceError
from fairlead.workload.record import Record, problem_of

T = TypeVar("T")


def rows(data: bytes, kind: type[T], source: str) -> Iterator[tuple[int, T]]:
    """(line number, row) of every line that is not blank. Raises `TraceError`."""
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
    """The record, if it is one. `names`: our fields → what the format calls them. Raises `TraceError`."""
    problem = problem_of(record)
    if problem is not None:
        field, text = problem
        raise TraceError(source, line, names.get(field, field), text)
    return record


def _place(message: str) -> tuple[str, str]:
    """(field, what is wrong) of the decoder's message."""
    text, _, path = message.partition(" - at `$")
    path = path.strip("`.")
    named = "missing required field" in text or "unknown field" in text
    inner = text.split("`")[1] if named and "`" in text else ""
    return ".".join(part for part in (path, inner) if part), text
