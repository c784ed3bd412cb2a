"""Columns by name: what every endpoint has, and what a configuration adds under `metrics.engines.NAME.extra`."""

from collections.abc import Mapping
from typing import Final

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.fleet import Fleet

#: Name in a configuration to the attribute of the table.
COLUMNS: Final[Mapping[str, str]] = {
    "waiting": "waiting",
    "running": "running",
    "kvUsage": "kv",
    "queue": "queue",
    "active": "active",
    "inflight": "inflight",
    "pendingTokens": "pending_tokens",
}


def metric_column(fleet: Fleet, name: str) -> FloatColumn:
    """NaN where an endpoint does not report it."""
    attribute = COLUMNS.get(name)
    if attribute is None:
        return fleet.table.extra(name)
    column: FloatColumn = getattr(fleet.table, attribute)
    return column
