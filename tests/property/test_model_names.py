"""Bodies made at random, written in every way JSON allows: only the model's name changes, in requests and in responses.

`FAIRLEAD_MODEL_BODIES` sets how many bodies there are (2,000); 100,000 take some minutes.
"""

import json
import os
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from body_spans import model_span

from fairlead.apis.rename import ModelRenamer
from fairlead.apis.request import parse_request
from fairlead.apis.splice import splice_model

BODIES = int(os.environ.get("FAIRLEAD_MODEL_BODIES", "2000"))
BLOCKS = 20

#: What is easily mistaken: keys, brackets, escapes, text that looks like a member.
PIECES = ["model", "mod", "el", '"model":"b"', '"', "\\", "{", "}", "[", "]", ":", ",", "\n", "\r\n", "data: ",
          "\u2028", "é", "日本", "🦊", "\x00", "\x1f", "/", " ", "a", "target", "\\u0062", "null"]  # fmt: skip
NAMES = ["m", "meta-llama/Llama-3.1-8B", 'quote"d', "back\\slash", "naïve", "日本語モデル", "🦊", "a" * 300, "target",
         "tab\tbed", "model"]  # fmt: skip
NUMBERS = [
    "0",
    "-1",
    "1e400",
    "123456789012345678901234567890",
    "-0.0",
    "1.000000000000000000000001",
    "9007199254740993",
]

Pairs = list[tuple[str, Any]]


class Obj:
    """An object as a list of members: keys may repeat."""

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs


class Raw:
    """A number as it is written."""

    def __init__(self, text: str) -> None:
        self.text = text


class Writer:
    """Writes values with white space and escapes as they come. Notes where the wanted strings begin and end."""

    def __init__(self, rng: Random, ascii_only: bool = False, line_end: bytes = b"") -> None:
        self.rng = rng
        self.out = bytearray()
        self.ascii_only = ascii_only
        #: Of a stream: a document may go on in a further line of data.
        self.spaces = [b" ", b"\t", line_end + b"data: "] if line_end else [b" ", b"\n", b"\t", b"\r\n", b"  "]
        self.spans: list[tuple[int, int]] = []

    def space(self) -> None:
        if self.rng.random() < 0.2:
            self.out += self.rng.choice(self.spaces)

    def string(self, text: str, note: bool = False) -> None:
        start = len(self.out)
        self.out += b'"' + b"".join(map(self.char, text)) + b'"'
        if note:
            self.spans.append((start, len(self.out)))

    def char(self, char: str) -> bytes:
        roll = self.rng.random()
        if char in '"\\' or char < " " or roll < 0.05 or self.ascii_only:
            short = {'"': b'\\"', "\\": b"\\\\", "\n": b"\\n", "\r": b"\\r", "\t": b"\\t", "/": b"\\/"}.get(char)
            if short and roll < 0.9:
                return short
            units = char.encode("utf-16-be")
            pairs = [units[i : i + 2].hex() for i in range(0, len(units), 2)]
            return b"".join(b"\\u" + (p.upper() if roll < 0.02 else p).encode() for p in pairs)
        return char.encode()

    def value(self, value: Any, path: tuple[str, ...] = (), wanted: tuple[tuple[str, ...], ...] = ()) -> None:
        if isinstance(value, str):
            self.string(value, note=path in wanted)
        elif isinstance(value, Raw):
            self.out += value.text.encode()
        elif isinstance(value, Obj):
            self.out += b"{"
            self.items([(key, item, (*path, key)) for key, item in value.pairs], wanted)
            self.out += b"}"
        elif isinstance(value, list):
            self.out += b"["
            self.items([(None, item, (*path, "[]")) for item in value], wanted)
            self.out += b"]"
        else:
            self.out += json.dumps(value).encode()

    def items(self, items: list[tuple[str | None, Any, tuple[str, ...]]], wanted: tuple[tuple[str, ...], ...]) -> None:
        self.space()
        for i, (key, item, path) in enumerate(items):
            if i:
                self.out += b","
                self.space()
            if key is not None:
                self.string(key)
                self.space()
                self.out += b":"
                self.space()
            self.value(item, path, wanted)
            self.space()


