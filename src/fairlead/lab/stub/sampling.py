"""Sampling fields of a request: stop strings, log-probabilities, and parameters that are checked and have no effect.

The stub does not sample: its output is a slice of a table that repeats (`engine.tokens`), known before it begins. So
distant positions of stop strings are looked up in the table once per request, not in the text of each choice.

Rules of stop strings (vLLM 0.32's)
* The text ends before the stop string, or after it if the client wants so. Tokens count up to the one that completes
  it.
* The earliest token that completes any of the strings decides; of several strings, the first in the client's order.
* A stream holds back as many characters as could be the beginning of a stop string.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from math import isfinite, log
from typing import NamedTuple

from fairlead.lab.engine import tokens as tk
from fairlead.lab.stub import fields
from fairlead.lab.stub.fields import ApiError, Body, bad_value

#: The number of output tokens that are searched directly. Stop strings that are not in them are rare.
_NEAR = 1024
_TURN = tk.TOKEN_BYTES * tk.PERIOD


class Stop(NamedTuple):
    """Generation stops after `tokens` tokens, of whose text `length` bytes are shown, because of `string`."""

    tokens: int
    length: int
    string: str


class StopStrings:
    __slots__ = ("_include", "_places", "_strings", "hold")

    def __init__(self, strings: Sequence[str], include: bool) -> None:
        self._strings = tuple(dict.fromkeys(strings))
        self._include = include
        self._places: dict[bytes, list[int]] = {}
        #: Bytes of text that a stream holds back until the end.
        self.hold = 0 if include else max(map(len, self._strings)) - 1

    def find(self, seed: int, limit: int) -> Stop | None:
        """Where the output of this seed stops within `limit` tokens; `None` = no stop string occurs there."""
        near = tk.output(seed, 0, min(limit, _NEAR))
        best: Stop | None = None
        for string in self._strings:
            word = string.encode("utf-8", "surrogatepass")
            position = near.find(word)
            if position < 0 and limit > _NEAR:
                position = self._far(word, seed)
            end = position + len(word)
            tokens = -(-end // tk.TOKEN_BYTES)
            if position >= 0 and tokens <= limit and (best is None or tokens < best.tokens):
                best = Stop(tokens, end if self._include else position, string)
        return best

    def _far(self, word: bytes, seed: int) -> int:
        """Bytes from the beginning of the seed's output to the first `word`; -1 = it never occurs."""
        places = self._places.get(word)
        if places is None:
            places = self._places[word] = _places(word)
        if not places:
            return -1
        start = tk.TOKEN_BYTES * (seed % tk.PERIOD)
        index = bisect_left(places, start)
        return places[index] - start if index < len(places) else places[0] + _TURN - start


