"""The native format: lines of JSON, one record each, behind a line that names the workload and its dispatch mode."""

from msgspec import Struct

from fairlead.workload.formats.jsonlines import checked, lines, rows
from fairlead.workload.formats.problems import TraceError
from fairlead.workload.record import Dispatch, Record, Workload, arranged

MARK = b'{"fairlead_workload":'


class Header(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line. A file without one holds records from its first line on."""

    #: Version of the format.
    fairlead_workload: int = 1
    name: str = ""
    dispatch: Dispatch = "timestamp"


def read(data: bytes, source: str = "workload", name: str = "workload") -> Workload:
    """Raises `TraceError`; ids must be unique, and a parent must come before its followers."""
    header = Header()
    if data.startswith(MARK):
        first, _, _ = data.partition(b"\n")
        (_, header), *_ = rows(first, Header, source)
        if header.fairlead_workload != 1:
            message = f"version {header.fairlead_workload} is not known here"
            raise TraceError(source, 1, "fairlead_workload", message)
        # Blanked out, not cut off, so that lines keep their numbers.
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


def write(workload: Workload) -> bytes:
    """Everything of it."""
    return lines([Header(name=workload.name, dispatch=workload.dispatch), *workload.records])
