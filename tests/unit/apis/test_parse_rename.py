"""The model's name in responses. tests/property/test_model_names.py has the many; here are the ones to read."""

import sys
import tracemalloc
from types import FrameType

import pytest

from fairlead.apis.rename import ModelRenamer


def one_by_one(renamer: ModelRenamer, body: bytes) -> bytes:
    pieces = [renamer.feed(body[i : i + 1]) for i in range(len(body))]
    return b"".join(pieces) + renamer.feed(b"", end=True)


CHUNK = b'{"id":"cmpl-1","object":"text_completion","created":1,"model":"%b","choices":[{"index":0,"text":"x"}]}'


@pytest.mark.parametrize("ends", [b"\n", b"\r\n", b"\r"])
def test_stream(ends: bytes) -> None:
    def body(name: bytes) -> bytes:
        events = [
            b": keep-alive",
            b"event: x" + ends + b"data: " + CHUNK % name,
            b"data:" + CHUNK % name,
            b"data: [DONE]",
        ]
        return b"".join(event + 2 * ends for event in events)

    assert ModelRenamer("big/one", True).feed(body(b"tiny")) == body(b"big/one")
    assert one_by_one(ModelRenamer("big/one", True), body(b"tiny")) == body(b"big/one")


@pytest.mark.parametrize("ends", [b"\r\n\r\n", b"\r\r", b"\n\r\n"])
def test_events_of_a_stream_that_mixes_line_ends(ends: bytes) -> None:
    def body(name: bytes) -> bytes:
        return b"".join(b"data: " + CHUNK % name + end for end in (b"\n\n", ends, b"\n\n"))

    assert ModelRenamer("big/one", True).feed(body(b"tiny")) == body(b"big/one")


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (b'{"model":"t"}', b'{"model":"c"}'),
        (b'{ "model" : "\\u0074" }', b'{ "model" : "c" }'),
        (b'{"mod\\u0065l":"t"}', b'{"mod\\u0065l":"c"}'),
        # as vLLM does: its first name, whichever was asked for
        (b'{"model":"/models/first \\"name\\""}', b'{"model":"c"}'),
        # Anthropic's and the Responses API's events
        (b'{"type":"message_start","message":{"model":"t"}}', b'{"type":"message_start","message":{"model":"c"}}'),
        (b'{"response":{"a":[{}],"model":"t"},"b":1}', b'{"response":{"a":[{}],"model":"c"},"b":1}'),
        # a list of documents: vLLM's `/v1/completions/render`
        (
            b'[{"a":[1,{"model":"t"}],"model":"t","b":{"model":"t"}}, {"model":"x"}]',
            b'[{"a":[1,{"model":"t"}],"model":"c","b":{"model":"t"}}, {"model":"c"}]',
        ),
        # the first name of a document
        (b'{"model":"t","model":"x"}{"model":"t"}', b'{"model":"c","model":"x"}{"model":"t"}'),
    ],
)
def test_names(body: bytes, wanted: bytes) -> None:
    assert ModelRenamer("c", False).feed(body) == wanted
    assert one_by_one(ModelRenamer("c", False), body) == wanted


def test_lists_in_events_that_begin_alike() -> None:
    one, two = b'data: [{"model":"%b","n":1}]\n\n', b'data: [{"model":"%b","n":1},{"model":"%b"}]\n\n'
    body, wanted = (one % name + two % (name, name) for name in (b"t", b"c"))
    assert ModelRenamer("c", True).feed(body) == wanted
    assert one_by_one(ModelRenamer("c", True), body) == wanted


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"model":null}',
        b'{"model":["t"]}',
        b'{"models":"t"}',
        b'{"x":{"model":"t"}}',
        b'[[{"model":"t"}]]',
        b'{"choices":[{"message":{"model":"t"}}]}',
        b'{"message":[{"model":"t"}]}',
        b'{"content":"{\\"model\\":\\"t\\"}"}',
        b'{"model":"t',
        b'RIFF\x00{"model":"t"}',
        b'{"model","t"}',
        b'{"error":{"message":"The model `t` does not exist.","param":"model"}}',
    ],
)
def test_what_stays(body: bytes) -> None:
    assert one_by_one(ModelRenamer("c", False), body) == body
    in_stream = b"data: " + body + b"\n\n"
    assert one_by_one(ModelRenamer("c", True), in_stream) == in_stream


