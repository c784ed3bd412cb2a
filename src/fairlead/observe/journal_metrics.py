"""What the journal on disk tells of itself, on the metrics page."""

from typing import Protocol

from fairlead.observe.exposition import Registry
from fairlead.observe.instruments import counters, gauges


class JournalCounts(Protocol):
    """Totals since the start; `size` is now."""

    dropped: int
    unwritten: int
    records: int
    bytes: int
    segments: int
    size: int
    errors: int


def show_journal(registry: Registry, counts: JournalCounts) -> None:
    """Read when somebody looks."""
    written, lost = counters(), counters("why")
    volume, segments, errors, size = counters(), counters(), counters(), gauges()

    def refresh() -> None:
        written.child().value = counts.records
        lost.child("busy").value = counts.dropped
        lost.child("disk").value = counts.unwritten
        volume.child().value = counts.bytes
        segments.child().value = counts.segments
        errors.child().value = counts.errors
        size.child().value = counts.size

    registry.before(refresh)
    registry.show("fairlead_journal_records_total", "Records written to the journal.", written)
    registry.show("fairlead_journal_lost_total", "Records that are missing in the journal.", lost)
    registry.show("fairlead_journal_bytes_total", "Bytes written to the journal.", volume)
    registry.show("fairlead_journal_segments_total", "Segments that were begun.", segments)
    registry.show("fairlead_journal_errors_total", "Failures of the journal's disk.", errors)
    registry.show("fairlead_journal_size_bytes", "Bytes of all segments in the journal's directory.", size)
