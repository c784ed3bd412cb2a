"""Helpers for asyncio tasks, threads, events, callbacks and HTTP bodies."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # the supervising parent process imports this module and must stay small
    from aiohttp import StreamReader

T = TypeVar("T")

#: Calls that `Turns` makes in one turn. An endpoint that joins or leaves takes the scheduler 0.1 to 0.3 ms.
IN_ONE_TURN = 16


async def cancelled(*tasks: "asyncio.Future[Any] | None") -> None:
    """Cancel tasks and wait until they have ended; their results and exceptions are ignored. `None` = never begun."""
    begun = [task for task in tasks if task is not None]
    for task in begun:
        task.cancel()
    await asyncio.gather(*begun, return_exceptions=True)


def in_own_thread(work: Callable[[], T], name: str) -> asyncio.Future[T | Exception]:
    """Do the work in a thread of its own, which nobody waits for when the process ends, as for those of
    `asyncio.to_thread`. The future's result is what `work` returns or raises. Raises `OSError` if no thread can be
    started."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T | Exception] = loop.create_future()

    def run() -> None:
        result: T | Exception
        try:
            result = work()
        except Exception as error:
            result = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(done.set_result, result)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        raise OSError(str(error)) from None
    return done


async def until_set(event: asyncio.Event, work: Coroutine[Any, Any, object]) -> None:
    """Run `work` until it ends or the event is set, which cancels it. Raises what `work` raises."""
    task, cut = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait((task, cut), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        await cancelled(task, cut)


async def set_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait until the event is set, for at most `seconds` (`None` = without limit). Return whether it is set.

    Not `wait_for`: until Python 3.12 it loses a cancellation that arrives together with the result.
    """
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def in_turns(items: Iterable[T]) -> list[T]:
    """Take all items, each in another turn of the event loop, so that making them delays nothing else."""
    taken = []
    for item in items:
        taken.append(item)
        await asyncio.sleep(0)
    return taken


def call_consumer(call: Callable[[], object], what: str) -> None:
    """Call a function. If it raises, report to the loop's exception handler that `what` raised, and continue."""
    try:
        call()
    except Exception as error:
        context = {"message": f"{what} raised", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)


class Turns:
    """Makes calls in their order, at most `IN_ONE_TURN` in one turn of the event loop, so that thousands delay nothing
    else. The first calls of a turn are made at once."""

    def __init__(self) -> None:
        self._left = IN_ONE_TURN
        self._waiting: deque[Callable[[], object]] = deque()
        self._next: asyncio.Handle | None = None

    def make(self, call: Callable[[], object]) -> None:
        """Make the call, now or after those before it. It must not raise."""
        self._waiting.append(call)
        if self._next is None:
            self._go_on()
        else:
            self._make_waiting()

    async def made(self) -> None:
        """Wait until all calls so far were made."""
        while self._waiting:
            await asyncio.sleep(0)

    def close(self) -> None:
        """Drop the calls that were not made yet."""
        self._waiting.clear()
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _go_on(self) -> None:
        """Begin a turn."""
        self._left, self._next = IN_ONE_TURN, None
        if self._waiting:
            self._next = asyncio.get_running_loop().call_soon(self._go_on)
            self._make_waiting()

    def _make_waiting(self) -> None:
        while self._waiting and self._left:
            self._left -= 1
            self._waiting.popleft()()


async def read_at_most(body: "StreamReader", most: int, error: Exception) -> bytes:
    """Read a whole body. Raises `error` as soon as there are more than `most` bytes."""
    received = bytearray()
    async for part in body.iter_any():
        received += part
        if len(received) > most:
            raise error
    return bytes(received)
