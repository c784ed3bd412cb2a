"""Where KV events come from, and the bounds that a subscriber keeps."""

from msgspec import Struct

from fairlead.model.errors import ConfigError


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
