"""`fairlead doctor`: finds out what is wrong with a configuration and the installation that uses it."""

import os
import sys
from itertools import count
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated

import typer

from fairlead.cli.basics import DEFAULT_FILE, FAILED, WRONG_INPUT, config_file
from fairlead.cli.options import busy, complain, examples, hint_of, usable_url

if TYPE_CHECKING:
    from fairlead.config.schema import Config
    from fairlead.doctor.run import Check, Examination


def _checks(incomplete: str) -> list[str]:
    """The checks to offer in the shell's completion of `--only`."""
    from fairlead.doctor.checks import CHECKS

    return [check.name for check in CHECKS if check.name.startswith(incomplete)]


@examples("""
\b
Examples:
  fairlead doctor fairlead.yaml
  fairlead doctor fairlead.yaml --probe --gateway http://127.0.0.1:8080
  fairlead doctor fairlead.yaml --only kv-events,tokens --json
  fairlead doctor --list
""")
def doctor(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The configuration of the installation.")] = DEFAULT_FILE,
    admin: Annotated[
        str,
        typer.Option(metavar="URL", help="Admin port of a scheduler.", show_default="as configured, if it answers"),
    ] = "",
    gateway: Annotated[
        str, typer.Option(metavar="URL", help="Send requests through this gateway, with a key as http://:KEY@HOST.")
    ] = "",
    gateway_admin: Annotated[
        str, typer.Option(metavar="URL", help="Admin page of its Envoy: check its configuration.")
    ] = "",
    probe: Annotated[bool, typer.Option("--probe", help="Send small requests to model servers too.")] = False,
    only: Annotated[str, typer.Option(metavar="CHECK,...", help="Run only these checks.", autocompletion=_checks)] = "",
    list_checks: Annotated[bool, typer.Option("--list", help="List all checks and what they find.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Findings as JSON.")] = False,
) -> None:
    """Check a configuration, its endpoints and the running scheduler; print what is wrong, worst first.

    Each finding says what was seen, what to do and where to read more. Nothing is changed. Model servers
    compute only for --probe and --gateway: one output token per request.

    Exit codes: 0 nothing found (notes do not count), 1 something found or a check could not finish, 2 cannot run.
    """
    from fairlead.compat.load import load
    from fairlead.doctor.checks import CHECKS
    from fairlead.doctor.report import as_json as json_of
    from fairlead.doctor.report import as_text, listed

    checks = _chosen(CHECKS, only)
    if list_checks:
        typer.echo(listed(checks))
        return
    given = {"admin": admin, "gateway": gateway, "gateway_admin": gateway_admin}
    urls = {name: url and usable_url(url, f"--{name.replace('_', '-')}") for name, url in given.items()}
    examination = _examined(load(config_file(file)), checks, urls, probe)
    terminal = sys.stdout.isatty()
    colour, width = terminal and not os.environ.get("NO_COLOR"), get_terminal_size().columns if terminal else 0
    typer.echo(json_of(examination) if as_json else as_text(examination, colour, width))
    if not examination.well:
        raise typer.Exit(FAILED)


def _chosen(checks: "tuple[Check, ...]", only: str) -> "tuple[Check, ...]":
    from fairlead.config.problems import suggestion
    from fairlead.core.errors import ConfigError

    wanted = [name.strip() for name in only.split(",") if name.strip()]
    known = {check.name for check in checks}
    for name in wanted:
        if name not in known:
            raise ConfigError(f"there is no check '{name}'; {suggestion(name, known)}", "--only")
    return tuple(check for check in checks if not wanted or check.name in wanted)


def _examined(config: "Config", checks: "tuple[Check, ...]", urls: dict[str, str], probe: bool) -> "Examination":
    from fairlead.doctor.run import examine
    from fairlead.doctor.site import CannotExamine, Site
    from fairlead.pool.lookups import run

    async def examined() -> "Examination":
        left = count(len(checks) - 1, -1)
        async with Site(config, urls["admin"], urls["gateway"], urls["gateway_admin"], probe=probe) as site:
            with busy("checking") as say:
                return await examine(site, checks, lambda done: say(f"{done.check}: {done.state}; {next(left)} to go"))

    try:
        return run(examined())
    except CannotExamine as error:
        complain(f"{error}; {hint_of(error)}" if "CERTIFICATE_VERIFY_FAILED" in str(error) else error)
        raise typer.Exit(WRONG_INPUT) from None
