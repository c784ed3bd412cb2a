"""The frames around KV event batches: topic, sequence number, and the replay dialogue.

Live: `topic, sequence (8 bytes big-endian), payload`. Replay is asked with `empty, start`; each buffered batch from
there on is answered with `empty, topic, sequence, payload` (vLLM since 0.26) or `empty, sequence, payload`, and the end
with `empty, [empty,] ff×8, empty`. A request without the empty frame, or with one more, gets no answer at all
(0.32.0, measured).
"""

from collections.abc import Sequence

from msgspec import Struct

_END = b"\xff" * 8
_LAST = (1 << 64) - 1


class Frames(Struct, gc=False):
    """A batch as it came. `topic` is empty where the publisher has none, or does not tell it in replays."""

    topic: bytes
    sequence: int
    payload: bytes


class Topic(Struct, frozen=True):
    """`kv@<pod>@<model>`; other topics are a pod's name as a whole."""

    pod: str
    model: str = ""


#: What ends a replay.
END = Frames(b"", _LAST, b"")


def live(frames: Sequence[bytes]) -> Frames:
    """Raises `ValueError` for anything but three frames with a sequence number in the second."""
    if len(frames) != 3:
        raise ValueError(f"{len(frames)} frames instead of topic, sequence and payload")
    topic, sequence, payload = frames
    return Frames(topic, sequence_of(sequence), payload)


def sequence_of(frame: bytes) -> int:
    """Raises `ValueError` when the frame has not 8 bytes."""
    if len(frame) != 8:
        raise ValueError(f"a sequence number of {len(frame)} bytes instead of 8")
    return int.from_bytes(frame, "big")


def topic_of(frame: bytes) -> Topic:
    """Pod and model that a topic names. The model may contain `@`."""
    text = frame.decode("utf-8", "replace")
    parts = text.split("@", 2)
    return Topic(parts[1], parts[2]) if len(parts) == 3 else Topic(text)


def topic(pod: str, model: str) -> bytes:
    return f"kv@{pod}@{model}".encode()


def sequence(number: int) -> bytes:
    return number.to_bytes(8, "big")


def replay_request(start: int) -> list[bytes]:
    """Ask for all buffered batches from `start` on."""
    return [b"", start.to_bytes(8, "big")]


def replay_start(frames: Sequence[bytes]) -> int:
    """The start that a request asks for, at whatever length it was written. Raises `ValueError` if it is none."""
    if len(frames) != 2 or frames[0] or not 0 < len(frames[1]) <= 8:
        raise ValueError("a replay request is an empty frame and a start of at most 8 bytes")
    return int.from_bytes(frames[1], "big")


def replay_reply(topic: bytes | None, number: int, payload: bytes) -> list[bytes]:
    """A buffered batch; `topic` of `None` is the form before vLLM 0.26."""
    return [b"", *([] if topic is None else [topic]), sequence(number), payload]


def replay_end(with_topic: bool = True) -> list[bytes]:
    return [b"", *([b""] if with_topic else []), _END, b""]


def replayed(frames: Sequence[bytes]) -> Frames:
    """A reply in either form; `END` for the end. Raises `ValueError` for anything else."""
    rest = list(frames[1:]) if frames and not frames[0] and len(frames) > 2 else list(frames)
    if len(rest) == 2:
        rest.insert(0, b"")
    if len(rest) != 3:
        raise ValueError(f"a replay reply of {len(frames)} frames")
    if rest[1] == _END:
        return END
    return Frames(rest[0], sequence_of(rest[1]), rest[2])
