"""What commands share and does not import typer: `validate` runs without typer, see `fairlead.cli.main`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Exit codes, as promised by `fairlead --help`.
FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = 130
#: What `fairlead init` writes, and what other commands read by default.
DEFAULT_FILE = Path("fairlead.yaml")


def config_file(file: Path) -> Path:
    """The configuration file. Raises `ConfigError` if none was named and the default file does not exist."""
    if file == DEFAULT_FILE and not file.exists():
        from fairlead.core.errors import ConfigError

        raise ConfigError("no such file here: name the configuration, or write one with `fairlead init`", str(file))
    return file


@contextmanager
def without_collection() -> Iterator[None]:
    """Run code without the cycle collector. Importing a thousand modules makes no garbage, and searching for it would
    take a tenth of the start's time, and as much at the end of a short command."""
    import gc

    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def echo_json(value: object) -> None:
    """Print the value as indented JSON on stdout."""
    import msgspec

    from fairlead.core.text import escaped

    sys.stdout.write(escaped(msgspec.json.format(msgspec.json.encode(value))) + "\n")
