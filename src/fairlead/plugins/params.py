"""The base of every plugin's parameters: camelCase in files, unknown fields are errors, immutable."""

from msgspec import Struct


class Params(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Subclass it with defaults for every field that has a sensible one; the schema is derived from the annotations."""


class NoParams(Params, frozen=True, kw_only=True):
    """For plugins without parameters."""
