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
    gateway_admin: Annotated[
        str, typer.Option("--gateway-admin", help="Where the embedded gateway's admin page is.", hidden=True)
    ] = "",
    inherited: Annotated[str, typer.Option("--flags", help="Values that count before the file's.", hidden=True)] = "",
    pool_name: Annotated[str, typer.Option(help="InferencePool to serve: `kubernetes.pool`.")] = "",
    pool_namespace: Annotated[str, typer.Option(help="Its namespace: `kubernetes.namespace`.")] = "",
    pool_group: Annotated[str, typer.Option(help="Its API group: `kubernetes.group`.")] = "",
    endpoint_selector: Annotated[
        str, typer.Option(metavar="KEY=VALUE,...", help="Labels of pods, without an InferencePool.")
    ] = "",
    endpoint_target_ports: Annotated[str, typer.Option(metavar="PORT,...", help="The ports of these pods.")] = "",
    kubeconfig: Annotated[str, typer.Option(metavar="PATH", help="`kubernetes.kubeconfig`.")] = "",
    ha_enable_leader_election: Annotated[
        bool, typer.Option("--ha-enable-leader-election", help="Of several replicas one is ready, the others stand by.")
    ] = False,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="`extProc.port`.")] = 0,
    grpc_health_port: Annotated[int, typer.Option(min=0, max=65535, help="`extProc.healthPort`.")] = 0,
    metrics_port: Annotated[int, typer.Option(min=0, max=65535, help="`admin.port`.")] = 0,
) -> None:
    """Run the scheduler, with its embedded gateway unless the configuration says `gateway: none`.

    Logs go to stderr, one event per line. SIGTERM or Ctrl-C drains: requests in flight get up to 30 seconds. Exit code
    2 means that the configuration cannot be used.
    """
    import asyncio
    import json

    from fairlead.cli._serve_flags import overlay
    from fairlead.config.load import load
    from fairlead.observe.log import setup

    flags = (
        json.loads(inherited)
        if inherited
        else overlay(
            pool=pool_name,
            namespace=pool_namespace,
            group=pool_group,
            selector=endpoint_selector,
            target_ports=endpoint_target_ports,
            kubeconfig=kubeconfig,
            leader_election=ha_enable_leader_election,
            ports={"extProc.port": grpc_port, "extProc.healthPort": grpc_health_port, "admin.port": metrics_port},
        )
    )
    config = load(file, flags=flags)
    setup(config.log.level, config.log.format)
    if config.gateway.mode == "embedded" and not scheduler_only:
        from fairlead.embedded import Embedded

        asyncio.run(Embedded(config, file).run())
    else:
        from fairlead.live import Live

        asyncio.run(Live(config, gateway_admin).run())


serve.__doc__ = f"{cleandoc(serve.__doc__ or '')}\n{_EXAMPLES}"
