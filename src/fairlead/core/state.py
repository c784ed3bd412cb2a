"""All that a scheduler has learned ↔ bytes, part by part: for one that starts again, or starts beside others.

Rules
* Parts are small and stand for themselves. Taking one down, encoding it and handling it again takes a millisecond or
  two, so whoever does it lets others have their turn in between.
* What ends with the process is not in here: leases, queues, sessions.
* What a scheduler is given enters by events (`Restored`), so that a journal and its replay know of it too.
"""

from collections.abc import Iterator

import msgspec
from msgspec import Struct

from fairlead.core.fleet import Fleet
from fairlead.core.learned import Amount, Common, EndpointLearned, Part, PrefixesLearned
from fairlead.core.tokens import TokenEstimator

VERSION = 1
#: Blocks of one part.
PART_BLOCKS = 2048
#: Blocks taken down of one endpoint, in one go. It is text for three million tokens.
ENDPOINT_BLOCKS = 32_768
#: Bytes of an encoded block, at most: nine of its hash, five of its size.
BLOCK_BYTES = 14


class Head(Struct, frozen=True, tag="head"):
    """What came first. `taken_at`: seconds since 1970. `finest`, `growth`: how prompts were cut (`ChainHasher`)."""

    version: int
    taken_at: Amount
    finest: int = 0
    growth: int = 0


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Head | Part] = msgspec.msgpack.Decoder(
    Head | Common | EndpointLearned | PrefixesLearned
)


def encode(part: Head | Part) -> bytes:
    return _ENCODER.encode(part)


def decode(data: bytes) -> Head | Part:
    """Raises `ValueError` when it is no part."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def taken(fleet: Fleet, tokens: TokenEstimator, now: float, most_blocks: int) -> Iterator[Part]:
    """What is known, part by part; between two of them anything may happen. `most_blocks`: of all endpoints together,
    shared evenly. `now`: clock seconds."""
    yield Common(
        forecasts=fleet.predictor.learned(),
        models=tokens.learned(),
        bytes_per_token=fleet.bytes_per_token,
        activate_ms=fleet.adapters.activate_ms,
        load_ms=fleet.adapters.load_ms,
    )
    endpoints = fleet.table.slots()
    most = min(most_blocks // max(len(endpoints), 1), ENDPOINT_BLOCKS)
    for slot, endpoint in endpoints:
        if fleet.table.slot(endpoint.id) != slot:
            continue  # it left meanwhile
        blocks = fleet.prefix.newest(slot, most)
        yield fleet.taken(slot, now)
        for number, begin in enumerate(range(0, len(blocks), PART_BLOCKS)):
            if fleet.table.slot(endpoint.id) != slot:
                break
            piece = blocks[begin : begin + PART_BLOCKS]
            sizes = fleet.prefix.sizes(slot, piece)
            yield PrefixesLearned(endpoint.id, number, tuple(piece[: len(sizes)]), sizes)
            if len(sizes) < len(piece):
                break
