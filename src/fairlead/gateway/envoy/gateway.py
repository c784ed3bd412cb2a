"""Writes the files of the embedded gateway: configuration, endpoints, listeners. `process` starts it from them."""

import contextlib
import errno
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct, structs

from fairlead.core.endpoint import host_port
from fairlead.gateway.directories import MADE, remove_unlocked
from fairlead.gateway.envoy.admin import GatewayError
from fairlead.gateway.envoy.authentication import read_authorities, write_authorities, write_jwt
from fairlead.gateway.envoy.binary import FORMAT, find_envoy
from fairlead.gateway.envoy.clusters import EndpointsFile
from fairlead.gateway.envoy.config import build
from fairlead.gateway.envoy.options import Options
from fairlead.gateway.envoy.parts import from_file, typed
from fairlead.gateway.envoy.process import (
    ADMIN_SOCKET,
    BOOTSTRAP,
    ENDPOINTS,
    KEYS,
    LISTENERS,
    LISTENERS_LATER,
    UPSTREAM,
)
from fairlead.gateway.ports import bindable, obstacle

_PREFIX = "fairlead-"
#: Seconds within which a gateway that starts has certainly locked its new directory.
_STARTS_S = 60.0
#: The most bytes of the path of a UNIX socket.
_SOCKET_PATH = 107
#: The options that name a file in the gateway's directory, which Envoy follows.
_FOLLOWED = ("keys_file", "jwt_file", "jwks_ca_file", "upstream_token_file")


class Plan(Struct, frozen=True):
    """The arguments of `GatewayProcess`: plain values, so that another process can start it."""

    directory: str
    #: The command of each Envoy, and the address of its admin page: a socket's path, or a port of 127.0.0.1.
    commands: list[list[str]]
    admins: list[str]
    last_log: float
    start_timeout: float
    #: Seconds to wait for the scheduler before the gateway listens for clients.
    scheduler_timeout: float = 0.0
    #: The number of schedulers.
    schedulers: int = 1

    @property
    def endpoints_file(self) -> Path:
        return Path(self.directory, ENDPOINTS)

    @property
    def keys_file(self) -> Path:
        return Path(self.directory, KEYS)

    @property
    def upstream_token_file(self) -> Path:
        return Path(self.directory, UPSTREAM)


def prepare(
    options: Options,
    endpoints: Iterable[str] = (),
    *,
    binary: str = "",
    directory: Path | None = None,
    start_timeout: float = 20.0,
    scheduler_timeout: float = 0.0,
) -> Plan:
    """Write the gateway's files into a new directory in `directory`, by default the system's for temporary files.
    `scheduler_timeout`: seconds to wait for the scheduler before the gateway listens for clients.

    Raises `ConfigError` for invalid options or endpoints, `GatewayError` if there is no Envoy or the port is taken, or
    `OSError` if the directory cannot hold the files.
    """
    options.check()
    binary = binary or find_envoy()
    options = structs.replace(options, host=bindable(options.host))
    check_free(options.host, options.port)
    for number in range(options.envoys if options.admin_port else 0):
        check_free("127.0.0.1", options.admin_port + number, "adminPort")
    remove_leftovers(directory or Path(tempfile.gettempdir()))
    own = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=directory))  # mode 0700
    try:
        if not options.admin_port and len(os.fsencode(own / ADMIN_SOCKET.format(options.envoys))) > _SOCKET_PATH:
            raise OSError(errno.ENAMETOOLONG, "its name is too long for a UNIX socket in it")
        pool = EndpointsFile(own / ENDPOINTS)
        pool.write(tuple(endpoints) or options.endpoints)
        names = structs.asdict(options)
        files = {setting: str(own / names[setting]) for setting in _FOLLOWED if names[setting]}
        options = structs.replace(options, endpoints_file=str(pool.path), **files)
        if options.jwt and options.jwt_file:
            write_jwt(Path(options.jwt_file), options.jwt, options.asks_for_keys)
        if options.jwt and options.jwks_ca_file:
            write_authorities(Path(options.jwks_ca_file), read_authorities(options.jwt.ca_file))
        each = [options.each(number, str(own / ADMIN_SOCKET.format(number))) for number in range(options.envoys)]
        commands = [_write(own, number, binary, own_options) for number, own_options in enumerate(each)]
    except BaseException:
        shutil.rmtree(own, ignore_errors=True)
        raise
    return Plan(
        directory=str(own),
        commands=commands,
        admins=[str(own_options.admin_port or own_options.admin_path) for own_options in each],
        last_log=2 * options.als_interval if options.als else 0.0,
        start_timeout=start_timeout,
        scheduler_timeout=scheduler_timeout,
        schedulers=1 + len(options.peers),
    )


def remove_leftovers(base: Path) -> None:
    """Remove directories of gateways that were killed. The configuration is in them, perhaps with a password."""
    for path in base.glob(_PREFIX + MADE):
        with contextlib.suppress(OSError):
            # In this order, the reverse of `_write`: the files may be written just now.
            starts = not (path / LISTENERS).exists() or (path / LISTENERS_LATER).exists()
            if starts and abs(time.time() - path.stat().st_mtime) < _STARTS_S:  # later: the clock was set back
                continue  # not even tried to lock: it is about to
            if any((path / name).is_file() for name in (LISTENERS, ENDPOINTS)):
                remove_unlocked(path)


def _write(directory: Path, number: int, binary: str, options: Options) -> list[str]:
    """Write the files of one Envoy. All Envoys share the listener. Returns the command."""
    bootstrap = build(options)
    # The client listener starts later: Envoy opens it when its file is moved over the empty one.
    listener = typed("envoy.config.listener.v3.Listener", **bootstrap["static_resources"]["listeners"].pop(0))
    bootstrap["dynamic_resources"] = {"lds_config": from_file(str(directory / LISTENERS))}
    for name, listeners in ((LISTENERS_LATER, [listener]), (LISTENERS, [])):  # in this order: see `remove_leftovers`
        (directory / name).write_text(json.dumps({"resources": listeners}), encoding="utf-8")
    file = directory / BOOTSTRAP.format(number)
    file.write_text(json.dumps(bootstrap), encoding="utf-8")
    return command(binary, file, options.concurrency)


def command(binary: str, bootstrap: Path, concurrency: int) -> list[str]:
    """The command that starts Envoy.

    Hot restart is off, because it needs shared memory with a number that two gateways might share. Without the
    scheduler, ext_proc would log a warning for every request; the access log and `ext_proc.failure_mode_allowed` count
    them.
    """
    arguments = [binary, "-c", str(bootstrap), "--disable-hot-restart", "--log-level", "warning"]
    arguments += ["--component-log-level", "ext_proc:error"]
    arguments += ["--log-format", FORMAT, "--drain-strategy", "immediate", "--drain-time-s", "1"]
    return arguments + (["--concurrency", str(concurrency)] if concurrency else [])


def check_free(host: str, port: int, name: str = "port") -> None:
    """Raise `GatewayError` if the address cannot be bound: with several workers, Envoy would share a taken port.
    `name`: of the setting."""
    error = obstacle(host, port)
    if error is None:
        return
    where = host_port(host, port)
    if "in use" in os.strerror(error.errno or 0):
        cure = f"stop what listens there, or choose another {name} for the gateway"
        raise GatewayError(f"{where} is taken: {cure}")
    raise GatewayError(f"the gateway cannot listen on {where}: {error.strerror}")
