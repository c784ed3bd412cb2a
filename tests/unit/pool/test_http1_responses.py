from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.pool.http1 import MAX_HEAD, MalformedMessage, ResponseReader

CAPTURED = (Path(__file__).parents[2] / "data/bench/chat_stream_usage.http").read_bytes()
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def read(data: bytes, step: int = 1 << 20) -> tuple[ResponseReader, bytes, bool]:
    pieces: list[bytes] = []
    reader = ResponseReader(pieces.append)
    complete = False
    for start in range(0, len(data), step):
        assert not complete, "complete before the last byte"
        # A buffer that is used again for the next bytes.
        buffer = bytearray(data[start : start + step])
        complete = reader.feed(memoryview(buffer))
        buffer[:] = bytes(len(buffer))
    return reader, b"".join(pieces), complete


@pytest.mark.parametrize("step", [1, 2, 3, 7, 64, 1 << 20])
def test_captured_stream_reads_the_same_in_any_pieces(step: int) -> None:
    reader, body, complete = read(CAPTURED, step)
    assert complete
    assert reader.status == 200
    assert reader.chunks == 8
    assert body.startswith(b'data: {"id":"chatcmpl-b5466b4bf4f9cd83"')
    assert body.endswith(b"data: [DONE]\n\n")
    assert reader.body_bytes == len(body)
    assert not reader.keep_alive
    assert not reader.excess


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_content_length(step: int) -> None:
    reader, body, complete = read(b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nhello", step)
    assert (reader.status, body, complete, reader.keep_alive, reader.chunks) == (404, b"hello", True, True, 0)


def test_interim_responses_are_read_over() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nlink: x\r\n\r\n"
    data = interim + b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    for step in (1, 1000):
        reader, body, complete = read(data, step)
        assert (reader.status, body, complete) == (200, b"", True)


@pytest.mark.parametrize("trailers", [b"", b"x-one: 1\r\n", b"x-one: 1\r\nx-two: 2\r\n"])
@pytest.mark.parametrize("step", [1, 4, 1000])
def test_trailers_and_chunk_extensions(trailers: bytes, step: int) -> None:
    reader, body, complete = read(CHUNKED + b"4;name=x\r\nabcd\r\n0\r\n" + trailers + b"\r\n", step)
    assert (body, complete, reader.excess) == (b"abcd", True, False)


@pytest.mark.parametrize("more", [b"HTTP/1.1", b"HTTP/1.1 200 OK\r\n\r\nx", b"x", b"\0"])
@pytest.mark.parametrize("connection", [b"", b"connection: close\r\n"])
def test_bytes_behind_the_message_are_noticed(more: bytes, connection: bytes) -> None:
    reader, body, complete = read(b"HTTP/1.1 200 OK\r\n" + connection + b"content-length: 2\r\n\r\nok" + more)
    assert (body, complete, reader.excess, reader.body_bytes) == (b"ok", True, True, 2)


@pytest.mark.parametrize(
    ("data", "missing"),
    [
        (b"", "closed_before_response"),
        (b"HTTP/1.1 2", "closed_in_headers"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort", "short_body"),
        (CHUNKED, "chunked_unterminated"),
        (CHUNKED + b"5\r\nhel", "chunked_unterminated"),
        (CHUNKED + b"5\r\nhello\r\n", "chunked_unterminated"),
        (CHUNKED + b"5\r\nhello\r\n0\r\n", "chunked_unterminated"),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", ""),
    ],
)
def test_end_of_input_names_what_is_missing(data: bytes, missing: str) -> None:
    reader, _, complete = read(data, 3)
    assert not complete
    assert reader.end_of_input() == missing


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1_0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        CHUNKED + b"0x5\r\nhello\r\n",
        CHUNKED + b"-5\r\n",
        CHUNKED + b"1_0\r\n",
        CHUNKED + b"\r\n",
        CHUNKED + b"5\r\nhelloXX",
        CHUNKED + b"5\r\nhello\rX",
        CHUNKED + b"fffffffffffffffff\r\n",
        CHUNKED + b"5" * 5000,
    ],
)
@pytest.mark.parametrize("step", [1 << 20, 1000, 1])
def test_malformed_bytes_are_refused(data: bytes, step: int) -> None:
    with pytest.raises(MalformedMessage):
        read(data, step)


@pytest.mark.parametrize("start", [b"HTTP/1.1 200 OK\r\nx: ", CHUNKED + b"0\r\nx: "])
def test_endless_heads_and_trailers_are_refused(start: bytes) -> None:
    with pytest.raises(MalformedMessage):
        read(start + b"a" * (MAX_HEAD + 5000), 5000)


def test_no_content_ends_with_the_head() -> None:
    reader, _, complete = read(b"HTTP/1.1 204 No Content\r\n\r\n")
    assert complete
    assert reader.keep_alive


def test_reset_forgets_everything() -> None:
    reader, _, _ = read(CHUNKED + b"5\r\nhe")
    pieces: list[bytes] = []
    reader.reset(lambda piece: pieces.append(bytes(piece)))
    assert reader.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
    assert pieces == [b"ok"]


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=12), st.lists(st.integers(0, 4000), max_size=20))
def test_any_chunks_cut_anywhere_come_out_whole(parts: list[bytes], cuts: list[int]) -> None:
    data = CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    edges = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    pieces: list[bytes] = []
    reader = ResponseReader(pieces.append)
    ended = [reader.feed(data[a:b]) for a, b in pairwise(edges)]
    assert ended == [False] * (len(edges) - 2) + [True]
    assert b"".join(pieces) == b"".join(parts)
    assert (reader.chunks, reader.excess) == (len(parts), False)


@given(st.binary(max_size=400), st.sampled_from([b"", CHUNKED, b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n"]))
def test_garbage_is_refused_or_waited_out(garbage: bytes, start: bytes) -> None:
    reader = ResponseReader()
    try:
        complete = reader.feed(start + garbage)
    except MalformedMessage:
        return
    assert complete or isinstance(reader.end_of_input(), str)
