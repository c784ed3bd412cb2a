"""`fairlead serve`: the scheduler."""

from inspect import cleandoc

from fairlead.cli._options import ConfigFile

_EXAMPLES = """
\b
Examples:
  fairlead serve examples/minimal.yaml
  fairlead validate fairlead.yaml && fairlead serve fairlead.yaml
  curl localhost:9090/readyz ; curl localhost:9090/debug/endpoints
"""


def serve(file: ConfigFile) -> None:
    """Run the scheduler, with its embedded gateway unless the configuration says `gateway: none`.

    Logs go to stderr, one event per line. SIGTERM or Ctrl-C drains: requests in flight get up to 30 seconds. Exit code
    2 means that the configuration cannot be used.
    """
    import asyncio

    from fairlead.config.load import load
    from fairlead.live import Live
    from fairlead.observe.log import setup

    config = load(file)
    setup(config.log.level, config.log.format)
    asyncio.run(Live(config).run())


serve.__doc__ = f"{cleandoc(serve.__doc__ or '')}\n{_EXAMPLES}"
