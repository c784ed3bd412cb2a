"""The embedded gateway: a parent with two children, Envoy and the scheduler, neither of which needs the other to live.

    fairlead serve ──┬── Envoy        serves clients, asks the scheduler, balances plainly without it
                     └── scheduler    the same command with --scheduler-only

The parent does nothing but keep both running, so that a scheduler which dies or hangs costs no request: Envoy goes on
with the endpoints that it was told last, and a new scheduler is asked again within about a second. Both children end
with the parent, even when it is killed (see `gateway.envoy.launcher`).

`serve` reads the configuration, then forks: the child goes on as the first scheduler, with all that is imported
already, and the parent becomes `supervise` in a fresh, small interpreter. Envoy starts while the scheduler does, and
listens to clients once it is answered.
"""

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from msgspec import to_builtins
from msgspec.structs import replace

import fairlead
from fairlead.config.schema import Config
from fairlead.core.events import EndpointDown, EndpointUp
from fairlead.gateway.envoy.authentication import KeysFile, read_jwt, read_keys, script
from fairlead.gateway.envoy.gateway import Plan, prepare
from fairlead.gateway.envoy.options import Options, Tls
from fairlead.gateway.envoy.process import JWT, KEYS, tie_to_parent
from fairlead.gateway.memory import memory_limit
from fairlead.pool.endpoints_file import follow_endpoints
from fairlead.pool.kube.objects import H2C

_PACKAGES = str(Path(fairlead.__file__).parents[1])
_LARGEST_HEAP = 4 << 30
#: What the small interpreter runs. Without `ssl` asyncio does not load OpenSSL, a quarter of what it would hold.
_BECOME = """
import json, sys
sys.modules["ssl"] = None
sys.path.append(sys.argv[1])
from fairlead.server.supervise import main
sys.exit(main(json.loads(sys.argv[2])))
"""


def serve_embedded(config: Config, file: Path) -> Plan:
    """Returns in the child alone, which is to go on as the scheduler beside the gateway of the `Plan`.

    Raises `FairleadError` when the gateway cannot be started.
    """
    keys = config.gateway.keys
    known = read_keys(keys.file) if keys else ()
    pool, http2 = asyncio.run(first_pool(config))
    plan = prepare(gateway_options(config, http2), pool, scheduler_timeout=config.gateway.wait_for_scheduler)
    if keys:
        KeysFile(plan.keys_file, keys.forward).write(known)
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    child = os.fork()
    if child:
        _become_parent(config, file, plan, child)
    # A session of its own: Ctrl-C reaches only the parent, which then ends things in order.
    os.setsid()
    tie_to_parent(parent)
    return plan


def _become_parent(config: Config, file: Path, plan: Plan, scheduler: int) -> NoReturn:
    handover = {
        "gateway": to_builtins(plan),
        "scheduler": scheduler,
        "again": scheduler_command(config, file, plan),
        "log": [config.log.level, config.log.format],
    }
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", _BECOME, _PACKAGES, json.dumps(handover)])


def scheduler_command(config: Config, file: Path, plan: Plan) -> list[str]:
    """Of a scheduler that takes over."""
    fairlead = [sys.executable, "-m", "fairlead", "serve", str(file), "--scheduler-only"]
    fairlead += [f"--gateway-admin={where}" for where in plan.admins]
    fairlead += ["--gateway-pool", str(plan.endpoints_file)]
    return [*fairlead, "--flags", json.dumps(pinned(config))]


async def first_pool(config: Config) -> tuple[list[str], bool]:
    """The endpoints as they are now, and whether they speak HTTP/2: what Envoy begins with. Raises `ConfigError`."""
    pool: dict[str, str] = {}

    def changed(event: EndpointUp | EndpointDown) -> None:
        if isinstance(event, EndpointUp):
            pool[event.endpoint.id] = event.endpoint.address
        else:
            pool.pop(event.endpoint_id, None)

    http2 = False
    async with contextlib.AsyncExitStack() as stack:
        # The scheduler follows them, and says what is wrong with them.
        await follow_endpoints(stack, config.endpoints, changed, lambda problem: None)
        if config.kubernetes.on:
            from fairlead.server.live.kube import follow_pool

            http2 = await follow_pool(stack, config.kubernetes, changed) == H2C
    return list(pool.values()), http2


def pinned(config: Config) -> dict[str, Any]:
    """The flags of a scheduler that takes over: the file may tell other ports by then, which the running gateway would
    never ask."""
    flags = {name: dict(section) for name, section in config.flags.items()}
    flags.setdefault("extProc", {})["port"] = config.ext_proc.port
    flags.setdefault("als", {}).update(enabled=config.als.enabled, port=config.als.port)
    return flags


def gateway_options(config: Config, http2: bool = False) -> Options:
    """What the configuration says of the embedded gateway, in the gateway's own terms."""
    gateway, ext_proc = config.gateway, config.ext_proc
    return Options(
        host=gateway.host,
        port=gateway.port,
        admin_port=gateway.admin_port,
        ext_proc=f"127.0.0.1:{ext_proc.port}",
        als=f"127.0.0.1:{config.als.port}" if config.als.enabled else "",
        # Our own process on the loopback: its certificate is for others, and may be renewed while Envoy runs.
        tls=Tls(verify=False) if ext_proc.tls else None,
        response_mode="first-chunk" if gateway.response_mode == "streamed" else "none",
        retry=gateway.retry,
        body_limit=gateway.body_limit,
        max_heap=gateway.max_heap or min(memory_limit() // 2, _LARGEST_HEAP),
        max_connections=gateway.max_connections,
        upload_share=gateway.upload_share,
        receive_idle=gateway.receive_idle,
        paths=gateway.paths,
        keys_file=KEYS if gateway.keys else "",
        jwt=read_jwt(gateway.jwt) if gateway.jwt else None,
        jwt_file=JWT if gateway.jwt and gateway.jwt.jwks_file else "",
        concurrency=gateway.concurrency or os.cpu_count() or 1,
        envoys=gateway.envoys,
        decision_header=config.journal.header,
        upstream_http2=http2,
    )


def printed_options(config: Config, http2: bool = False) -> Options:
    """The same for an Envoy that nobody writes files for: it asks for keys and tokens as the files are now. Raises
    `ConfigError` when one cannot be used."""
    keys = config.gateway.keys
    lua = script(read_keys(keys.file), keys.forward) if keys else ""
    return replace(gateway_options(config, http2), keys_file="", keys_script=lua, jwt_file="")
