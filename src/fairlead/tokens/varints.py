"""Token ids of protobuf messages: varints, seven bits a byte, the last byte of each below 128."""

from collections.abc import Sequence

import numpy as np

#: Of an unsigned 32-bit number.
_MOST_BYTES = 5


def ids_of(segments: Sequence[bytes | memoryview]) -> bytes:
    """Varints one after another → little-endian 32-bit integers. Raises `ValueError` for what is none or is larger."""
    data = np.frombuffer(b"".join(segments), np.uint8)
    if not len(data):
        return b""
    ends = np.flatnonzero(data < 0x80)
    if not len(ends) or ends[-1] != len(data) - 1:
        raise ValueError("a number without its end")
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - starts + 1
    if lengths.max() > _MOST_BYTES:
        raise ValueError("a number of more than 32 bits")
    places = np.arange(len(data)) - np.repeat(starts, lengths)
    values = np.add.reduceat((data & 0x7F).astype(np.uint64) << (7 * places).astype(np.uint64), starts)
    if values.max() >> 32:
        raise ValueError("a number of more than 32 bits")
    return values.astype("<u4").tobytes()
