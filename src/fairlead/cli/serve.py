"""`fairlead serve`. Its flags, some of them known from the reference picker, become values of the configuration."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fairlead.cli.basics import DEFAULT_FILE, without_collection
from fairlead.cli.options import WORKERS_NEED, ConfigFile, Workers, examples
from fairlead.core.errors import ConfigError

#: Fields of the configuration, and the flags that set them; also those of the reference picker.
FLAGS = {
    "kubernetes.pool": "--pool-name",
    "kubernetes.namespace": "--pool-namespace",
    "kubernetes.group": "--pool-group",
    "kubernetes.kubeconfig": "--kubeconfig",
    "kubernetes.selector": "--endpoint-selector",
    "kubernetes.targetPorts": "--endpoint-target-ports",
    "kubernetes.leaderElection": "--ha-enable-leader-election",
    "gateway.port": "--port",
    "extProc.port": "--grpc-port",
    "extProc.healthPort": "--grpc-health-port",
    "admin.port": "--admin-port",
}


def overlay(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Convert flags, by the paths of their fields, to the structure of the file, without flags that were not given."""
    given: dict[str, Any] = {}
    for path, value in flags.items():
        if value:
            section, _, field = path.partition(".")
            given.setdefault(section, {})[field] = value
    return given


def flag_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values of `FLAGS`, by the names of the flags without dashes, to values by the paths of their fields.
    Raises `ConfigError`."""
    values = {path: given.get(flag.removeprefix("--")) for path, flag in FLAGS.items()}
    kubeconfig, elects = values["kubernetes.kubeconfig"], values["kubernetes.leaderElection"]
    return values | {
        "kubernetes.kubeconfig": kubeconfig and os.path.abspath(kubeconfig),
        "kubernetes.selector": labels(values["kubernetes.selector"] or ""),
        "kubernetes.targetPorts": port_numbers(values["kubernetes.targetPorts"] or ""),
        "kubernetes.leaderElection": {"enabled": True} if elects else None,
    }


def _is_set(flags: Mapping[str, Any], path: str) -> bool:
    value: Any = flags
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value is not None


def labels(text: str) -> dict[str, str]:
    pairs = [part.split("=", 1) for part in text.split(",") if part.strip()]
    if not all(len(pair) == 2 and re.fullmatch(r"\w[\w./-]*", pair[0].strip()) for pair in pairs):
        raise ConfigError(f"expected KEY=VALUE,KEY=VALUE, got {text!r}", "--endpoint-selector")
    return {pair[0].strip(): pair[1].lstrip("=").strip() for pair in pairs}


def port_numbers(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if text and not (words and all(word.isascii() and word.isdigit() for word in words)):
        raise ConfigError(f"expected PORT,PORT, got {text!r}", "--endpoint-target-ports")
    return [int(word) for word in words]


_SchedulerOnly = Annotated[
    bool, typer.Option("--scheduler-only", help="Do not start the embedded gateway.", hidden=True)
]
_RunningGateway = Annotated[
    str, typer.Option("--running-gateway", help="The embedded gateway next to this scheduler.", hidden=True)
]
# A parent process of an older version, whose files were replaced while it ran, gives these two flags instead.
_GatewayAdmin = Annotated[list[str] | None, typer.Option("--gateway-admin", help="Its admin pages.", hidden=True)]
_GatewayPool = Annotated[str, typer.Option("--gateway-pool", help="Its file of endpoints.", hidden=True)]


def _port(text: str) -> Any:
    return typer.Option(metavar="PORT", min=0, max=65535, show_default=False, help=text)


@examples("""
\b
Examples:
  fairlead serve                        reads fairlead.yaml
  fairlead serve examples/minimal.yaml --port 8081
  fairlead serve --workers 4            four schedulers that decide as one
  curl localhost:9090/readyz            is it ready?
