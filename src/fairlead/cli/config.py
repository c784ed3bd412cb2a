"""`fairlead config show FILE`: what a configuration amounts to."""

import enum
from typing import Annotated

import typer

from fairlead.cli._options import ConfigFile


class Action(enum.StrEnum):
    SHOW = "show"


def config(
    action: Annotated[Action, typer.Argument(metavar="ACTION", help="`show`", show_default=False)],
    file: ConfigFile,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per value.")] = False,
) -> None:
    """Show every value of the effective configuration and its origin: a line of the file, a default, a shorthand.

    \b
    Examples:
      fairlead config show examples/minimal.yaml
    """
    import json

    from fairlead.config.files import read_bytes
    from fairlead.config.load import load
    from fairlead.config.show import effective
    from fairlead.wire.plain_yaml import parse_yaml

    values = effective(load(file, need_endpoints=False), parse_yaml(read_bytes(file)))
    width = max(len(value.path) for value in values)
    for value in values:
        shown = json.dumps(value.value, default=str)
        if as_json:
            typer.echo(json.dumps({"path": value.path, "value": value.value, "origin": value.origin}, default=str))
        else:
            typer.echo(f"{value.path:<{width}}  {shown}  # {value.origin}")
