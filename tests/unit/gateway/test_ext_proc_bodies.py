"""Answers that change bodies, read by generated classes. That Envoy takes them is in tests/integration/pitfalls."""

from types import ModuleType

import pytest

from fairlead.gateway import ext_proc
from fairlead.gateway import ext_proc as bodies
from fairlead.gateway.ext_proc import BodyMode, Kind

PICK = ext_proc.set_header("x-where", b"there")
METADATA = ext_proc.lb_metadata({"x-where": b"there"})
CONTINUE, CONTINUE_AND_REPLACE = 0, 1
BUFFERING = [BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL]


def read(pb: ModuleType, messages: list[bytes]) -> list[object]:
    return [pb.ProcessingResponse.FromString(message) for message in messages]


def lines(mutation: object) -> dict[str, bytes]:
    return {option.header.key: option.header.raw_value for option in mutation.set_headers}  # type: ignore[attr-defined]


def picked(answer: object) -> None:
    assert answer.dynamic_metadata["envoy.lb"]["x-where"] == "there"  # type: ignore[attr-defined]


def test_one_message_replaces_a_whole_request_that_was_sent_ahead(pb):
    (answer,) = read(pb, bodies.rewrite_request((BodyMode.STREAMED, BodyMode.NONE, True), b"new", PICK, METADATA))
    common = answer.request_headers.response
    assert common.status == CONTINUE_AND_REPLACE
    assert common.body_mutation.body == b"new"
    assert lines(common.header_mutation) == {"x-where": b"there"}
    assert common.clear_route_cache
    picked(answer)


@pytest.mark.parametrize("mode", BUFFERING)
def test_a_buffered_body_leaves_with_its_length_in_one_answer(pb, mode):
    (answer,) = read(pb, bodies.rewrite_request((mode, BodyMode.NONE, False), b"new", PICK, METADATA))
    common = answer.request_body.response
    assert common.status == CONTINUE
    assert common.body_mutation.body == b"new"
    assert lines(common.header_mutation) == {"x-where": b"there", "content-length": b"3"}
    assert common.clear_route_cache
    picked(answer)


@pytest.mark.parametrize("size", [0, 1, ext_proc.MAX_CHUNK, ext_proc.MAX_CHUNK + 1, 200_000])
@pytest.mark.parametrize("trailers", [False, True])
def test_full_duplex_gets_its_length_and_then_all_bytes(pb, size, trailers):
    modes = BodyMode.FULL_DUPLEX, BodyMode.FULL_DUPLEX, False
    head, *rest = read(pb, bodies.rewrite_request(modes, bytes(size), PICK, METADATA, trailers))
    common = head.request_headers.response
    assert common.status == CONTINUE
    assert lines(common.header_mutation) == {"x-where": b"there", "content-length": b"%d" % size}
    picked(head)
    if trailers:
        assert rest.pop().WhichOneof("response") == "request_trailers"
    pieces = [answer.request_body.response.body_mutation.streamed_response for answer in rest]
    assert b"".join(piece.body for piece in pieces) == bytes(size)
    assert all(len(piece.body) <= ext_proc.MAX_CHUNK for piece in pieces)
    assert [piece.end_of_stream for piece in pieces] == [False] * (len(pieces) - 1) + [not trailers]


def test_where_a_request_can_not_be_changed():
    full = BodyMode.FULL_DUPLEX, BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL
    for mode in BodyMode:
        for eager in (False, True):
            modes = mode, BodyMode.NONE, eager
            possible = mode in full or (mode is BodyMode.STREAMED and eager)
            if not possible:
                with pytest.raises(ValueError, match=mode.name):
                    bodies.rewrite_request(modes, b"new")


def test_a_response_may_be_replaced_at_its_headers(pb):
    (answer,) = read(pb, [bodies.answer(Kind.RESPONSE_HEADERS, body=b"")])
    common = answer.response_headers.response
    assert common.status == CONTINUE_AND_REPLACE
    assert common.body_mutation.WhichOneof("mutation") == "body"
    assert not common.clear_route_cache


def test_responses_lose_their_length_before_their_chunks_change(pb):
    (answer,) = read(pb, [bodies.resizable_response()])
    mutation = answer.response_headers.response.header_mutation
    assert list(mutation.remove_headers) == ["content-length"]


@pytest.mark.parametrize("chunk", [b"", b"x", bytes(100_000)])
@pytest.mark.parametrize("end_of_stream", [False, True])
@pytest.mark.parametrize("mode", [mode for mode in BodyMode if mode is not BodyMode.NONE])
def test_a_chunk_is_answered_with_other_bytes(pb, mode, chunk, end_of_stream):
    answers = read(pb, bodies.rewrite_chunk(mode, chunk, end_of_stream))
    mutations = [answer.response_body.response.body_mutation for answer in answers]
    if mode is BodyMode.FULL_DUPLEX:
        pieces = [mutation.streamed_response for mutation in mutations]
        assert b"".join(piece.body for piece in pieces) == chunk
        assert [piece.end_of_stream for piece in pieces] == [False] * (len(pieces) - 1) + [end_of_stream]
    else:
        (mutation,) = mutations
        assert mutation.WhichOneof("mutation") == "body", "an empty chunk is one too"
        assert mutation.body == chunk
