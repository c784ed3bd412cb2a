"""Addresses as people write them, and servers that do not answer as they should."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import pytest

from fairlead.core.errors import ConfigError
from fairlead.lab.load.probe import NoAnswer, ask_models, normal_target
from fairlead.lab.load.tune import ask_facts


@contextmanager
def answering(reply: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that answers one connection with `reply` and refuses others; yields its address and what it was sent."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            server.close()
            with connection:
                heard.append(connection.recv(65536))
                connection.sendall(reply)

        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        thread = Thread(target=serve)
        thread.start()
        yield address, heard
        thread.join()


def http(status: str, body: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status.encode(), len(body), body)


@pytest.mark.parametrize("text", ["http://h:80", "h:80", "http://h:80/", "h:80/v1", "http://h:80/v1/"])
def test_addresses_are_completed(text: str) -> None:
    assert normal_target(text) == "http://h:80"


@pytest.mark.parametrize(
    "text", ["https://h", "ftp://h", "http://", "h/x", "h?x", "http://[::", "h:99999", "h:0", "u@h:1", "h:x"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="URL"):
        normal_target(text)


def test_names_of_models_are_read_and_headers_sent() -> None:
    with answering(http("200 OK", b'{"object":"list","data":[{"id":"a","x":1},{"id":"b"}]}')) as (target, heard):
        assert ask_models(target, {"authorization": "Bearer k"}) == (200, ["a", "b"])
    assert heard[0].startswith(b"GET /v1/models ")
    assert b"authorization: Bearer k\r\n" in heard[0]


@pytest.mark.parametrize(("length", "known"), [("4096", 4096), ('"4096"', 0), ("4096.5", 0), ("-1", 0), ("null", 0)])
def test_a_length_that_is_no_number_does_not_hide_the_model(length: str, known: int) -> None:
    page = http("200 OK", b'{"data":[{"id":"a","max_model_len":%b}]}' % length.encode())
    with answering(page) as (target, _):
        assert ask_models(target, {}) == (200, ["a"])
    with answering(page) as (target, _):
        facts = ask_facts(target, {})  # the other pages are missing
    assert (facts.model, facts.max_model_len) == ("a", known)


@pytest.mark.parametrize("body", [b"", b"not json", b'{"data":1}', b'{"data":[{"name":"a"}]}', b"\xff\xfe"])
def test_an_answer_that_is_no_list_of_models_names_none(body: bytes) -> None:
    with answering(http("200 OK", body)) as (target, _):
        assert ask_models(target, {}) == (200, [])


def test_another_status_is_an_answer_too() -> None:
    with answering(http("404 Not Found", b'{"data":[{"id":"a"}]}')) as (target, _):
        assert ask_models(target, {}) == (404, [])


def test_the_admin_port_is_no_target() -> None:
    reply = http("404 Not Found", b"this is Fairlead's admin port: it has no /v1/models")
    with answering(reply) as (target, _), pytest.raises(NoAnswer, match="Point it at the gateway"):
        ask_models(target, {})


@pytest.mark.parametrize("reply", [b"", b"\x00\x00\x1b[2Jhello\r\n\r\n", b"HTTP/1.1 2"])
def test_what_speaks_no_http_does_not_answer(reply: bytes) -> None:
    with answering(reply) as (target, _), pytest.raises(NoAnswer, match="does not answer") as raised:
        ask_models(target, {})
    assert all(letter.isprintable() or letter == "\n" for letter in str(raised.value))


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(NoAnswer, match="check that the server runs"):
        ask_models(f"http://127.0.0.1:{port}", {})


def test_a_header_that_cannot_be_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match="header"):
            ask_models(target, {"a": "b\r\nc: d"})
