"""A command's usage and `--help` as plain text, and the former names of its options."""

import re
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

from typer.core import TyperCommand

from fairlead.cli.options import note_renamed

#: Options of 0.1, which work until 0.3: command → old → new.
RENAMED_OPTIONS: dict[str, dict[str, str]] = {
    "serve": {"--metrics-port": "--admin-port"},
    "stub": {"--write-endpoints": "--out", "--preset": "--engine"},
    "sim run": {
        "--head": "--requests",
        "--servers": "--replicas",
        "--requests": "--csv",
        "--preset": "--engine",
        "--like": "--engine",
    },
    "sim compare": {
        "--scenario": "--workload",
        "-s": "--workload",
        "--head": "--requests",
        "--servers": "--replicas",
        "--preset": "--engine",
    },
    "sim workload generate": {"--count": "--requests"},
}


class PlainCommand(TyperCommand):
    """A typer command whose help shows a value only for options that take one, and a default only if there is one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        renamed = RENAMED_OPTIONS.get(ctx.command_path.partition(" ")[2], {})
        return super().parse_args(ctx, [*with_new_names(args, renamed)])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return usage(self)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        flags = reference_flags() if self.name == "epp" else []
        for title, rows in (("Arguments", arguments(self)), ("Options", options(self)), ("Flags", flags)):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(
                        [(name, said + f" [default: {value}]" * bool(value)) for name, value, said in rows]
                    )


def with_new_names(args: Sequence[str], renamed: dict[str, str]) -> Iterator[str]:
    """The arguments with new names of options. Each old name is reported once on stderr."""
    reported: set[str] = set()
    for place, arg in enumerate(args):
        if arg == "--":
            yield from args[place:]
            return
        name, equals, value = arg.partition("=")
        new = renamed.get(name)
        # A name can be both old and new: then the old option took a file, and the new one takes a number.
        given = value or "".join(args[place + 1 : place + 2])
        if new is None or (name in renamed.values() and not re.match(r"[^-\d].*[./]|[./]", given)):
            yield arg
            continue
        if name not in reported:
            reported.add(name)
            note_renamed(name, new)
        yield f"{new}{equals}{value}"


def usage(command: Any) -> list[str]:
    """The parts of the usage line that follow the command's name."""
    places = [_place(parameter) for parameter in _visible(command, "argument")]
    return [*places, "[OPTIONS]"] if _visible(command, "option") or not places else places


def arguments(command: Any) -> list[tuple[str, str, str]]:
    """Name, default and help of each argument."""
    return [(_place(item), _default(item), item.help or "") for item in _visible(command, "argument")]


def options(command: Any) -> list[tuple[str, str, str]]:
    """Names and value, default and help of each option."""
    return [(_names(item), _default(item), item.help or "") for item in _visible(command, "option")]


def reference_flags() -> list[tuple[str, str, str]]:
    """Name, nothing, and the meaning here of each flag of the reference picker."""
    from fairlead.compat.command_line import FLAGS

    rows = []
    for name, flag in FLAGS.items():
        said = f"No effect: {flag.meaning}" if flag.ignored else flag.meaning
        there = f" [default there: {flag.default}]" if flag.default else ""
        rows.append((f"--{name}", "", said.replace("`", "") + there))
    return rows


def _visible(command: Any, kind: str) -> list[Any]:
    return [item for item in command.params if item.param_type_name == kind and item.name != "help" and not item.hidden]


def _place(parameter: Any) -> str:
    name = _value(parameter) if parameter.required else f"[{_value(parameter)}]"
    return f"{name}..." if parameter.nargs == -1 else name


def _names(parameter: Any) -> str:
    names = ", ".join((*sorted(parameter.opts, key=len), *parameter.secondary_opts))
    return names if parameter.is_flag else f"{names} {_value(parameter)}"


def _value(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper().replace("_", "-"))


def _default(parameter: Any) -> str:
    """The default as text; "" if it is not worth showing."""
    default = parameter.default.value if isinstance(parameter.default, Enum) else parameter.default
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    if default in (None, "", False, ()) or not parameter.show_default:
        return ""
    return "on" if default is True else str(default)