def test_an_event_over_several_data_lines() -> None:
    body = b'data: {\ndata:   "model":\ndata:   "t"}\n\ndata: {"model":"t"}\n\n'
    assert one_by_one(ModelRenamer("c", True), body) == body.replace(b'"t"', b'"c"')


def test_a_string_that_a_line_end_breaks_spoils_only_its_event() -> None:
    body = b'data: {"x":"\ndata: ","model":"t"}\n\n'
    good = b'data: {"model":"t"}\n\n'
    assert ModelRenamer("c", True).feed(body + good) == body + good.replace(b"t", b"c").replace(b"daca", b"data")


def test_nothing_is_held_but_what_may_be_the_name() -> None:
    renamer = ModelRenamer("c", False)
    assert renamer.feed(b'{"id":"x","model" : "tar') == b'{"id":"x","model" : '
    assert renamer.feed(b"x" * 4000) == b""
    assert renamer.feed(b"x" * 100) == b'"tar' + b"x" * 4100
    assert renamer.feed(b'","y":"tar') == b'","y":"tar'


def test_a_body_that_must_keep_its_length() -> None:
    renamer = ModelRenamer("client's", False, same_length=True)
    assert renamer.feed(b'{"model":"of-8-len"}') == b'{"model":"client\'s"}'
    assert ModelRenamer("client's", False, same_length=True).feed(b'{"model":"t"}') == b'{"model":"t"}'


def test_memory_is_bounded() -> None:
    renamer = ModelRenamer("c", False)
    piece = b"x" * 100_000
    tracemalloc.start()
    for beginning in (b'{"', b'":"', b'","model":"'):
        renamer.feed(beginning)
        for _ in range(50):
            assert len(renamer.feed(piece)) >= len(piece)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize(
    "unit", [b'"', b"\\", b"{", b"[", b'{"model":', b'{"message":', b"data: {", b"\r", b"data:\n", b'{"model":"t"']
)
@pytest.mark.parametrize("stream", [False, True])
def test_hostile_bytes_take_linear_time(unit: bytes, stream: bool) -> None:
    body = unit * (300_000 // len(unit))
    renamer = ModelRenamer("t", stream)
    pieces = [renamer.feed(body[i : i + 1000]) for i in range(0, len(body), 1000)]
    assert b"".join(pieces) + renamer.feed(b"", end=True) == body


def test_a_document_with_many_brackets_and_no_name_is_not_read_to_its_end() -> None:
    few, many = (b'{"data":[%b[]],"model":"t"}' % (b"[]," * count) for count in (1000, 100_000))
    assert ModelRenamer("c", False).feed(few) == few.replace(b'"t"', b'"c"')
    assert ModelRenamer("c", False).feed(many) == many


@pytest.mark.parametrize(
    "unit", [b"\n", b"\r", b"\r\n", b":\r\n", b"x\n", b"data:\n", b"data: {}\n\n", b"event: x\ndata: {}\r\n\r\n"]
)
def test_lines_without_a_name_are_passed_at_once(unit: bytes) -> None:
    named = b'data: {"model":"t"}\n\n'
    assert calls_for(unit * 1000) < 100
    for body in (unit * 3 + named, named + unit * 3 + named):
        wanted = body.replace(b'"t"', b'"c"')
        assert ModelRenamer("c", True).feed(body) == one_by_one(ModelRenamer("c", True), body) == wanted


@pytest.mark.parametrize("ends", [b"\n", b"\r\n"])
def test_events_that_begin_alike_are_not_read_again(ends: bytes) -> None:
    event = b"data: " + CHUNK % b"tiny" + 2 * ends
    assert calls_for(event) > 10
    assert calls_for(event * 1000) < 5000
    assert ModelRenamer("big/one", True).feed(event * 3) == event.replace(b"tiny", b"big/one") * 3


def calls_for(body: bytes) -> int:
    """How many Python functions are called to rename a stream."""
    calls = []

    def noted(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls.append(event)

    renamer = ModelRenamer("c", True)
    sys.setprofile(noted)
    try:
        renamer.feed(body)
    finally:
        sys.setprofile(None)
    return len(calls)
