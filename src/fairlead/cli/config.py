"""`fairlead validate`, `config show`, `schema`: what is wrong with a configuration, what it is, what it may say."""

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairlead.cli.options import DEFAULT_FILE, WRONG_INPUT, ConfigFile, echo_json


def schema() -> None:
    """Print the JSON Schema (draft 2020-12) of the configuration, installed plugins included.

    \b
    Examples: completion and checks in an editor with the YAML language server:
      fairlead schema > fairlead.schema.json
      # yaml-language-server: $schema=fairlead.schema.json     (first line of the configuration)
    """
    import json

    from fairlead.compat.json_schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


# `fairlead config show FILE`: what a configuration amounts to.


class Action(enum.StrEnum):
    SHOW = "show"


def config(
    action: Annotated[Action, typer.Argument(metavar="ACTION", help="`show`", show_default=False)],
    file: ConfigFile = DEFAULT_FILE,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per value.")] = False,
) -> None:
    """Show every value of the effective configuration and its origin: a line of the file, a default, a shorthand.

    \b
    Examples:
      fairlead config show examples/minimal.yaml
    """
    import json

    from fairlead.compat.load import load, read_bytes
    from fairlead.compat.show import effective
    from fairlead.config.yaml import parse_yaml

    values = effective(load(file, need_endpoints=False), parse_yaml(read_bytes(file)))
    width = max(len(value.path) for value in values)
    for value in values:
        shown = json.dumps(value.value, default=str)
        if as_json:
            typer.echo(json.dumps({"path": value.path, "value": value.value, "origin": value.origin}, default=str))
        else:
            typer.echo(f"{value.path:<{width}}  {shown}  # {value.origin}")


if TYPE_CHECKING:
    from fairlead.config.problems import Report
    from fairlead.config.schema import Config


def validate(
    file: ConfigFile = DEFAULT_FILE,
    as_json: Annotated[bool, typer.Option("--json", help="Problems and notes as JSON.")] = False,
) -> None:
    """Check a configuration and print every problem with its line, its path and, if there is one, a hint.

    Plugins are loaded and made, and an endpoints file is read too; nothing is started and no port is opened.

    \b
    Examples:
      fairlead validate examples/minimal.yaml
      fairlead validate fairlead.yaml --json | jq .problems
    """
    from fairlead.compat.load import examine

    config, report = examine(file)
    if as_json:
        _as_json(file, config, report)
        return
    for problem in report.problems:
        typer.echo(problem.render(str(file)))
    for note in report.notes:
        typer.echo(f"note: {note.render(str(file))}")
    if config is None:
        count = len(report.problems)
        typer.echo(f"{count} problem{'s' if count > 1 else ''}")
        raise typer.Exit(WRONG_INPUT)
    names = _names(config)
    typer.echo(f"{file}: valid. {_summary(config)}{names}")


def _as_json(file: Path, config: "Config | None", report: "Report") -> None:
    from fairlead.pool.models_file import check_models

    named = check_models(config.models.file)[1] if config is not None and config.models.file else []
    valid = config is not None and not named
    document = {
        "file": str(file),
        "valid": valid,
        "problems": [*report.problems, *({"message": line} for line in named)],
        "notes": report.notes,
        "summary": _summary(config) if config is not None and valid else "",
    }
    echo_json(document)
    if not valid:
        raise typer.Exit(WRONG_INPUT)


def _names(config: "Config") -> str:
    """How much is defined of model names. Ends the command when something is wrong with them."""
    if not config.models.file:
        return ""
    from fairlead.pool.models_file import check_models

    models, problems = check_models(config.models.file)
    for line in problems:
        typer.echo(line)
    if problems:
        typer.echo(f"{len(problems)} problem{'s' if len(problems) > 1 else ''}")
        raise typer.Exit(WRONG_INPUT)
    return f" Models: {len(models.models)}, objectives: {len(models.objectives)}, rewrites: {len(models.rewrites)}."


def _summary(config: "Config") -> str:
    from fairlead.compat.load import read_bytes
    from fairlead.config.endpoint_list import parse_endpoints_text

    endpoints = config.endpoints.static
    if config.endpoints.file:
        endpoints = parse_endpoints_text(read_bytes(Path(config.endpoints.file))).entries
    policy = config.policy
    parts = f"{len(policy.filters)} filters"
    if policy.picker is not None:
        parts += f", {len(policy.scorers)} scorers, picker {policy.picker.name}"
    if policy.plugin is not None:
        parts += f", {policy.plugin.type}"
    return f"Policy {policy.name}: {parts}. Endpoints: {len(endpoints)}."
