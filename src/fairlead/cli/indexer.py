"""`fairlead indexer`: the prefix index as a service."""

from typing import Annotated

import typer

from fairlead.cli.basics import DEFAULT_FILE
from fairlead.cli.options import ConfigFile, examples


@examples("""
\b
Examples:
  fairlead indexer fairlead.yaml
  fairlead indexer fairlead.yaml --bind tcp://*:5555 --listen :9090
  curl localhost:9090/query --json '{"prompt_hash": [123], "pods": ["pod1"]}'
  curl localhost:9090/snapshot --output index.kv
""")
def indexer(
    file: ConfigFile = DEFAULT_FILE,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="HTTP address, port 0 = any.", show_default="admin.host:admin.port")
    ] = "",
    bind: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Let engines connect, e.g. tcp://*:5555: kvEvents.bind.")
    ] = "",
    snapshot: Annotated[
        str, typer.Option(metavar="FILE", help="Keeps the index across restarts: kvEvents.snapshot.")
    ] = "",
    warm_from: Annotated[
        str, typer.Option(metavar="URL", help="Start with the index of another indexer: kvEvents.indexer.warmFrom.")
    ] = "",
    accept_snapshots: Annotated[
        bool, typer.Option("--accept-snapshots", help="Accept PUT /snapshot from anybody who can reach it.")
    ] = False,
) -> None:
    """Follow the KV events of a pool and answer, over HTTP, how much of a prompt each endpoint has cached.

    Reads the configuration of `fairlead serve`: endpoints, kubernetes, kvEvents, tokens and log. Logs go to stderr.
    SIGTERM or Ctrl-C stops it.
    """

    from fairlead.compat.load import load
    from fairlead.pool.lookups import run
    from fairlead.server.live.indexer import LiveIndexer
    from fairlead.server.observe.log import in_background, setup

    config = load(file)
    host, port = _address(listen) if listen else (config.admin.host, config.admin.port)
    events = config.kv_events
    warm = events.indexer.model_copy(update={"warm_from": warm_from or events.indexer.warm_from})
    listening = {"bind": bind or events.bind, "snapshot": snapshot or events.snapshot, "indexer": warm}
    config = config.model_copy(update={"kv_events": events.model_copy(update=listening)})
    setup(config.log.level, config.log.format)

    async def serve() -> None:
        await LiveIndexer(config, host, port, accept_snapshots).run()

    with in_background():
        run(serve())


def _address(text: str) -> tuple[str, int]:
    """The host and port in `text`. Raises `ConfigError`."""
    from fairlead.core.errors import ConfigError
    from fairlead.gateway.ports import listen_address

    try:
        return listen_address(text)
    except ValueError as error:
        raise ConfigError(f"--listen {text!r}: {error}") from None
