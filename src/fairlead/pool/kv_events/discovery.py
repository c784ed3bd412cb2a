"""Where KV events come from: as configured, or as the engine says. And the bounds that a subscriber keeps."""

import asyncio

import aiohttp
import msgspec
from msgspec import Struct

from fairlead.core.errors import ConfigError
from fairlead.pool.aio import read_at_most


class Curve(Struct, frozen=True):
    """CurveZMQ keys, Z85 text of 40 characters. `server`: the public key of whoever binds; empty = we bind."""

    public: str
    secret: str
    server: str = ""

    def __post_init__(self) -> None:
        for name, key in (("public", self.public), ("secret", self.secret), ("server", self.server or " " * 40)):
            if len(key) != 40:
                raise ConfigError(f"a CURVE key has 40 characters (Z85), not {len(key)}", f"$.curve.{name}")


class KvSource(Struct, frozen=True):
    """An endpoint's publisher. `events` and `replay` are ZMQ addresses of rank 0; rank n has ports n higher."""

    events: str
    #: Empty = the engine has no replay socket.
    replay: str = ""
    #: Base model, which sets its blocks apart from those of other models.
    model: str = ""
    ranks: int = 1
    curve: Curve | None = None

    def of_rank(self, rank: int) -> tuple[str, str]:
        """Addresses of one rank. Raises `ConfigError` for an address without a port."""
        return rank_address(self.events, rank), rank_address(self.replay, rank) if self.replay else ""


class Limits(Struct, frozen=True):
    """Seconds, unless it says otherwise. Replay's are those of llm-d-router 0.10."""

    #: How long the event loop is held at most before others have their turn.
    hold: float = 0.0004
    #: Batches that ZMQ keeps for us per publisher. More are dropped by the publisher, and found missing by sequence.
    queue: int = 2_000
    #: Replies that ZMQ keeps per replay; a publisher sends all it has at once (10,000 batches by default).
    replay_queue: int = 20_000
    #: Bytes of one batch; larger ones are dropped and count as lost (decoding 1 MiB takes 1 to 2 ms).
    max_batch: int = 1 << 20
    replay_timeout: float = 120.0
    replay_silence: float = 2.0
    replay_backoff: float = 0.1
    replay_attempts: int = 3
    replay_cooldown: float = 30.0
    replays_at_once: int = 8
    #: Reconnecting waits between these two, doubling, with jitter (libzmq adds it).
    reconnect_min: float = 0.1
    reconnect_max: float = 5.0


def rank_address(address: str, rank: int) -> str:
    """`tcp://host:5557` of rank 0 to that of another rank (vLLM: port + rank)."""
    if not rank:
        return address
    head, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) + rank > 65535:
        raise ConfigError(f"{address!r} has no port to which rank {rank} could be added")
    return f"{head}:{int(port) + rank}"


# Asking an engine where it publishes its KV events: `GET /kv_event_sources` (vLLM 0.32).
#
# Only ports are taken from the answer. Events are read at the address that the endpoint itself has, so an engine
# cannot send us elsewhere.

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
        async with asyncio.timeout(_TIMEOUT), session.get(f"http://{address}{_PATH}", allow_redirects=False) as answer:
            if answer.status != 200:
                return None
            body = await read_at_most(answer.content, _MOST_BYTES, ValueError("no answer is so long"))
        sources = msgspec.json.decode(body, type=dict[str, _Source])
    except (OSError, aiohttp.ClientError, TimeoutError, msgspec.DecodeError, ValueError):
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
