"""What is wrong with a trace file: always the file, the line and the field."""

from fairlead.model.errors import FairleadError


class TraceError(FairleadError):
    """A trace cannot be read. `line` counts from 1; `field` is empty when the whole line is at fault."""

    def __init__(self, source: str, line: int, field: str, message: str) -> None:
        self.source = source
        self.line = line
        self.field = field
        where = f"{source}:{line}" if line else source
        super().__init__(f"{where}: {field}: {message}" if field else f"{where}: {message}")


def shortened(text: str, most: int = 60) -> str:
    """Part of a bad value, for a message."""
    return text if len(text) <= most else f"{text[:most]}…"
