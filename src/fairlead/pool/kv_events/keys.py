"""The CURVE keys of Fairlead, and of publishers that may connect to it, as configured."""

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from fairlead.config.schema import KvCurve
from fairlead.core.errors import ConfigError
from fairlead.pool.kv_events.discovery import Curve

_PLACE = "$.kvEvents.curve"


def read_keys(settings: KvCurve | None, bound: bool) -> tuple[Curve | None, list[str]]:
    """Fairlead's own keys, `None` = no CURVE, and the public keys of publishers that may connect. `bound`: they connect
    to Fairlead. Raises `ConfigError`."""
    if settings is None:
        return None, []
    public, secret = (
        _own_key(settings.public_key_file, "publicKeyFile"),
        _own_key(settings.secret_key_file, "secretKeyFile"),
    )
    if zmq.curve_public(secret.encode()).decode() != public:
        raise ConfigError("it has not the public key of secretKeyFile", f"{_PLACE}.publicKeyFile")
    if not bound:
        if not _is_key(settings.server_key):
            raise ConfigError("no CURVE key (40 characters of Z85)", f"{_PLACE}.serverKey")
        return Curve(public, secret, settings.server_key), []
    if not settings.clients_file:  # `fairlead indexer --bind`
        raise ConfigError("needed, because publishers connect", f"{_PLACE}.clientsFile")
    clients = _keys_in(settings.clients_file, "clientsFile")
    if not clients:
        raise ConfigError(f"{settings.clients_file} has no keys", f"{_PLACE}.clientsFile")
    return Curve(public, secret), clients


def authenticator(context: "zmq.Context[zmq.Socket[bytes]]", clients: Iterable[str]) -> Any:
    """Start to refuse CURVE connections to sockets of the context, except of clients with these public keys; `stop()`
    ends it. Needs the event loop."""
    from zmq.auth.asyncio import AsyncioAuthenticator

    allowed = frozenset(key.encode() for key in clients)

    class Keys:
        def callback(self, domain: str, key: bytes) -> bool:
            return key in allowed

    started = AsyncioAuthenticator(context)
    started.configure_curve_callback("*", Keys())
    started.start()
    return started


def _own_key(path: str, field: str) -> str:
    keys = _keys_in(path, field)
    if len(keys) != 1:
        raise ConfigError(f"expected one key, {path} has {len(keys)}", f"{_PLACE}.{field}")
    return keys[0]


def _keys_in(path: str, field: str) -> list[str]:
    """The keys in a file, one per line. Other lines are empty or comments. No key begins with #: its number would not
    fit 32 bits."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", f"{_PLACE}.{field}") from None
    keys = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        if not _is_key(line):
            raise ConfigError(f"{path}:{number} is no CURVE key (40 characters of Z85)", f"{_PLACE}.{field}")
        keys.append(line)
    return keys


def _is_key(text: str) -> bool:
    try:
        return len(z85.decode(text)) == 32
    except (KeyError, ValueError, struct.error):
        return False
