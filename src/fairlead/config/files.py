"""Reading files of a bounded size."""

from pathlib import Path

from fairlead.model.errors import ConfigError
from fairlead.wire.plain_yaml import MAX_BYTES


def read_bytes(path: Path) -> bytes:
    """The content of a configuration file, or at least enough to see that it is too large."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", "$", str(path)) from None
