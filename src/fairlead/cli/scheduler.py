"""`fairlead scheduler`: serve a policy to gateways, check an implementation of the contract, print the contract."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairlead.cli.basics import FAILED
from fairlead.cli.options import examples, policies

if TYPE_CHECKING:
    from fairlead.config.schema import SchedulerTls
    from fairlead.server.sdk.check import Result


@examples("""
\b
Examples:
  fairlead scheduler serve cost-model --listen 127.0.0.1:9100
  fairlead scheduler serve my_module:LeastQueue --listen unix:/run/s.sock
""")
def serve(
    policy: Annotated[
        str, typer.Argument(help="MODULE:NAME, a policy's name or a .yaml file.", autocompletion=policies)
    ],
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS", help="HOST:PORT (port 0 = any), or unix:/PATH.")
    ] = "127.0.0.1:9100",
    tls_dir: Annotated[str, typer.Option(metavar="DIR", help="Directory with tls.crt and tls.key.")] = "",
) -> None:
    """Serve a policy to gateways, in its own process."""
    import asyncio
    import signal

    from fairlead.gateway.tls import ServerTls
    from fairlead.server.observe.log import in_background, setup
    from fairlead.server.plugin_watch import PluginWatch
    from fairlead.server.sdk.server import SchedulerServer, policy_maker
    from fairlead.server.supervise import collecting

    setup("info", "logfmt")
    make = policy_maker(policy)
    tls = ServerTls.from_directory(tls_dir) if tls_dir else None

    async def run() -> None:
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        watch = PluginWatch(loop)
        server = SchedulerServer(make, tls)
        address = await server.start(listen)
        typer.echo(f"serving {policy} on {address}")
        with collecting():
            await stop.wait()
        await server.close()
        watch.close()
        stats = server.stats
        typer.echo(f"{stats.requests} requests in {stats.batches} batches on {stats.streams} streams")

    with in_background():
        asyncio.run(run())


@examples("""
\b
Examples:
  fairlead scheduler check 127.0.0.1:9100
  fairlead scheduler check unix:/run/scheduler.sock --json
""")
def check(
    address: Annotated[str, typer.Argument(help="HOST:PORT or unix:/PATH of a running scheduler.")],
    ca_file: Annotated[
        str, typer.Option(metavar="FILE", help="Use TLS and trust this authority; 'any' trusts all.")
    ] = "",
    budget: Annotated[float, typer.Option(metavar="MS", min=0.1, help="The most that the p99 may take.")] = 100.0,
    as_json: Annotated[bool, typer.Option("--json", help="The checks as JSON.")] = False,
) -> None:
    """Check that a scheduler keeps the contract; exit code 1 if it does not."""
    import asyncio

    import msgspec

    from fairlead.server.sdk.check import Checker

    results = asyncio.run(Checker(address, _tls(ca_file), budget).run())
    failed = sum(not result.ok for result in results)
    if as_json:
        typer.echo(msgspec.json.encode({"address": address, "ok": not failed, "checks": results}))
    else:
        _print(results)
    if failed:
        raise typer.Exit(FAILED)


def proto() -> None:
    """Print the contract between gateway and scheduler, a .proto file.

    \b
    Examples:
      fairlead scheduler proto > scheduler.proto
    """
    typer.echo(contract(), nl=False)


def contract() -> str:
    import fairlead

    return (Path(fairlead.__file__).parent / "server/remote/proto/fairlead/scheduler/v1/scheduler.proto").read_text(
        encoding="utf-8"
    )


def _tls(ca_file: str) -> "SchedulerTls | None":
    from fairlead.config.schema import SchedulerTls

    if not ca_file:
        return None
    return SchedulerTls(verify=False) if ca_file == "any" else SchedulerTls(ca_file=ca_file)


def _print(results: "list[Result]") -> None:
    width = max(len(result.name) for result in results)
    for result in results:
        mark = "ok  " if result.ok else "FAIL"
        typer.echo(f"{mark}  {result.name:<{width}}  {result.rule}")
        if result.detail:
            typer.echo(f"      {'':<{width}}  → {result.detail}")
    failed = sum(not result.ok for result in results)
    typer.echo(f"{len(results) - failed} of {len(results)} checks passed")
