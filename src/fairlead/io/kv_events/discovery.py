"""Asking an engine where it publishes its KV events: `GET /kv_event_sources` (vLLM 0.32).

Only ports are taken from the answer. Events are read at the address that the endpoint itself has, so an engine cannot
send us elsewhere.
"""

import asyncio

import aiohttp
import msgspec
from msgspec import Struct

from fairlead.io.kv_events.settings import Curve, KvSource

_PATH = "/kv_event_sources"
_TIMEOUT = 2.0
_MOST_BYTES = 64 << 10
_MOST_RANKS = 256


class _Source(Struct):
    endpoint: str = ""
    replay_endpoint: str | None = None
    enable_kv_cache_events: bool = True
    publisher: str = "zmq"


async def ask(session: aiohttp.ClientSession, address: str, model: str, curve: Curve | None) -> KvSource | None:
    """What the engine at `host:port` says; `None` = it has no events, or did not answer in time."""
    try:
        async with (
            asyncio.timeout(_TIMEOUT),
            session.get(f"http://{address}{_PATH}", allow_redirects=False) as answer,
        ):
            if answer.status != 200:
                return None
            body = b""
            async for chunk in answer.content.iter_chunked(_MOST_BYTES):
                body += chunk
                if len(body) > _MOST_BYTES:
                    return None
        sources = msgspec.json.decode(body, type=dict[str, _Source])
    except (OSError, aiohttp.ClientError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return source_of(sources, address, model, curve)


def source_of(sources: dict[str, _Source], address: str, model: str, curve: Curve | None) -> KvSource | None:
    """Ranks count from the lowest one that is told, with ports one higher each."""
    ranks = sorted(int(rank) for rank in sources if rank.isascii() and rank.isdigit() and len(rank) < 6)[:_MOST_RANKS]
    if not ranks:
        return None
    first = next(source for rank, source in sources.items() if rank.isdigit() and int(rank) == ranks[0])
    port = _port(first.endpoint)
    if not port or not first.enable_kv_cache_events or first.publisher != "zmq":
        return None
    replay = _port(first.replay_endpoint or "")
    return at(address, port, replay, len(ranks), model, curve)


def _port(address: str) -> int:
    """Of `tcp://*:5557`; 0 = it is no such address."""
    port = address.rpartition(":")[2]
    if not address.startswith("tcp://") or not (port.isascii() and port.isdigit() and len(port) < 6):
        return 0
    return int(port) if int(port) < 65536 else 0


def at(address: str, port: int, replay: int, ranks: int, model: str, curve: Curve | None) -> KvSource:
    """The publisher of the endpoint at `host:port`, on these ports; 0 = no replay."""
    host = address.rpartition(":")[0]
    return KvSource(f"tcp://{host}:{port}", f"tcp://{host}:{replay}" if replay else "", model, ranks, curve)
