"""Every plugin of the reference by its type, see its documentation of August 2026 (0.10)."""

from fairlead.config.epp.choosing import FILTERS, HANDLERS, PICKERS, SCORERS
from fairlead.config.epp.entry import Entry, Table
from fairlead.config.epp.feeding import DATA, FLOW, PARSERS, PRODUCERS

CATALOGUE: Table = {**FILTERS, **SCORERS, **PICKERS, **HANDLERS, **PRODUCERS, **FLOW, **DATA, **PARSERS}

__all__ = ["CATALOGUE", "Entry"]
