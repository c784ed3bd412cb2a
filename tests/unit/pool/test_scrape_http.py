"""The client for metrics pages, fed with bytes in every way of cutting them."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.pool.scrape import page_address
from fairlead.pool.scrape_http import PageConnection

OK = b"HTTP/1.1 200 OK\r\n"


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


class Asked:
    """A connection with one request under way, and what came of it."""

    def __init__(self, max_page: int = 1000) -> None:
        self.results: list[tuple[str, Any]] = []
        self.connection = PageConnection(memoryview(bytearray(4096)), max_page)
        self.transport = FakeTransport()
        self.connection.connection_made(self.transport)
        self.ask()

    def ask(self) -> None:
        self.connection.get(b"GET", self)

    def on_page(self, page: bytes) -> None:
        self.results.append(("page", page))

    def on_failure(self, reason: str, *, retry: bool, answered: bool = False) -> None:
        self.results.append(("retry" if retry else "answered" if answered else "failure", reason))

    def receive(self, data: bytes) -> "Asked":
        while data and not self.transport.closed:
            buffer = self.connection.get_buffer(-1)
            assert len(buffer) > 0
            size = min(len(buffer), len(data))
            buffer[:size] = data[:size]
            data = data[size:]
            self.connection.buffer_updated(size)
        return self

    def end(self) -> "Asked":
        if not self.transport.closed:
            self.connection.eof_received()
        self.connection.connection_lost(None)
        return self

    @property
    def result(self) -> tuple[str, Any]:
        assert len(self.results) == 1
        return self.results[0]


def with_length(body: bytes, extra: bytes = b"") -> bytes:
    return OK + extra + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chunked(pieces: list[bytes], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    framed = b"".join(b"%X%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in pieces if piece)
    return OK + b"transfer-encoding: chunked\r\n\r\n" + framed + b"0\r\n" + trailer + b"\r\n"


def test_a_page_with_a_length_keeps_the_connection() -> None:
    asked = Asked().receive(with_length(b"hello"))
    assert asked.result == ("page", b"hello")
    assert asked.connection.open
    asked.ask()
    asked.receive(with_length(b""))
    assert asked.results == [("page", b"hello"), ("page", b"")]


@pytest.mark.parametrize("cut", [1, 20, len(OK), 10_000])
def test_a_head_that_has_come_before_is_believed_only_if_all_of_it_is_there(cut: int) -> None:
    asked = Asked()
    answers = [with_length(b"hello"), with_length(b"world"), with_length(b"four"), with_length(b"again")]
    answers += [chunked([b"chunks"]), with_length(b"hello"), with_length(b"hello, world")]
    for answer in answers:
        for at in range(0, len(answer), cut):
            asked.receive(answer[at : at + cut])
        asked.ask()
    told = [b"hello", b"world", b"four", b"again", b"chunks", b"hello", b"hello, world"]
    assert asked.results == [("page", page) for page in told]


def test_only_real_answers_after_interim_ones_count() -> None:
    interim = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" * 500
    assert Asked().receive(interim + with_length(b"hello")).result == ("page", b"hello")


def test_connection_close_and_old_http_close() -> None:
    for answer in (
        with_length(b"hello", b"Connection: Close\r\n"),
        with_length(b"hello").replace(b"HTTP/1.1", b"HTTP/1.0"),
    ):
        asked = Asked().receive(answer)
        assert asked.result == ("page", b"hello")
        assert not asked.connection.open


def test_a_body_may_end_with_the_connection() -> None:
    asked = Asked().receive(OK + b"\r\nhel").receive(b"lo")
    assert asked.results == []
    assert asked.end().result == ("page", b"hello")


@pytest.mark.parametrize("answer", [with_length(b"hello"), chunked([b"hel", b"lo"])], ids=["length", "chunks"])
def test_an_answer_that_breaks_off_is_a_failure(answer: bytes) -> None:
    for end in range(len(answer)):
        kind, reason = Asked().receive(answer[:end]).end().result
        assert (kind, reason) == ("failure", "connection closed before the page was complete")


def test_a_kept_connection_that_is_gone_asks_for_a_retry() -> None:
    asked = Asked().receive(with_length(b"hello"))
    asked.ask()
    asked.end()
    assert asked.results[1][0] == "retry"
    began = Asked().receive(with_length(b"hello"))
    began.ask()
    began.receive(b"H").end()
    assert began.results[1][0] == "failure"


def test_bytes_that_nobody_asked_for_close_the_connection() -> None:
    asked = Asked().receive(with_length(b"hello"))
    asked.receive(b"HTTP/1.1 408 Timeout\r\n\r\n")
    assert asked.results == [("page", b"hello")]
    assert not asked.connection.open
    excess = Asked().receive(with_length(b"hello") + b"HTTP/1.1")
    assert excess.result == ("page", b"hello")
    assert not excess.connection.open


def test_other_statuses_fail_but_keep_the_connection() -> None:
    asked = Asked().receive(with_length(b"busy").replace(b"200 OK", b"503 Unavailable"))
    assert asked.result == ("failure", "status 503")
    assert asked.connection.open
    redirect = b"HTTP/1.1 302 Found\r\nlocation: http://elsewhere/\r\ncontent-length: 0\r\n\r\n"
    assert Asked().receive(redirect).result == ("answered", "status 302")
    assert Asked().receive(b"HTTP/1.1 204 No Content\r\n\r\n").result == ("answered", "status 204")
    absent = with_length(b"").replace(b"200 OK", b"404 Not Found")
    assert Asked().receive(absent).result == ("answered", "status 404")
    assert b"\r\nAccept-Encoding: identity\r\n" in page_address("http://h:1/metrics").request
    compressed = with_length(b"hello", b"content-encoding: gzip\r\n")
    asked = Asked().receive(compressed)
    assert asked.result == ("answered", "the page is compressed, which was not asked for")
    assert not asked.connection.open


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/2 200\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        OK + b"no colon\r\n\r\n",
        OK + b"a b: c\r\n\r\n",
        OK + b"content-length: -1\r\n\r\n",
        OK + b"content-length: +5\r\n\r\nhello",
        OK + b"content-length: 9999999999999\r\n\r\n",
        OK + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        OK + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\nhello",
        OK + b"transfer-encoding: gzip, chunked\r\n\r\n",
        OK + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n",
        OK + b"transfer-encoding: chunked\r\n\r\nxyz\r\n",
        OK + b"transfer-encoding: chunked\r\n\r\n-5\r\n",
        OK + b"transfer-encoding: chunked\r\n\r\n\r\n",
        OK + b"transfer-encoding: chunked\r\n\r\n5\r\nhelloX\r\n",
        OK + b"transfer-encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n",
        OK + b"transfer-encoding: chunked\r\n\r\n" + b"0" * 25_000,
        OK + b"x: " + b"y" * 20_000,
    ],
)
def test_broken_answers(answer: bytes) -> None:
    asked = Asked().receive(answer)
    assert asked.result[0] == "failure"
    assert not asked.connection.open


@pytest.mark.parametrize(
    "answer",
    [
        with_length(b"x" * 1001),
        chunked([b"x" * 1001]),
        chunked([b"x"] * 1001),
        OK + b"\r\n" + b"x" * 200_000,
    ],
    ids=["length", "chunk", "chunks", "end"],
)
def test_too_large_a_page(answer: bytes) -> None:
    assert Asked(max_page=1000).receive(answer).result == ("failure", "the page is larger than 1000 bytes")


def test_large_pages_grow_the_buffer() -> None:
    body = bytes(range(256)) * 2000
    for answer in (with_length(body), chunked([body]), chunked([body[i : i + 7] for i in range(0, len(body), 7)])):
        assert Asked(max_page=len(body)).receive(answer).result == ("page", body)


def test_after_abort_nobody_is_told() -> None:
    asked = Asked()
    asked.connection.abort()
    asked.end()
    assert asked.results == []


@given(
    st.lists(st.binary(min_size=1, max_size=30), max_size=6),
    st.sampled_from([b"", b";a=b", b';a="b"']),
    st.sampled_from([b"", b"x-sum: 1\r\n"]),
    st.lists(st.integers(1, 40), min_size=1, max_size=40),
)
@settings(max_examples=200, deadline=None)
def test_chunks_however_they_arrive(pieces: list[bytes], extension: bytes, trailer: bytes, cuts: list[int]) -> None:
    answer = chunked(pieces, extension, trailer)
    asked = Asked()
    for i in range(len(answer)):
        step = cuts[i % len(cuts)]
        asked.receive(answer[:step])
        answer = answer[step:]
    assert asked.result == ("page", b"".join(pieces))
    assert asked.connection.open


@given(st.binary(max_size=300) | st.binary(max_size=200).map(lambda tail: OK + tail))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_answered_once(data: bytes) -> None:
    asked = Asked().receive(data).end()
    assert len(asked.results) == 1


def test_addresses() -> None:
    address = page_address("http://[::1]:8000/metrics?a=b c")
    assert (address.host, address.port) == ("::1", 8000)
    assert address.request.startswith(b"GET /metrics?a=b%20c HTTP/1.1\r\nHost: [::1]:8000\r\nUser-Agent: fairlead/")
    assert page_address("http://h").request.startswith(b"GET / HTTP/1.1\r\nHost: h:80\r\n")
    assert page_address("https://h/m").port == 443
    # Line breaks cannot get into the request.
    assert page_address("http://h/a\r\nX: y").request == page_address("http://h/aX:%20y").request


@pytest.mark.parametrize(
    "url", ["ftp://h/", "h:80/x", "http://", "http://u:p@h/", "http://h:99999/", "http://h:0/", "http://h:x/", ""]
)
def test_bad_addresses(url: str) -> None:
    with pytest.raises(ValueError):
        page_address(url)
