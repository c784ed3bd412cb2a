"""`fairlead scheduler`: serve a policy to gateways, check an implementation of the contract, print the contract."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairlead.cli.options import FAILED, WRONG_INPUT, complain, examples

if TYPE_CHECKING:
    from fairlead.server.remote.stream import ClientTls
    from fairlead.server.sdk.check import Result


class Action(StrEnum):
    """What to do."""

    serve = "serve"
    check = "check"
    proto = "proto"


@examples("""
\b
Examples:
  fairlead scheduler serve cost-model --listen 127.0.0.1:9100
  fairlead scheduler serve my_module:LeastQueue --listen unix:/run/scheduler.sock
  fairlead scheduler check 127.0.0.1:9100
  fairlead scheduler proto > scheduler.proto
""")
def scheduler(
    action: Annotated[Action, typer.Argument(help="serve POLICY, check ADDRESS, or proto.")],
    target: Annotated[
        str, typer.Argument(metavar="POLICY|ADDRESS", help="serve: MODULE:NAME, a policy or a file.")
    ] = "",
    listen: Annotated[str, typer.Option(help="serve: host:port (port 0 = any), or unix:/path.")] = "127.0.0.1:9100",
    tls_dir: Annotated[str, typer.Option(help="serve: directory with tls.crt and tls.key.")] = "",
    ca_file: Annotated[str, typer.Option(help="check: speak TLS and trust this authority; 'any' trusts all.")] = "",
    budget: Annotated[float, typer.Option(min=0.1, help="check: milliseconds that the p99 may take.")] = 100.0,
    json: Annotated[bool, typer.Option("--json", help="check: print JSON.")] = False,
) -> None:
    """A scheduler of your own in another process: serve one, check one, or print the contract."""
    if action is Action.proto:
        typer.echo(contract(), nl=False)
        return
    if not target:
        what = "a policy: MODULE:NAME, a built-in one or a file" if action is Action.serve else "an address"
        complain(f"scheduler {action} needs {what}")
        raise typer.Exit(WRONG_INPUT)
    if action is Action.serve:
        _serve(target, listen, tls_dir)
    else:
        _check(target, ca_file, budget, json)


def contract() -> str:
    """The text of the .proto file."""
    import fairlead

    path = (
        Path(fairlead.__file__).parent
        / "server"
        / "remote"
        / "proto"
        / "fairlead"
        / "scheduler"
        / "v1"
        / "scheduler.proto"
    )
    return path.read_text()


def _serve(target: str, listen: str, tls_dir: str) -> None:
    import asyncio
    import signal

    from fairlead.gateway.tls import ServerTls
    from fairlead.server.observe.log import setup
    from fairlead.server.sdk.server import SchedulerServer, policy_maker

    setup("info", "logfmt")
    make = policy_maker(target)
    tls = ServerTls.from_directory(tls_dir) if tls_dir else None

    async def run() -> None:
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        server = SchedulerServer(make, tls)
        address = await server.start(listen)
        typer.echo(f"serving {target} on {address}")
        await stop.wait()
        await server.close()
        stats = server.stats
        typer.echo(f"{stats.requests} requests in {stats.batches} batches on {stats.streams} streams")

    asyncio.run(run())


def _check(address: str, ca_file: str, budget: float, as_json: bool) -> None:
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


def _tls(ca_file: str) -> "ClientTls | None":
    from fairlead.server.remote.stream import ClientTls

    if not ca_file:
        return None
    return ClientTls(verify=False) if ca_file == "any" else ClientTls(ca_file=ca_file)


def _print(results: "list[Result]") -> None:
    width = max(len(result.name) for result in results)
    for result in results:
        mark = "ok  " if result.ok else "FAIL"
        typer.echo(f"{mark}  {result.name:<{width}}  {result.rule}")
        if result.detail:
            typer.echo(f"      {'':<{width}}  → {result.detail}")
    failed = sum(not result.ok for result in results)
    typer.echo(f"{len(results) - failed} of {len(results)} checks passed")
