"""The embedded gateway: a parent with two children, Envoy and the scheduler. Each child can run without the other.

    fairlead serve ──┬── Envoy        serves clients, asks the scheduler, balances plainly without it
                     └── scheduler    the same command with --scheduler-only

The parent only keeps both running, so a scheduler that dies or hangs fails no request: Envoy continues with the
endpoints that it last received, and a new scheduler is in use within about a second. Both children end with the parent,
even if it is killed (see `gateway.envoy.launcher`).

With `--workers` there are several schedulers, which Envoy asks in turn. They share what they know through files in the
gateway's directory (`server.replicas_files`), or through the server in `replicas.via` if the configuration has one.

`serve` reads the configuration, then forks. The child continues as the first scheduler, with everything already
imported; the parent becomes `supervise` in a fresh, small interpreter. Envoy starts at the same time as the scheduler,
and accepts clients once the scheduler answers.
"""

import contextlib
import errno
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from msgspec import to_builtins
from msgspec.structs import replace

import fairlead
from fairlead.compat.load import load
from fairlead.config.problems import Problem
from fairlead.config.schema import Config
from fairlead.core.endpoint import host_port
from fairlead.core.errors import ConfigError, FairleadError, cannot_listen
from fairlead.core.events import EndpointDown, EndpointUp
from fairlead.gateway.envoy.authentication import (
    UPSTREAM_VARIABLE,
    read_jwt,
    read_keys,
    script,
    write_keys,
    write_upstream_token,
)
from fairlead.gateway.envoy.gateway import Plan, prepare
from fairlead.gateway.envoy.launcher import tie_to
from fairlead.gateway.envoy.options import Options, Tls
from fairlead.gateway.envoy.process import CONFIG, FACTS, JWKS_CA, JWT, KEYS, UPSTREAM
from fairlead.gateway.memory import memory_limit
from fairlead.gateway.ports import dialled, listening_sockets
from fairlead.pool.endpoints_file import RESOLVE_TIMEOUT_S, START_S, follow_endpoints
from fairlead.pool.kube.objects import H2C
from fairlead.pool.lookups import run
from fairlead.server.followed_files import read_upstream_token
from fairlead.server.journal.records import WORKER
from fairlead.server.python import python_module
from fairlead.server.replicas_files import ROOM_MIB
from fairlead.server.running_gateway import RunningGateway
from fairlead.server.state import WORKER as STATE_OF_WORKER
from fairlead.server.supervise import ENDING, ENDS

_PACKAGES = str(Path(fairlead.__file__).parents[1])
_LARGEST_HEAP = 4 << 30
#: The program of the small interpreter. Without `ssl`, asyncio does not load OpenSSL, which takes a quarter of its
#: memory.
_BECOME = """
import json, sys
sys.modules["ssl"] = None
sys.path.append(sys.argv[1])
from fairlead.server.supervise import main
sys.exit(main(json.loads(sys.argv[2])))
"""


def serve_embedded(config: Config, file: Path, content: bytes, workers: int = 1) -> tuple[Config, RunningGateway]:
    """Fork the schedulers, then become the gateway's parent. Returns only in the children, each of which continues as a
    scheduler: its configuration, and the gateway for `Live`. `content`: what `config` was read from; the file may have
    changed since.

    Raises `FairleadError` if the gateway cannot be started, or if the configuration does not allow that many workers.
    """
    check_workers(config, workers)
    check_ports(config, workers)
    keys = config.gateway.keys
    known = read_keys(keys.file) if keys else ()
    token_file = config.gateway.upstream_token_file
    token = read_upstream_token(token_file) if token_file else ""
    pool, http2 = run(first_pool(config, START_S))
    peers = tuple(host_port(dialled(config.ext_proc.host), config.ext_proc.port + i) for i in range(1, workers))
    options = replace(gateway_options(config, http2), peers=peers)
    try:
        plan = prepare(options, pool, scheduler_timeout=config.gateway.wait_for_scheduler)
        try:
            if keys:
                write_keys(plan.keys_file, known, keys.forward)
            if token:
                write_upstream_token(plan.upstream_token_file, token)
            Path(plan.directory, CONFIG).write_bytes(content)
            if workers > 1 and not config.replicas.via:
                _check_room(plan.directory, workers)
        except OSError:
            shutil.rmtree(plan.directory, ignore_errors=True)
            raise
    except OSError as error:
        needed_mib = 1 if workers == 1 else 1 + ROOM_MIB * workers
        where = (
            f"{tempfile.tempdir or 'any directory'}: {error.strerror}; set TMPDIR to one with {needed_mib} MiB of room"
        )
        raise FairleadError(f"the gateway's files cannot be written to {where}") from None
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    schedulers = []
    for i in range(workers):
        child = os.fork()
        if not child:
            # In a process session of its own, because Ctrl-C must reach only the parent, which ends its children in
            # order.
            os.setsid()
            tie_to(parent)
            gateway = RunningGateway(plan.admins, plan.directory, i, workers, config.flags, ENDING)
            if workers > 1:
                config = load(file, flags=worker_flags(config, plan, i), content=content)
            return config, gateway
        schedulers.append([child, scheduler_command(config, file, plan, i, workers)])
    log = [config.log.level, config.log.format]
    return _become_parent({"gateway": to_builtins(plan), "schedulers": schedulers, "log": log}, file)


