"""Stop strings: where in a made-up text generation ends, which is known before it begins.

Rules (vLLM 0.32's)
* Text ends before the stop string, or with it when the client wants that; tokens count up to the one that completes it.
* The earliest token that completes any of the strings decides; of several, the first that the client named.
* A stream keeps back as many characters as could be the beginning of a stop string.

Output is a slice of a table that repeats (`engine.tokens`), so far places are looked up once per request, in the table,
and not once per choice, in its text.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from fairlead.engine import tokens as tk

#: Tokens that are searched directly; a string that is not there is rare.
_NEAR = 1024
_TURN = tk.TOKEN_BYTES * tk.PERIOD


class Stop(NamedTuple):
    """Generation stops after `tokens` tokens, `length` bytes of whose text are shown; `string` is why."""

    tokens: int
    length: int
    string: str


class StopStrings:
    """What one request wants to stop at."""

    __slots__ = ("_include", "_places", "_strings", "hold")

    def __init__(self, strings: Sequence[str], include: bool) -> None:
        self._strings = tuple(dict.fromkeys(strings))
        self._include = include
        self._places: dict[bytes, list[int]] = {}
        #: Bytes of text that a stream keeps back until the end.
        self.hold = 0 if include else max(map(len, self._strings)) - 1

    def find(self, seed: int, limit: int) -> Stop | None:
        """Where the output of that seed stops within `limit` tokens."""
        near = tk.output(seed, 0, min(limit, _NEAR))
        best: Stop | None = None
        for string in self._strings:
            word = string.encode("utf-8", "surrogatepass")
            at = near.find(word)
            if at < 0 and limit > _NEAR:
                at = self._far(word, seed)
            end = at + len(word)
            tokens = -(-end // tk.TOKEN_BYTES)
            if at >= 0 and tokens <= limit and (best is None or tokens < best.tokens):
                best = Stop(tokens, end if self._include else at, string)
        return best

    def _far(self, word: bytes, seed: int) -> int:
        """Bytes from the beginning of the seed's output to the first `word`; -1 = it never comes."""
        places = self._places.get(word)
        if places is None:
            places = self._places[word] = _places(word)
        if not places:
            return -1
        start = tk.TOKEN_BYTES * (seed % tk.PERIOD)
        index = bisect_left(places, start)
        return places[index] - start if index < len(places) else places[0] + _TURN - start


def _places(word: bytes) -> list[int]:
    """Where in one turn of the table the word begins."""
    if len(word) > _TURN:
        return []
    text = tk.output(0, 0, tk.PERIOD + -(-len(word) // tk.TOKEN_BYTES))
    places = []
    at = text.find(word)
    while 0 <= at < _TURN:
        places.append(at)
        at = text.find(word, at + 1)
    return places