""")
def serve(
    ctx: typer.Context,
    file: ConfigFile = DEFAULT_FILE,
    scheduler_only: _SchedulerOnly = False,
    running_gateway: _RunningGateway = "{}",
    gateway_admin: _GatewayAdmin = None,
    gateway_pool: _GatewayPool = "",
    workers: Workers = 1,
    inherited: Annotated[str, typer.Option("--flags", help="Values that count before the file's.", hidden=True)] = "",
    port: Annotated[int, _port("Where clients connect: gateway.port.")] = 0,
    admin_port: Annotated[int, _port("Dashboard and metrics: admin.port.")] = 0,
    grpc_port: Annotated[int, _port("For Envoy: extProc.port.")] = 0,
    grpc_health_port: Annotated[int, _port("gRPC health: extProc.healthPort.")] = 0,
    pool_name: Annotated[str, typer.Option(metavar="NAME", help="InferencePool: kubernetes.pool.")] = "",
    pool_namespace: Annotated[str, typer.Option(metavar="NAME", help="Its namespace: kubernetes.namespace.")] = "",
    pool_group: Annotated[str, typer.Option(metavar="GROUP", help="Its API group: kubernetes.group.")] = "",
    endpoint_selector: Annotated[
        str, typer.Option(metavar="KEY=VALUE,...", help="Labels of the pods, if there is no InferencePool.")
    ] = "",
    endpoint_target_ports: Annotated[str, typer.Option(metavar="PORT,...", help="Ports of those pods.")] = "",
    kubeconfig: Annotated[str, typer.Option(metavar="FILE", help="kubernetes.kubeconfig.")] = "",
    ha_enable_leader_election: Annotated[
        bool, typer.Option("--ha-enable-leader-election", help="One replica is ready; the others stand by.")
    ] = False,
) -> None:
    """Run the scheduler and, unless the configuration says `gateway: none`, its embedded gateway.

    Logs go to stderr, one event per line. On SIGTERM or Ctrl-C, requests in flight get up to 30 seconds to finish; a
    second signal cuts them off. SIGHUP, SIGUSR1 and SIGUSR2 end nothing. Options
    override the configuration. Exit code 2 means that the configuration cannot be used.
    """
    import json

    given = {name.replace("_", "-"): value for name, value in ctx.params.items()}
    flags = json.loads(inherited) if inherited else overlay(flag_values(given))
    if gateway_admin:
        directory = str(Path(gateway_pool).parent) if gateway_pool else ""  # older parents gave it to the first worker
        running_gateway = json.dumps({"admins": gateway_admin, "directory": directory})
    serve_file(file, flags, scheduler_only, running_gateway, workers=workers)


def serve_file(
    file: Path,
    flags: Mapping[str, Any],
    scheduler_only: bool = False,
    running_gateway: str = "{}",
    notes: Sequence[tuple[str, str]] = (),
    workers: int = 1,
    names: Mapping[str, str] = FLAGS,
) -> None:
    """Serve with the configuration in `file`. `running_gateway`: a `RunningGateway` as JSON. `notes`: (flag, why) for
    flags without effect. `names`: the flags of fields, for errors."""
    import signal

    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # until a handler is set, here and in processes that this one starts
    with without_collection():
        from msgspec.json import decode

        from fairlead.compat.load import read_bytes
        from fairlead.config.problems import InvalidConfig, moved
        from fairlead.server.observe.log import get, in_background, name_worker, setup
        from fairlead.server.running_gateway import RunningGateway

        gateway = decode(running_gateway, type=RunningGateway)
        content = None if scheduler_only else read_bytes(file)
        try:
            config, begun = gateway.configurations(file, flags, content)
        except InvalidConfig as error:
            places = {f"$.{path}": (name, 0) for path, name in names.items() if _is_set(flags, path)}
            problems = dict.fromkeys(moved(problem, places) for problem in error.problems)
            raise InvalidConfig([*problems], error.source) from None
        setup(config.log.level, config.log.format)
        for flag, why in notes:
            get("serve").warning("a flag has no effect here", flag=flag, why=why)
        if config.gateway.mode == "embedded" and content is not None:
            from fairlead.server.embedded import serve_embedded

            config, gateway = serve_embedded(config, file, content, workers)
        elif content is not None and flags.get("gateway", {}).get("port"):
            raise ConfigError("no gateway listens there: the configuration says gateway: none", "--port")
        elif workers > 1:
            raise ConfigError(WORKERS_NEED, "--workers")
        if gateway.workers > 1:
            name_worker(gateway.worker)
        from fairlead.pool.lookups import run
        from fairlead.server.live import Live
    with in_background():
        run(Live(config, gateway, begun).run())
