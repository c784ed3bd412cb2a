"""A name service that does not answer stops nothing else."""

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from fairlead.pool import lookups
from fairlead.pool.lookups import run


class Silent:
    """A name service that answers only once it may."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.may_answer = threading.Event()

    def __call__(self, host: str, port: int, *further: int) -> Any:
        self.asked.append(host)
        assert self.may_answer.wait(60.0)
        if host == "unknown":
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", port))]


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Silent]:
    service = Silent()
    monkeypatch.setattr(socket, "getaddrinfo", service)
    yield service
    service.may_answer.set()


async def given_up(host: str) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(0.01):
            await asyncio.get_running_loop().getaddrinfo(host, 80)


def test_the_end_does_not_wait_for_an_answer(silent: Silent) -> None:
    """The answer to a loop that is closed is dropped."""
    run(given_up("a"))
    assert silent.asked == ["a"] and not silent.may_answer.is_set()
    (thread,) = [each for each in threading.enumerate() if each.name == "name lookup"]
    silent.may_answer.set()
    thread.join()


def test_other_threads_are_left_for_other_work(silent: Silent) -> None:
    async def work() -> int:
        await asyncio.gather(*(given_up(f"host-{number}") for number in range(40)))
        return await asyncio.to_thread(os.getpid)

    assert run(work()) == os.getpid()


def test_who_asks_the_same_shares_the_answer(silent: Silent) -> None:
    async def work() -> list[Any]:
        loop = asyncio.get_running_loop()
        for _ in range(3):
            await given_up("a")
        asking = [asyncio.create_task(loop.getaddrinfo(host, 80)) for host in ("a", "a", "unknown")]
        await asyncio.sleep(0)
        silent.may_answer.set()
        return await asyncio.gather(*asking, return_exceptions=True)

    first, second, unknown = run(work())
    assert first == second and first[0][4] == ("10.0.0.1", 80)
    assert isinstance(unknown, socket.gaierror)
    assert sorted(silent.asked) == ["a", "unknown"]


async def answered() -> None:
    """Wait until no lookup runs, and what has come is there."""
    while any(each.name == "name lookup" for each in threading.enumerate()):
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)


def test_an_answer_after_all_have_given_up_is_for_who_asks_next(silent: Silent) -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        await given_up("a")
        silent.may_answer.set()
        await answered()
        assert (await loop.getaddrinfo("a", 80))[0][4] == ("10.0.0.1", 80)
        assert silent.asked == ["a"]
        await loop.getaddrinfo("a", 80)
        assert silent.asked == ["a", "a"], "an answer that was taken is not taken again"

    run(work())


@pytest.mark.parametrize(("host", "kept_s"), [("unknown", 30.0), ("a", 0.0)])
def test_a_late_error_is_not_kept_and_a_late_answer_not_for_long(
    silent: Silent, monkeypatch: pytest.MonkeyPatch, host: str, kept_s: float
) -> None:
    async def work() -> None:
        await given_up(host)
        silent.may_answer.set()
        await answered()
        with suppress(OSError):
            await asyncio.get_running_loop().getaddrinfo(host, 80)
        assert silent.asked == [host, host]

    monkeypatch.setattr(lookups, "KEPT_S", kept_s)
    run(work())


def test_too_many_threads_are_an_error_of_the_name(silent: Silent, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def work() -> None:
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", start)
            with pytest.raises(OSError, match="cannot resolve a: can't start new thread"):
                await asyncio.get_running_loop().getaddrinfo("a", 80)

    run(work())