def _check_room(directory: str, workers: int) -> None:
    """Raise `OSError` unless the directory has room for what the workers share. Its first bytes would fit."""
    there = shutil.disk_usage(directory)
    if there.total and there.free < workers * ROOM_MIB << 20:  # a file system without a limit may have no total
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _become_parent(handover: dict[str, Any], file: Path) -> NoReturn:
    start = [sys.executable, "-I", "-S", "-c", _BECOME, _PACKAGES, json.dumps(handover)]
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)  # the mask survives exec; `Parent` ends it when it handles them
    os.execv(sys.executable, [*start, "fairlead serve", str(file)])  # so that ps and pkill find it


def scheduler_command(config: Config, file: Path, plan: Plan, worker: int = 0, workers: int = 1) -> list[str]:
    """The command that the parent runs to replace a scheduler that died."""
    gateway = to_builtins(
        RunningGateway(plan.admins, plan.directory, worker, workers, config.flags, ENDING, restarted=True)
    )
    flags = worker_flags(config, plan, worker) if workers > 1 else pinned(config)
    fairlead = [*python_module("fairlead"), "serve", str(file), "--scheduler-only"]
    return [*fairlead, "--running-gateway", json.dumps(gateway), "--flags", json.dumps(flags)]


# ---- several schedulers: `serve --workers` ----


def for_workers(refused: Iterable[Problem], new: Config, workers: int) -> list[Problem]:
    """Return the `refused` changes with what to do if there are several workers: to restart one changes nothing, and a
    configuration that they cannot share would not start again. `new`: the changed configuration."""
    problems = [replace(problem, hint="restart fairlead serve to apply it, not a worker") for problem in refused]
    try:
        check_workers(new, workers)
    except ConfigError as error:
        why = f"fairlead serve --workers {workers} would not start again: {error.message}"
        wrong = Problem(error.path, 0, why, "correct the file before a restart")
        problems = [problem for problem in problems if problem.path != error.path] + [wrong]
    return problems


def check_workers(config: Config, workers: int) -> None:
    """Raises `ConfigError` for settings that several workers cannot share."""
    if workers == 1:
        return
    if config.kubernetes.leader_election.enabled:
        raise ConfigError("every worker decides, none leads: leave leaderElection out", "$.kubernetes.leaderElection")
    if config.als.enabled and config.als.port != config.ext_proc.port:
        raise ConfigError("each worker takes the access log at its own port: leave als.port out", "$.als.port")
    if config.journal.path and config.journal.max_bytes < workers << 20:
        raise ConfigError(f"{workers} workers share it and need at least {workers}Mi", "$.journal.maxBytes")
    if config.kv_events.bind:
        raise ConfigError("workers cannot listen at one address: set kvEvents.port or an indexer", "$.kvEvents.bind")
    gateway = config.gateway
    taken = dict.fromkeys((gateway.port, *(gateway.admin_port + i for i in range(gateway.envoys))), "the gateway's")
    taken[config.autoscaling.port] = "that of autoscaling.port"
    for (section, field), first in _counted_ports(config).items():
        for port in range(first, first + workers):
            if port in taken or port > 65535:
                who = taken.get(port, "no valid port")
                why = f"{workers} workers need {workers} ports from {first} on, and {port} is {who}"
                raise ConfigError(why, f"$.{section}.{field}")
            taken[port] = f"that of {section}.{field}"


def check_ports(config: Config, workers: int) -> None:
    """Raises `ConfigError` if a scheduler could not listen. Envoy would take another process on its port for the
    scheduler."""
    ext_proc, admin = config.ext_proc, config.admin
    hosts = {"port": admin.host, "metricsPort": admin.metrics_host or admin.host}
    for (section, field), first in _counted_ports(config).items():
        host = ext_proc.host if section == "extProc" else hosts[field]
        for port in range(first, first + workers):
            try:
                for listener in listening_sockets(host, port, 1):
                    listener.close()
            except OSError as error:
                raise cannot_listen(host_port(host, port), error, f"$.{section}.{field}") from None


def _counted_ports(config: Config) -> dict[tuple[str, str], int]:
    """The first worker's ports by section and field. Each further worker uses the next port. Ports 0 are left out."""
    ext_proc, admin = config.ext_proc, config.admin
    ports = {
        ("extProc", "port"): ext_proc.port,
        ("extProc", "healthPort"): ext_proc.health_port,
        ("admin", "port"): admin.port,
        ("admin", "metricsPort"): admin.metrics_port,
    }
    return {place: port for place, port in ports.items() if port}


