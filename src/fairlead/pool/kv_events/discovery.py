"""The sources of KV events, as configured or as the engine reports them, and the limits of a subscriber."""

import asyncio

import aiohttp
import msgspec
from msgspec import Struct

from fairlead.core.endpoint import Endpoint
from fairlead.core.errors import ConfigError
from fairlead.pool.aio import read_at_most


class Curve(Struct, frozen=True):
    """CurveZMQ keys (Z85, 40 characters). `server`: the public key of the side that binds; empty = this side binds."""

    public: str
    secret: str
    server: str = ""


class KvSource(Struct, frozen=True):
    """An endpoint's publisher. `events` and `replay` are ZMQ addresses of rank 0. Rank n has ports n higher."""

    events: str
    #: Empty = the engine has no replay socket.
    replay: str = ""
    #: The engine's base model, which distinguishes its blocks from those of other models.
    model: str = ""
    ranks: int = 1
    curve: Curve | None = None

    def of_rank(self, rank: int) -> tuple[str, str]:
        """The addresses of a rank. Raises `ConfigError` for an address without a port."""
        return rank_address(self.events, rank), rank_address(self.replay, rank) if self.replay else ""


class Limits(Struct, frozen=True):
    """Times are in seconds. The values for replays are those of llm-d-router 0.10."""

    #: The longest time that the event loop is held without a break.
    hold: float = 0.0004
    #: Batches that ZMQ queues per publisher, each of up to `max_frame` bytes. Further ones wait at the publisher, which
    #: drops those beyond its own limit (vLLM: 100,000); the sequence then has a gap.
    queue: int = 64
    #: Replies that ZMQ queues per replay. A publisher sends all its batches at once (10,000 by default).
    replay_queue: int = 20_000
    #: Bytes of replies that wait here per replay. A replay that sends more is cut off, and the rest requested again.
    replay_bytes: int = 32 << 20
    #: Bytes of a batch. Larger batches are dropped and count as lost (decoding 1 MiB takes 1 to 2 ms).
    max_batch: int = 1 << 20
    #: Bytes of a frame. A publisher that sends a larger one is disconnected.
    max_frame: int = 4 << 20
    replay_timeout: float = 120.0
    replay_silence: float = 2.0
    replay_backoff: float = 0.1
    replay_attempts: int = 3
    replay_cooldown: float = 30.0
    replays_at_once: int = 8
    #: The shortest and longest pause between two attempts to connect. Pauses double.
    reconnect_min: float = 0.1
    reconnect_max: float = 5.0


def rank_address(address: str, rank: int) -> str:
    """The address of a rank, given that of rank 0, e.g. `tcp://host:5557` (vLLM: port + rank). Raises `ConfigError`."""
    if not rank:
        return address
    head, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) + rank > 65535:
        raise ConfigError(f"{address!r} has no port to which rank {rank} could be added")
    return f"{head}:{int(port) + rank}"


# Asks an engine where it publishes its KV events: `GET /kv_event_sources` (vLLM 0.32).
#
# Only the ports of the answer are used, with the endpoint's own address. So an engine cannot redirect the subscriber to
# another host.

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
    """The publisher that the engine at `host:port` reports; `None` = it has no events, or did not answer in time."""
    return source_of(await _answer(session, address) or {}, address, model, curve)


async def without_events(session: aiohttp.ClientSession, address: str) -> bool:
    """Whether the engine at `host:port` answers that it has no events."""
    sources = await _answer(session, address)
    return sources is not None and source_of(sources, address, "", None) is None


async def _answer(session: aiohttp.ClientSession, address: str) -> dict[str, _Source] | None:
    """The engine's answer by rank, empty for 404; `None` = there is no usable one in time."""
    try:
        async with asyncio.timeout(_TIMEOUT), session.get(f"http://{address}{_PATH}", allow_redirects=False) as answer:
            if answer.status != 200:
                return {} if answer.status == 404 else None
            body = await read_at_most(answer.content, _MOST_BYTES, ValueError("no answer is so long"))
        return msgspec.json.decode(body, type=dict[str, _Source])
    except (OSError, aiohttp.ClientError, TimeoutError, msgspec.DecodeError, ValueError, RecursionError):
        return None


def source_of(sources: dict[str, _Source], address: str, model: str, curve: Curve | None) -> KvSource | None:
    """The publisher in an engine's answer. The ports are those of the lowest rank; each further rank adds one."""
    ranks = {
        int(rank): source for rank, source in sources.items() if rank.isascii() and rank.isdigit() and len(rank) < 6
    }
    if not ranks:
        return None
    first = ranks[min(ranks)]
    port = _port(first.endpoint)
    if not port or not first.enable_kv_cache_events or first.publisher != "zmq":
        return None
    replay = _port(first.replay_endpoint or "")
    return source_at(address, port, replay, min(len(ranks), _MOST_RANKS), model, curve)


def _port(address: str) -> int:
    """The port of an address such as `tcp://*:5557`; 0 = the address has another form."""
    port = address.rpartition(":")[2]
    if not address.startswith("tcp://") or not (port.isascii() and port.isdigit() and len(port) < 6):
        return 0
    return int(port) if int(port) < 65536 else 0


def configured(endpoint: Endpoint, port: int, replay: int, ranks: int, model: str, curve: Curve | None) -> KvSource:
    """The endpoint's publisher. `port` and `replay`: ports of the pod's first rank; `replay` 0 = no replay socket.
    `ranks`: per endpoint. The ports of an endpoint's ranks follow those of the pod's endpoint before it."""
    before = endpoint.rank * ranks
    return source_at(endpoint.address, port + before, replay and replay + before, ranks, model, curve)


def source_at(address: str, port: int, replay: int, ranks: int, model: str, curve: Curve | None) -> KvSource:
    """The publisher of the endpoint at `address` (`host:port`), on these ports; `replay` 0 = no replay socket."""
    host = address.rpartition(":")[0]
    return KvSource(f"tcp://{host}:{port}", f"tcp://{host}:{replay}" if replay else "", model, ranks, curve)
