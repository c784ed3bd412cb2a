"""The request parser: any cut gives the same requests, and no bytes do harm."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.pool.http1 import HttpError, RequestParser

_STREAM = (
    b"\r\nGET /a?x=1 HTTP/1.1\r\nHost: h\r\nX-A: 1\r\nx-a: 2\r\n\r\n"
    b"POST /b HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello"
    b"POST /c HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3;ext=1\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: x\r\n\r\n"
    b"POST http://host/d HTTP/1.0\r\nconnection: keep-alive\r\ncontent-length: 0\r\n\r\n"
    b"DELETE /e#f HTTP/1.1\r\nconnection: close\r\n\r\n"
)


def _all(parser: RequestParser, pieces: list[bytes]) -> list[tuple[str, str, bytes, bool, bool]]:
    found = []
    for piece in pieces:
        parser.feed(piece)
        while (request := parser.next()) is not None:
            found.append((request.method, request.path, request.body, request.keep_alive, request.version11))
    return found


@settings(deadline=None)
@given(st.lists(st.integers(0, len(_STREAM)), max_size=12))
def test_any_cut_gives_the_same_requests(cuts):
    edges = [0, *sorted(cuts), len(_STREAM)]
    pieces = [_STREAM[a:b] for a, b in pairwise(edges)]
    parser = RequestParser()
    assert _all(parser, pieces) == [
        ("GET", "/a", b"", True, True),
        ("POST", "/b", b"hello", True, True),
        ("POST", "/c", b"abcde", True, True),
        ("POST", "/d", b"", True, False),
        ("DELETE", "/e", b"", False, True),
    ]
    assert parser.buffered == 0
    assert parser.idle


def test_repeated_headers_are_joined_and_names_are_lower_case():
    parser = RequestParser()
    parser.feed(_STREAM)
    request = parser.next()
    assert request is not None
    assert request.headers == {"host": "h", "x-a": "1, 2"}


@settings(deadline=None)
@given(st.binary(max_size=400), st.binary(max_size=400))
def test_no_bytes_do_harm(first, second):
    parser = RequestParser(max_head=200, max_body=300)
    refusals = []
    for piece in (first, second):
        parser.feed(piece)
        try:
            while parser.next() is not None:
                pass
        except HttpError as error:
            refusals.append(error.status)
    assert refusals in ([], [400], [413], [431])
    assert parser.buffered <= len(first) + len(second)


@settings(deadline=None)
@given(st.sampled_from([b"POST /x HTTP/1.1\r\n", b"GET / HTTP/1.1\r\n"]), st.text("abc:-, \r\n\t1", max_size=60))
def test_no_header_block_does_harm(line, headers):
    parser = RequestParser(max_head=200, max_body=300)
    parser.feed(line + headers.encode() + b"\r\n\r\n")
    status = 0
    try:
        parser.next()
    except HttpError as error:
        status = error.status
    assert status in (0, 400)


@pytest.mark.parametrize("step", [1, 50])
@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"get / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n\r\n", 400),
        (b"GET * HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n folded: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\na: b\nc: d\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: +5\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: -5\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: 1_0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: \xb2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: 5, 6\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: 301\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: identity\r\n\r\n", 400),
        (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0x5\r\n", 400),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n", 400),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nabc\r\n", 400),
        (
            b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n100\r\n" + b"x" * 256 + b"\r\n100\r\n" + b"x" * 256,
            413,
        ),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + b"0" * 5000, 400),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n" + b"t: xxxxxxxxxxxxxxxxx\r\n" * 50, 431),
        (b"GET / HTTP/1.1\r\nx: " + b"x" * 300 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nx: " + b"x" * 300, 431),
    ],
)
def test_what_two_readers_could_read_differently_is_refused(raw, status, step):
    parser = RequestParser(max_head=200, max_body=300)
    for start in range(0, len(raw), step):
        parser.feed(raw[start : start + step])
    with pytest.raises(HttpError) as caught:
        parser.next()
    assert caught.value.status == status
    parser.feed(b"GET / HTTP/1.1\r\n\r\n")
    assert parser.next() is None  # nobody knows where the next request begins


def test_lengths_may_not_be_repeated():
    parser = RequestParser()
    parser.feed(b"POST / HTTP/1.1\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\nok")
    with pytest.raises(HttpError, match="Invalid HTTP request"):
        parser.next()


def test_requests_before_a_broken_one_are_served_first():
    parser = RequestParser()
    parser.feed(b"GET /a HTTP/1.1\r\n\r\nGET /b HTTP/1.1\r\n\r\nnonsense\r\n\r\n")
    assert [request.path for request in (parser.next(), parser.next()) if request is not None] == ["/a", "/b"]
    with pytest.raises(HttpError):
        parser.next()
    assert parser.next() is None


def test_nobody_changes_protocols():
    """A request that asks for it is answered as it is (RFC 9110, 7.8), and others may follow."""
    parser = RequestParser()
    parser.feed(b"GET /a HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\nGET /b HTTP/1.1\r\n\r\n")
    assert [request.path for request in (parser.next(), parser.next()) if request is not None] == ["/a", "/b"]


def test_a_head_is_known_before_its_body():
    parser = RequestParser()
    parser.feed(b"POST /a HTTP/1.1\r\nx: \xe9\r\ncontent-length: 2\r\n\r\no")
    assert parser.next() is None and not parser.idle
    assert parser.current is not None and parser.current.headers["x"] == "é"
    whole = parser.current
    parser.feed(b"k")
    assert parser.current is None and parser.next() is whole and whole.body == b"ok"


def test_a_client_that_waits_for_100_continue_is_noticed():
    parser = RequestParser()
    parser.feed(b"POST / HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
    assert parser.next() is None
    assert parser.wants_continue
    parser.feed(b"ok")
    assert parser.next() is not None
    assert not parser.wants_continue