def worker_flags(config: Config, plan: Plan, worker: int) -> dict[str, Any]:
    """Values that override the file's: the worker's own ports, files and seed, and its link to the other workers."""
    flags = pinned(config)

    def give(section: str, **values: Any) -> None:
        flags[section] = {**flags.get(section, {}), **values}

    for (section, field), first in _counted_ports(config).items():
        give(section, **{field: first + worker})
    give("als", port=config.ext_proc.port + worker)
    if not config.replicas.via:  # otherwise the file has it, perhaps with a password, which a command line would show
        give("replicas", via=f"file://{Path(plan.directory, FACTS)}")
    if worker and config.autoscaling.port:
        give("autoscaling", port=0)  # all workers would give the same answers
    if config.journal.path:
        path = f"{config.journal.path}/{WORKER}{worker}" if worker else config.journal.path
        give("journal", path=path, maxBytes=config.journal.max_bytes // plan.schedulers)
    if worker and (state := config.state.path(config.journal)):
        give("state", file=f"{state}{STATE_OF_WORKER}{worker}")
    if worker and config.kv_events.snapshot:
        give("kvEvents", snapshot=f"{config.kv_events.snapshot}.worker-{worker}")
    if config.seed is not None:
        flags["seed"] = config.seed + worker
    return flags


async def first_pool(config: Config, resolve_s: float = RESOLVE_TIMEOUT_S) -> tuple[list[str], bool]:
    """The addresses of the present endpoints, with which Envoy starts, and whether they use HTTP/2. Waits `resolve_s`
    seconds for host names. Raises `ConfigError`."""
    pool: dict[str, str] = {}

    def changed(event: EndpointUp | EndpointDown) -> None:
        if isinstance(event, EndpointUp):
            pool[event.endpoint.id] = event.endpoint.address
        else:
            pool.pop(event.endpoint_id, None)

    http2 = False
    async with contextlib.AsyncExitStack() as stack:
        # Problems are ignored here: the scheduler reads the endpoints too, and reports their problems.
        await follow_endpoints(stack, config.endpoints, changed, lambda problem: None, resolve_s=resolve_s)
        if config.kubernetes.on:
            from fairlead.server.live.kube import follow_pool

            http2 = await follow_pool(stack, config.kubernetes, changed) == H2C
    return list(pool.values()), http2


def pinned(config: Config) -> dict[str, Any]:
    """The flags of a replacement scheduler: its addresses and TLS are those that the running gateway uses. The file may
    have other ones by then, and the gateway would not find the scheduler there."""
    flags = {name: dict(section) for name, section in config.flags.items()}
    ext_proc = config.ext_proc
    tls = {"certDir": ext_proc.tls.cert_dir} if ext_proc.tls else None
    flags.setdefault("extProc", {}).update(host=ext_proc.host, port=ext_proc.port, tls=tls)
    flags.setdefault("als", {}).update(enabled=config.als.enabled, port=config.als.port)
    return flags


def gateway_options(config: Config, http2: bool = False) -> Options:
    """The options of Envoy's files for the configured gateway. `http2`: endpoints use HTTP/2."""
    gateway, ext_proc = config.gateway, config.ext_proc
    return Options(
        host=gateway.host,
        port=gateway.port,
        admin_port=gateway.admin_port,
        ext_proc=host_port(dialled(ext_proc.host), ext_proc.port),
        als=host_port(dialled(ext_proc.host), config.als.port) if config.als.enabled else "",
        # The scheduler is our own process on this machine, so its certificate is not verified: it is meant for other
        # clients, and may be renewed while Envoy runs.
        tls=Tls(verify=False) if ext_proc.tls else None,
        response_mode="first-chunk" if gateway.response_mode == "streamed" else "none",
        retry=gateway.retry,
        fail_open=gateway.fail_open,
        body_limit=gateway.body_limit,
        max_heap=gateway.max_heap or min(memory_limit() // 2, _LARGEST_HEAP),
        max_connections=gateway.max_connections,
        upload_share=gateway.upload_share,
        receive_idle=gateway.receive_idle,
        paths=gateway.paths,
        allowed_origins=gateway.allowed_origins,
        keys_file=KEYS if gateway.keys else "",
        jwt=read_jwt(gateway.jwt) if gateway.jwt else None,
        jwt_file=JWT if gateway.jwt and gateway.jwt.jwks_file else "",
        jwks_ca_file=JWKS_CA if gateway.jwt and gateway.jwt.jwks_uri.startswith("https:") else "",
        upstream_token_file=UPSTREAM if gateway.upstream_token_file else "",
        concurrency=gateway.concurrency or os.cpu_count() or 1,
        envoys=gateway.envoys,
        decision_header=config.journal.header,
        upstream_http2=http2,
    )


def printed_options(config: Config, http2: bool = False) -> Options:
    """Like `gateway_options`, for an Envoy whose files Fairlead does not update: the present keys and tokens are part
    of the options, and Envoy's environment has the token of model servers. Raises `ConfigError` if a file of keys
    cannot be used."""
    keys = config.gateway.keys
    lua = script(read_keys(keys.file), keys.forward) if keys else ""
    variable = UPSTREAM_VARIABLE if config.gateway.upstream_token_file else ""
    options = replace(gateway_options(config, http2), keys_file="", keys_script=lua, jwt_file="", jwks_ca_file="")
    return replace(options, upstream_token_file="", upstream_token_variable=variable)
