"""What every section of a configuration is."""

from msgspec import Struct


class Section(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """A mapping of the file."""
