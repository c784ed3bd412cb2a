"""Which responses are followed to their end, to learn token counts."""

from collections.abc import Callable
from random import Random

#: Streamed answers that are followed to their end at first, before sampling sets in.
FIRST_INSPECTED = 20
STREAM_GAP = 60.0


def sampler(share: float, rng: Random, now: Callable[[], float]) -> Callable[[bool], bool]:
    """Decides which responses are followed to their end: `share` of them, none when it is 0.

    A stream costs work for every chunk: after the first `FIRST_INSPECTED` of them at most one in `STREAM_GAP` seconds
    is followed. The argument says whether the response is a stream.
    """
    left = FIRST_INSPECTED
    next_at = 0.0

    def inspect(stream: bool) -> bool:
        nonlocal left, next_at
        if share <= 0:
            return False
        if not stream:
            return rng.random() < share
        if left > 0:
            left -= 1
            return True
        if rng.random() >= share or now() < next_at:
            return False
        next_at = now() + STREAM_GAP
        return True

    return inspect
