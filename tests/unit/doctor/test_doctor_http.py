"""The client of all checks: bounded, patient in turn, and exact about what went wrong."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from fairlead.config.schema import Metrics
from fairlead.doctor import http
from fairlead.doctor.http import Answer, Client, Unreached, connects, speaks_http2, speaks_tls

Start = Callable[..., Awaitable[int]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"


@pytest.mark.parametrize(
    ("answer", "trouble", "reason"),
    [
        (b"\xff\0\0\0\0\0\0\0\1\x7f", "not-http", ""),
        (b"", "not-http", ""),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}", "other", ""),
    ],
)
async def test_what_is_no_answer_is_told_apart(server: Start, answer: bytes, trouble: str, reason: str) -> None:
    port = await server(answer)
    async with Client(Metrics()) as client:
        with pytest.raises(Unreached) as raised:
            await client.get(f"http://127.0.0.1:{port}/")
    assert raised.value.trouble == trouble
    assert str(raised.value)


async def test_silence_and_refusal_are_told_apart(server: Start) -> None:
    port = await server(OK, 0.2)
    async with Client(Metrics()) as client:
        with pytest.raises(Unreached, match=r"no answer within 0\.05 s") as raised:
            await client.get(f"http://127.0.0.1:{port}/", seconds=0.05)
        assert raised.value.trouble == "silent"
        with pytest.raises(Unreached, match="Connection refused") as raised:
            await client.get("http://127.0.0.1:1/")
        assert raised.value.trouble == "refused"
        with pytest.raises(Unreached, match="Connection refused"):
            await client.get("https://127.0.0.1:1/")


async def test_a_page_without_end_is_given_up(server: Start) -> None:
    port = await server(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + b"x" * 5000)
    async with Client(Metrics(), most_bytes=1000) as client:
        with pytest.raises(Unreached, match="more than 1000 bytes"):
            await client.get(f"http://127.0.0.1:{port}/")


async def test_who_waits_for_its_turn_is_not_late(server: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "AT_ONCE", 1)
    port = await server(OK, 0.3)
    async with Client(Metrics()) as client:
        url = f"http://127.0.0.1:{port}/"
        answers = await asyncio.gather(*(client.get(url, seconds=0.8) for _ in range(4)))
    assert [answer.status for answer in answers] == [200] * 4


async def test_a_token_that_cannot_be_read_is_told() -> None:
    async with Client(Metrics(token_file="/nonexistent/token")) as client:
        with pytest.raises(Unreached, match="cannot read /nonexistent/token: No such file"):
            await client.scrape("http://127.0.0.1:1/metrics")


async def test_ports_are_tried(server: Start) -> None:
    port = await server(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    assert await connects("127.0.0.1", port) == ""
    assert "refused" in await connects("127.0.0.1", 1)
    assert not await speaks_tls("127.0.0.1", port)
    assert not await speaks_http2("127.0.0.1", port) and not await speaks_http2("127.0.0.1", 1)


def test_json_that_is_nested_too_deeply_is_no_json() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        Answer(200, {}, b"[" * 100_000, 0.0, 0.0).json()


def skew(date: str, sent: float, came: float) -> float:
    return Answer(200, {"date": date} if date else {}, b"", sent, came).skew()


def test_skew_is_only_what_whole_seconds_and_the_exchange_do_not_explain() -> None:
    noon = 1_700_049_600.0
    date = "Wed, 15 Nov 2023 12:00:00 GMT"
    assert skew(date, noon + 0.2, noon + 0.9) == 0.0
    assert skew(date, noon - 3.0, noon + 5.0) == 0.0
    assert skew(date, noon - 31.0, noon - 30.0) == 30.0
    assert skew(date, noon + 31.0, noon + 32.0) == -30.0
    assert skew("yesterday", noon, noon) == skew("", noon, noon) == 0.0
