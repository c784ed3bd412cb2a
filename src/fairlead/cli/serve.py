"""`fairlead serve`: the scheduler."""

from inspect import cleandoc
from typing import Annotated

import typer

from fairlead.cli._options import ConfigFile

_EXAMPLES = """
\b
Examples:
  fairlead serve examples/minimal.yaml
  fairlead validate fairlead.yaml && fairlead serve fairlead.yaml
  curl localhost:9090/readyz ; curl localhost:9090/debug/endpoints
"""


def serve(
    file: ConfigFile,
    scheduler_only: Annotated[
        bool, typer.Option("--scheduler-only", help="Leave the embedded gateway to somebody else.", hidden=True)
    ] = False,
) -> None:
    """Run the scheduler, with its embedded gateway unless the configuration says `gateway: none`.

    Logs go to stderr, one event per line. SIGTERM or Ctrl-C drains: requests in flight get up to 30 seconds. Exit code
    2 means that the configuration cannot be used.
    """
    import asyncio

    from fairlead.config.load import load
    from fairlead.observe.log import setup

    config = load(file)
    setup(config.log.level, config.log.format)
    if config.gateway.mode == "embedded" and not scheduler_only:
        from fairlead.embedded import Embedded

        asyncio.run(Embedded(config, file).run())
    else:
        from fairlead.live import Live

        asyncio.run(Live(config).run())


serve.__doc__ = f"{cleandoc(serve.__doc__ or '')}\n{_EXAMPLES}"