def text(rng: Random, most: int = 8) -> str:
    return "".join(rng.choices(PIECES, k=rng.randrange(most)))


def anything(rng: Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 4 else 5)
    if kind < 3:
        return text(rng)
    if kind == 3:
        return Raw(rng.choice(NUMBERS))
    if kind == 4:
        return rng.choice([True, False, None])
    if kind == 5:
        return [anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    return Obj([(key(rng), anything(rng, depth + 1)) for _ in range(rng.randrange(4))])


def key(rng: Random) -> str:
    return rng.choice(["model", "message", "response", "x", text(rng)])


def plain(value: Any) -> Any:
    """What a JSON reader makes of it: the last of equal keys counts."""
    if isinstance(value, Obj):
        return {k: plain(v) for k, v in value.pairs}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return json.loads(value.text) if isinstance(value, Raw) else value


def request(rng: Random, size: int) -> Pairs:
    pairs: Pairs = [("messages", [Obj([("role", "user"), ("content", "x" * size + text(rng)), ("model", "no")])])]
    pairs += [(text(rng) + "_", anything(rng)) for _ in range(rng.randrange(5))]
    pairs += [("model", rng.choice(NAMES)) for _ in range(rng.choice([0, 1, 1, 1, 1, 2]))]
    pairs += [("model", None)] * (rng.random() < 0.05)
    rng.shuffle(pairs)
    return pairs


def size_of(rng: Random) -> int:
    return 1_000_000 if rng.random() < 0.002 else rng.choice([0, 10, 1000])


@pytest.mark.parametrize("block", range(BLOCKS))
def test_rewritten_requests(block: int) -> None:
    rng = Random(f"requests {block}")
    for _ in range(BODIES // BLOCKS):
        pairs = request(rng, size_of(rng))
        writer = Writer(rng, ascii_only=rng.random() < 0.1)
        writer.value(Obj(pairs), (), (("model",),))
        body, target = bytes(writer.out), rng.choice(NAMES)
        spliced = splice_model(body, target)
        assert spliced is not None
        named = [item for name, item in pairs if name == "model"]
        if named and isinstance(named[-1], str):
            start, end = writer.spans[-1]
            assert model_span(body) == (start, end)
            tail = len(body) - end
            assert spliced[:start] == body[:start] and spliced[len(spliced) - tail :] == body[end:]
            assert json.loads(spliced[start : len(spliced) - tail]) == target
        # The reference: a reader of all of it. Floats beyond range are equal as infinities.
        assert json.loads(spliced) == {**plain(Obj(pairs)), "model": target}
        assert parse_request("/v1/chat/completions", spliced).model == target


def response(rng: Random, target: str) -> Pairs:
    def name() -> Any:
        return target if rng.random() < 0.7 else rng.choice([*NAMES, None, 1, target + "x", target[:-1]])

    pairs: Pairs = [("id", text(rng)), ("choices", [Obj([("message", Obj([("model", target)])), ("model", target)])])]
    pairs += [("model", name()) for _ in range(rng.choice([0, 1, 1, 1, 2]))]
    pairs += [(rng.choice(["response", "message"]), Obj([("x", anything(rng)), ("model", name())]))] * (
        rng.random() < 0.4
    )
    pairs += [("deep", Obj([("response", Obj([("model", target)]))]))] * (rng.random() < 0.2)
    pairs += [("other", Obj([("a", text(rng)), ("model", target)]))] * (rng.random() < 0.4)
    pairs += [("message", [Obj([("model", target)])])] * (rng.random() < 0.1)
    pairs += [(text(rng) + "_", anything(rng)) for _ in range(rng.randrange(4))]
    rng.shuffle(pairs)
    return pairs


WANTED = (("model",), ("response", "model"), ("message", "model"))


def document(rng: Random, target: str, shown: str, line_end: bytes = b"") -> tuple[bytes, bytes]:
    """A response, and what a client should read."""
    writer = Writer(rng, ascii_only=rng.random() < 0.1, line_end=line_end)
    writer.value(Obj(response(rng, target)), (), WANTED)
    body, wanted, last = bytes(writer.out), bytearray(), 0
    for start, end in writer.spans[:1]:
        wanted += body[last:start] + quoted(shown)
        last = end
    return body, bytes(wanted + body[last:])


def quoted(name: str) -> bytes:
    return json.dumps(name, ensure_ascii=False).encode()


#: How an event goes on behind its name. T is the target, which stays.
RESTS = ["}", ',"x":1}', ',"choices":[{"text":"T"}]}', ',"x":"\\"model\\":\\"T\\""}', ',"x":{"y":1,"model":"T"}}',
         ',"model":"T"}', ',"mod\\u0065l":"T"}', ',"response":{"model":"T"}}', ',"x":1,EOLdata:"model":"T"}',
         ',"x":"\\u0041"}', ""]  # fmt: skip


def alike(rng: Random, target: str, shown: str, line_end: bytes) -> tuple[bytes, bytes]:
    """An event that begins as its neighbours do."""
    names = quoted(target), quoted(shown)
    rest = rng.choice(RESTS).encode().replace(b"EOL", line_end).replace(b'"T"', names[0])
    return b'{"id":1,"model":' + names[0] + rest, b'{"id":1,"model":' + names[1] + rest


def stream(rng: Random, target: str, shown: str) -> tuple[bytes, bytes]:
    """Some events, with line ends of one kind."""
    line_end = rng.choice([b"\n", b"\n", b"\r\n", b"\r"])
    data = rng.choice([b"data: ", b"data:"])
    body, wanted = b"", b""
    for _ in range(rng.randrange(1, 6)):
        event = alike if rng.random() < 0.7 else document
        here, there = event(rng, target, shown, line_end)
        before = rng.choice([b""] * 4 + [line + line_end for line in (b"event: message", b': {"model":"x"}', b"id: 1")])
        body += before + data + here + 2 * line_end
        wanted += before + data + there + 2 * line_end
    done = b"data: [DONE]" + 2 * line_end
    return body + done, wanted + done


def renamed(body: bytes, shown: str, is_stream: bool, cuts: list[int], same_length: bool = False) -> bytes:
    renamer = ModelRenamer(shown, is_stream, same_length)
    bounds = [0, *sorted(cuts), len(body)]
    pieces = [body[a:b] for a, b in pairwise(bounds)]
    return b"".join([renamer.feed(piece) for piece in pieces]) + renamer.feed(b"", end=True)


def sample(rng: Random) -> tuple[str, bool, bytes, bytes]:
    target, shown, is_stream = rng.choice(NAMES), rng.choice(NAMES), rng.random() < 0.5
    made = stream(rng, target, shown) if is_stream else document(rng, target, shown)
    return shown, is_stream, *made


@pytest.mark.parametrize("block", range(BLOCKS))
def test_names_in_responses(block: int) -> None:
    rng = Random(f"responses {block}")
    for _ in range(BODIES // BLOCKS):
        shown, is_stream, body, wanted = sample(rng)
        cuts = [rng.randrange(len(body) + 1) for _ in range(rng.randrange(6))]
        assert renamed(body, shown, is_stream, cuts) == wanted
        if not is_stream:
            assert json.loads(wanted) is not None


def test_names_in_responses_cut_at_every_byte() -> None:
    rng = Random("cuts")
    for _ in range(max(BODIES // 100, 1)):
        shown, is_stream, body, wanted = sample(rng)
        assert renamed(body, shown, is_stream, list(range(len(body)))) == wanted
        for cut in range(len(body) + 1):
            assert renamed(body, shown, is_stream, [cut]) == wanted


@pytest.mark.parametrize("is_stream", [False, True])
def test_random_bytes_pass(is_stream: bool) -> None:
    """No name in them may be replaced by one that is so long; and nothing may be lost or held for ever."""
    rng = Random("noise")
    pieces = [piece.encode() for piece in PIECES if piece != "target"] + [
        b"\xff",
        b"data:",
        b'{"',
        b"\n\n",
        b'{"model":',
    ]
    for _ in range(BODIES // 4):
        body = b"".join(rng.choices(pieces, k=rng.randrange(30)))
        cuts = [rng.randrange(len(body) + 1) for _ in range(rng.randrange(6))]
        assert renamed(body, "x" * 1000, is_stream, cuts, same_length=True) == body
