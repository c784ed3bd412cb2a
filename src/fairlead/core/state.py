"""Everything that a scheduler has learned ↔ bytes, part by part, for one that restarts or joins other schedulers.

Rules
* Parts are small and independent. Saving, encoding and restoring one takes a millisecond or two, so that other work can
  run between two parts.
* State that ends with the process is not included: leases, queues, sessions.
* A scheduler receives parts as events (`Restored`), so that they are in the journal and in a replay, too.
"""

from collections.abc import Iterator

import msgspec
from msgspec import Struct

from fairlead.core.fleet import Fleet
from fairlead.core.learned import Amount, Common, EndpointLearned, Part, PrefixesLearned
from fairlead.core.tokens import TokenEstimator

VERSION = 1
#: Blocks in one part.
PART_BLOCKS = 2048
#: Blocks saved of one endpoint, which are read in one go. They cover text of three million tokens.
ENDPOINT_BLOCKS = 32_768
#: Bytes of an encoded block, at most: nine for its hash, five for its size.
BLOCK_BYTES = 14


class Head(Struct, frozen=True, tag="head"):
    """The first part. `taken_at`: seconds since 1970. `finest`, `growth`: how prompts were cut (`ChainHasher`)."""

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
    """Return the decoded part. Raise `ValueError` if it is not a part."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def taken(fleet: Fleet, tokens: TokenEstimator, now: float, most_blocks: int) -> Iterator[Part]:
    """Iterate over the parts of what is known; the fleet may change between two parts. `most_blocks`: for all endpoints
    together, divided evenly. `now`: clock seconds."""
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