def _places(word: bytes) -> list[int]:
    """The positions in one period of the table at which the word begins."""
    if len(word) > _TURN:
        return []
    text = tk.output(0, 0, tk.PERIOD + -(-len(word) // tk.TOKEN_BYTES))
    places = []
    position = text.find(word)
    while 0 <= position < _TURN:
        places.append(position)
        position = text.find(word, position + 1)
    return places


# Made-up log-probabilities: well formed, the same for the same text, in vLLM 0.32's two forms.
#
# The "sampled" token is always the likeliest, as at temperature 0. The likelihood of its alternatives falls
# geometrically, at a rate that depends on the token's position in the text, so their sum never exceeds 1.

#: `--max-logprobs` of vLLM.
MAX_TOP = 20
#: How many different likelihoods a token can have.
_RATES = 128


def completion_logprobs(seed: int, start: int, stop: int, top: int, offset: int) -> bytes:
    """JSON of the tokens `start` to before `stop`. The text begins `offset` characters before the very first token."""
    width = tk.TOKEN_BYTES
    likely = [_likely(seed, position, max(1, top)) for position in range(start, stop)]
    offsets = b",".join(b"%d" % (offset + width * position) for position in range(start, stop))
    tops = b",".join(b"{%b}" % b",".join(b'"%b":%b' % (text, value) for text, value in row) for row in likely)
    return b'{"text_offset":[%b],"token_logprobs":[%b],"tokens":[%b],"top_logprobs":[%b]}' % (
        offsets,
        b",".join(row[0][1] for row in likely),
        b",".join(b'"%b"' % row[0][0] for row in likely),
        tops,
    )


def chat_logprobs(seed: int, start: int, stop: int, top: int) -> bytes:
    """JSON of the tokens from `start` to before `stop`."""
    content = []
    for position in range(start, stop):
        row = [_entry(text, value) for text, value in _likely(seed, position, max(1, top))]
        content.append(b'{%b,"top_logprobs":[%b]}' % (row[0], b",".join(b"{%b}" % entry for entry in row[:top])))
    return b'{"content":[%b]}' % b",".join(content)


def _entry(text: bytes, value: bytes) -> bytes:
    return b'"token":"%b","logprob":%b,"bytes":[%b]' % (text, value, _spelled(text))


@lru_cache(1024)
def _spelled(text: bytes) -> bytes:
    return b",".join(b"%d" % byte for byte in text)


@lru_cache(_RATES)
def _falling(step: int) -> list[bytes]:
    """Log-probabilities of the likeliest token, the second, and so on, for one of the rates."""
    rate = (64 + step) / 256
    first, fall = log(1 - rate), log(rate)
    return [b"%.6f" % (first + rank * fall) for rank in range(MAX_TOP)]


def _likely(seed: int, position: int, count: int) -> list[tuple[bytes, bytes]]:
    """The token at a position and its alternatives, `count` different ones, likeliest first."""
    place = (seed + position) % tk.PERIOD
    text, width = tk.output(place, 0, 2 * count), tk.TOKEN_BYTES
    words = dict.fromkeys(text[byte : byte + width] for byte in range(0, width * count, width))
    position = width * count
    while len(words) < count:  # a word occurred twice; far fewer than half of the words do
        words[text[position : position + width]] = None
        position += width
    return list(zip(words, _falling(place * 97 % _RATES), strict=False))


#: More stop strings are refused, unlike in vLLM, because each costs a search of the text.
_MAX_STOPS = 32
#: The most log-probabilities in one answer. Making them blocks other requests for about a second and takes 60 MB.
_MAX_VALUES = 1_000_000


class Sampling:
    """The sampling fields of a request. The constructor checks their types, `check` their values, in the order of the
    real server and with its messages."""

    def __init__(self, body: Body) -> None:
        self._temperature = fields.number(body, "temperature", 1.0)
        self._top_p = fields.number(body, "top_p", 1.0)
        self._top_k = fields.integer(body, "top_k", 0) or 0
        self._min_p = fields.number(body, "min_p", 0.0)
        self._presence = fields.number(body, "presence_penalty", 0.0)
        self._frequency = fields.number(body, "frequency_penalty", 0.0)
        self._repetition = fields.number(body, "repetition_penalty", 1.0)
        self._stops = fields.strings(body, "stop")
        self._include_stop = fields.boolean(body, "include_stop_str_in_output")

    def check(self) -> None:
        """Check the values. Raises `ApiError`."""
        for name, penalty in (("presence_penalty", self._presence), ("frequency_penalty", self._frequency)):
            if not -2 <= penalty <= 2:
                raise ApiError(f"{name} must be in [-2, 2], got {penalty}.")
        if not isfinite(self._repetition):
            raise ApiError(f"repetition_penalty must be a finite number, got {self._repetition}.")
        if self._repetition <= 0:
            raise ApiError(f"repetition_penalty must be greater than zero, got {self._repetition}.")
        if not self._temperature >= 0:
            value = self._temperature
            raise bad_value(f"temperature must be non-negative, got {value}.", "temperature", value)
        if not 0 < self._top_p <= 1:
            raise bad_value(f"top_p must be in (0, 1], got {self._top_p}.", "top_p", self._top_p)
        if self._top_k < -1:
            raise ApiError(f"top_k must be 0 (disable), or at least 1, got {self._top_k}.")
        if not 0 <= self._min_p <= 1:
            raise ApiError(f"min_p must be in [0, 1], got {self._min_p}.")
        if not all(self._stops):
            raise ApiError("stop cannot contain an empty string.")
        if len(self._stops) > _MAX_STOPS:
            raise ApiError(f"stop can have at most {_MAX_STOPS} strings, got {len(self._stops)}.", param="stop")

    def stop_strings(self) -> StopStrings | None:
        return StopStrings(self._stops, self._include_stop) if self._stops else None


def completion_top(body: Body) -> int | None:
    """`logprobs` of /v1/completions: how many likely tokens to show; `None` = no log-probabilities."""
    top = fields.integer(body, "logprobs")
    if top is not None and top < 0:
        raise bad_value("`logprobs` must be a positive value.", "logprobs", top)
    return top


def chat_top(body: Body) -> int | None:
    """The number of likely tokens to show for /v1/chat/completions, where `logprobs` is a switch and `top_logprobs` the
    number; `None` = no log-probabilities."""
    wanted = fields.boolean(body, "logprobs")
    top = fields.integer(body, "top_logprobs", 0) or 0
    if top < 0:
        raise bad_value("`top_logprobs` must be a positive value.", "top_logprobs", top)
    if top and not wanted:
        message = "when using `top_logprobs`, `logprobs` must be set to true. (parameter=top_logprobs)"
        raise ApiError(message, param="top_logprobs")
    return top if wanted else None


def check_top(top: int | None, tokens: int) -> None:
    """Raise `ApiError` if `top` likely tokens for each of an answer's `tokens` tokens are more than allowed."""
    if top is None:
        return
    if top > MAX_TOP:
        message = f"Requested sample logprobs of {top}, which is greater than max allowed: {MAX_TOP}"
        raise bad_value(message, "logprobs", top)
    if tokens * (top + 1) > _MAX_VALUES:
        raise ApiError(
            f"An answer can have at most {_MAX_VALUES:,} log-probabilities, this one could have {tokens * (top + 1):,};"
            " ask for fewer choices, output tokens or logprobs.",
            param="logprobs",
        )
