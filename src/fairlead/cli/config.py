"""`fairlead validate` and `fairlead config`: a configuration's problems, its values, and its reference."""

from typing import Annotated

import typer

from fairlead.cli.basics import DEFAULT_FILE, echo_json
from fairlead.cli.options import ConfigFile, Workers, completion, wrapped
from fairlead.cli.validate import run_validate

_Name = Annotated[
    str,
    typer.Argument(
        help="A field, a section or a plugin.", autocompletion=completion("fairlead.compat.reference", "names")
    ),
]


def schema() -> None:
    """Print the JSON Schema (draft 2020-12) of the configuration, installed plugins included.

    \b
    Examples:
      fairlead config schema > fairlead.schema.json

    For completion and checks in an editor with the YAML language server, begin the configuration with this line:

    \b
      # yaml-language-server: $schema=fairlead.schema.json
    """
    import json

    from fairlead.compat.json_schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


def show(
    file: ConfigFile = DEFAULT_FILE,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per value.")] = False,
) -> None:
    """Print every value that is in effect and where it comes from: a line of the file, a default, a shorthand.

    \b
    Examples:
      fairlead config show examples/minimal.yaml
      fairlead config show --json | jq 'select(.origin != "default")'
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


def explain(
    name: _Name,
    as_json: Annotated[bool, typer.Option("--json", help="The entries as JSON.")] = False,
) -> None:
    """Print what the reference says about a field, a section or a plugin.

    \b
    Examples:
      fairlead config explain gateway.retry
      fairlead config explain scheduling.policy
      fairlead config explain prefix-aware
    """
    from fairlead.compat.reference import PLACES, choices, look_up, names
    from fairlead.config.problems import nearest, suggestion
    from fairlead.core.errors import ConfigError

    entries = look_up(name)
    if not entries:
        word, known = name.removeprefix("$."), sorted(set(names()))
        like = [path for path in known if word.lower() in path.rpartition(".")[2].lower()]
        if nearest(word, known):
            hint = suggestion(word, known)
        elif like:
            hint = f"perhaps {', '.join(like[:8])}"
        else:
            hint = suggestion(word, [path for path in known if "." not in path])
        raise ConfigError(f"nothing has this name; {hint}", name)
    if as_json:
        echo_json(entries)
        return
    for entry in entries:
        where = f" ({PLACES[entry.kind]})" if entry.kind else ""
        title = f"{entry.name}{where}: {entry.about}" if entry.about or where else ""
        lines = [wrapped(title, 0)] if title else []
        for field, kind, default, said in entry.rows:
            unset = default if default in ("", "needed") else f"default {default}"
            of = f": {kind}" if kind else ""
            lines += [wrapped(f"{field}{of}{f' ({unset})' if unset else ''}", 0), *([wrapped(said, 2)] if said else [])]
            known = choices(field)
            lines += [wrapped(f"One of {', '.join(known)}.", 2)] if known else []
        typer.echo("\n".join(lines).replace("`", ""))


def validate(
    file: ConfigFile = DEFAULT_FILE,
    as_json: Annotated[bool, typer.Option("--json", help="Problems and notes as JSON.")] = False,
    workers: Workers = 1,
) -> None:
    """Check a configuration (`-` = standard input), or the one in a ConfigMap, and print every problem with its line,
    its path and, if there is one, a hint.

    Plugins are loaded and built, and the files of endpoints, models and keys are read too. Nothing is started and no
    port is opened.

    \b
    Examples:
      fairlead validate examples/minimal.yaml
      fairlead validate fairlead.yaml --json | jq .problems
      fairlead validate fairlead.yaml --workers 4
      kubectl get configmap NAME -o yaml | fairlead validate -
    """
    raise typer.Exit(run_validate(file, as_json, workers))
