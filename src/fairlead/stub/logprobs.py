"""Log-probabilities that are made up: well formed, the same for the same text, in vLLM 0.32's two shapes.

The token that was "sampled" is always the likeliest, as at temperature 0. The likelihood of what could have come
instead falls geometrically, at a rate that depends on the token's place in the text, so no sum of them exceeds 1.
"""

from functools import lru_cache
from math import log

from fairlead.engine import tokens as tk

#: `--max-logprobs` of vLLM.
MAX_TOP = 20
#: How many different likelihoods a token can have.
_RATES = 128


def completion_logprobs(seed: int, start: int, stop: int, top: int, offset: int) -> bytes:
    """JSON of tokens `start`..`stop`; the text begins `offset` characters before the first token of all."""
    width = tk.TOKEN_BYTES
    likely = [_likely(seed, at, max(1, top)) for at in range(start, stop)]
    offsets = b",".join(b"%d" % (offset + width * at) for at in range(start, stop))
    tops = b",".join(b"{%b}" % b",".join(b'"%b":%b' % (text, value) for text, value in row) for row in likely)
    return b'{"text_offset":[%b],"token_logprobs":[%b],"tokens":[%b],"top_logprobs":[%b]}' % (
        offsets,
        b",".join(row[0][1] for row in likely),
        b",".join(b'"%b"' % row[0][0] for row in likely),
        tops,
    )


def chat_logprobs(seed: int, start: int, stop: int, top: int) -> bytes:
    """JSON of tokens `start`..`stop`."""
    content = []
    for at in range(start, stop):
        row = [_entry(text, value) for text, value in _likely(seed, at, max(1, top))]
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


def _likely(seed: int, at: int, count: int) -> list[tuple[bytes, bytes]]:
    """The token at a place and what else was likely there, `count` different ones, likeliest first."""
    place = (seed + at) % tk.PERIOD
    text, width = tk.output(place, 0, 2 * count), tk.TOKEN_BYTES
    words = dict.fromkeys(text[byte : byte + width] for byte in range(0, width * count, width))
    at = width * count
    while len(words) < count:  # a word came twice; far fewer than half of them do
        words[text[at : at + width]] = None
        at += width
    return list(zip(words, _falling(place * 97 % _RATES), strict=False))
