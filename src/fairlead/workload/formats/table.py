"""Rows of CSV with a header line → checked fields, with the line and the field of whatever is wrong."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from math import isfinite

from fairlead.workload.formats.problems import TraceError, shortened


class TableRow:
    """One line; fields are asked for by name."""

    __slots__ = ("_source", "_values", "line")

    def __init__(self, values: dict[str, str], source: str, line: int) -> None:
        self._values = values
        self._source = source
        self.line = line

    def has(self, field: str) -> bool:
        """The field is there and not empty."""
        return bool(self._values.get(field, "").strip())

    def text(self, field: str) -> str:
        return self._values[field]

    def number(self, field: str) -> float:
        try:
            value = float(self._values[field])
        except ValueError:
            value = float("nan")
        if not isfinite(value):
            raise self.error(field, f"expected a number, got {shortened(self._values[field])!r}")
        return value

    def count(self, field: str) -> int:
        value = self.number(field)
        if value != int(value) or value < 0:
            raise self.error(field, f"expected a whole number of at least 0, got {shortened(self._values[field])!r}")
        return int(value)

    def error(self, field: str, message: str) -> TraceError:
        return TraceError(self._source, self.line, field, message)


def read_table(data: bytes, fields: Sequence[str], source: str) -> Iterator[TableRow]:
    """Rows in order; blank lines are passed over. Raises `TraceError` when a column is missing or a row is short."""
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
