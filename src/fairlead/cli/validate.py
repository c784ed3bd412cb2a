"""`fairlead validate FILE`: everything that is wrong with a configuration, before it runs."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fairlead.cli._options import WRONG_INPUT, ConfigFile

if TYPE_CHECKING:
    from fairlead.config.schema import Config


def validate(file: ConfigFile) -> None:
    """Check a configuration and print every problem with its line, its path and, if there is one, a hint.

    Plugins are loaded and made, and an endpoints file is read too; nothing is started and no port is opened.
    """
    from fairlead.config.load import load, problems

    found = [problem.render(str(file)) for problem in problems(file)]
    if not found:
        config = load(file)
        for note in config.notes:
            typer.echo(f"note: {note.render(str(file))}")
        found, summary = _examine(config)
        if not found:
            typer.echo(f"{file}: valid. {summary}")
    for line in found:
        typer.echo(line)
    if found:
        typer.echo(f"{len(found)} problem{'s' if len(found) > 1 else ''}")
        raise typer.Exit(WRONG_INPUT)


def _examine(config: "Config") -> tuple[list[str], str]:
    """(problems that only show when things are made of the configuration, what it amounts to)."""
    from fairlead.config.load import read_bytes
    from fairlead.config.registry import build_hasher, build_policy
    from fairlead.model.errors import PluginError
    from fairlead.wire.endpoint_list import parse_endpoints_text

    found: list[str] = []
    try:
        build_policy(config)
        build_hasher(config)
    except PluginError as error:
        found.append(f"{config.source}: {error}")
    endpoints = config.endpoints.static
    if config.endpoints.file:
        listing = parse_endpoints_text(read_bytes(Path(config.endpoints.file)))
        endpoints = listing.entries
        found += [problem.render(config.endpoints.file) for problem in listing.problems]
    policy = config.policy
    summary = (
        f"Policy {policy.name}: {len(policy.filters)} filters, {len(policy.scorers)} scorers, "
        f"picker {policy.picker.name}. Endpoints: {len(endpoints)}."
    )
    return found, summary
