"""Responses of rewritten requests, message by message."""

from types import ModuleType

import pytest

from fairlead.core.request import Request
from fairlead.gateway.ext_proc import CONTINUE, BodyMode, Kind
from fairlead.gateway.response import Renaming, ResponseWatch

JSON = {"content-type": "application/json"}
SSE = {"content-type": "text/event-stream; charset=utf-8"}
BODY = b'{"model":"target","x":1}'


def bodies(pb: ModuleType, messages: list[bytes]) -> list[bytes | None]:
    """The new body of each answer; `None` = as it was."""
    found: list[bytes | None] = []
    for message in messages:
        answer = pb.ProcessingResponse.FromString(message).response_body.response
        mutation = answer.body_mutation
        kind = mutation.WhichOneof("mutation")
        found.append(None if kind is None else mutation.body if kind == "body" else mutation.streamed_response.body)
    return found


@pytest.mark.parametrize("mode", [BodyMode.STREAMED, BodyMode.BUFFERED, BodyMode.FULL_DUPLEX])
def test_a_response_with_headers_loses_its_length(pb: ModuleType, mode: BodyMode) -> None:
    renaming = Renaming("shown", mode, stream=False, resizable=False)
    answer = pb.ProcessingResponse.FromString(renaming.headers(JSON)).response_headers.response
    assert list(answer.header_mutation.remove_headers) == ["content-length"]
    assert bodies(pb, renaming.chunk(BODY, True)) == [BODY.replace(b"target", b"shown")]


@pytest.mark.parametrize("headers", [SSE, {"content-type": "Text/Event-Stream"}])
def test_a_stream_shows_in_its_headers(pb: ModuleType, headers: dict[str, str]) -> None:
    watch = ResponseWatch(Request(1, 0.0))
    watch.headers(headers)
    assert watch.is_sse
    renaming = Renaming("shown", BodyMode.STREAMED, stream=False, resizable=False)
    renaming.headers(headers)
    assert bodies(pb, renaming.chunk(b"data: " + BODY, False)) == [b"data: " + BODY.replace(b"target", b"shown")]


@pytest.mark.parametrize("headers", [{"content-type": "audio/wav"}, {}, {**JSON, "content-encoding": "gzip"}])
def test_what_cannot_be_read_passes(headers: dict[str, str]) -> None:
    renaming = Renaming("shown", BodyMode.STREAMED, stream=False, resizable=True)
    assert renaming.headers(headers) == CONTINUE[Kind.RESPONSE_HEADERS]
    assert renaming.chunk(BODY, True) == [CONTINUE[Kind.RESPONSE_BODY]]


def test_without_headers_the_length_must_fit_or_be_taken_off(pb: ModuleType) -> None:
    for shown, resizable, changes in (
        ("longer-name", False, False),
        ("longer-name", True, True),
        ("tegrat", False, True),
        ('teg"at', False, False),
    ):
        renaming = Renaming(shown, BodyMode.STREAMED, stream=False, resizable=resizable)
        assert (renaming.chunk(BODY, True) != [CONTINUE[Kind.RESPONSE_BODY]]) == changes


def test_a_chunk_without_a_name_is_not_sent_back() -> None:
    renaming = Renaming("shown", BodyMode.STREAMED, stream=True, resizable=True)
    assert renaming.chunk(b'data: {"text":"x"}\n\n', False) == [CONTINUE[Kind.RESPONSE_BODY]]


def test_what_is_held_comes_with_a_later_chunk(pb: ModuleType) -> None:
    renaming = Renaming("shown", BodyMode.STREAMED, stream=False, resizable=True)
    assert bodies(pb, renaming.chunk(BODY[:12], False)) == [BODY[:9]]
    assert bodies(pb, renaming.chunk(BODY[12:], False)) == [BODY[9:].replace(b"target", b"shown")]
    assert renaming.tail() == []


def test_full_duplex_gives_everything_back(pb: ModuleType) -> None:
    renaming = Renaming("shown", BodyMode.FULL_DUPLEX, stream=False, resizable=False)
    renaming.headers({"content-type": "audio/wav"})
    assert bodies(pb, renaming.chunk(BODY, False)) == [BODY]
    renaming = Renaming("shown", BodyMode.FULL_DUPLEX, stream=False, resizable=False)
    renaming.headers(JSON)
    assert bodies(pb, renaming.chunk(BODY[:12], False) + renaming.tail()) == [BODY[:9], BODY[9:12]]
