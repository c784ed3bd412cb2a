"""Arguments and small helpers that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

#: Exit codes, as promised by `fairlead --help`.
FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = 130

ConfigFile = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="Configuration, YAML or JSON. See docs/configuration.md.", show_default=False),
]


def complain(problem: str | Exception) -> None:
    """One line on stderr for each line of the message; of a file that cannot be used, its name and the reason."""
    message = str(problem)
    if isinstance(problem, OSError) and problem.filename and problem.strerror:
        message = f"{problem.filename}: {problem.strerror}"
    for line in message.splitlines():
        typer.echo(f"error: {line}", err=True)


def preset_argument(value: str) -> str:
    """A preset's name as it is, or the text of the file that `value` names. Raises `ValueError` or `OSError`."""
    path = Path(value)
    if path.suffix not in (".yaml", ".yml", ".json"):
        return value
    from fairlead.engine.preset_text import read_preset

    text = path.read_text(encoding="utf-8")
    read_preset(text, value)
    return text + "\n"
