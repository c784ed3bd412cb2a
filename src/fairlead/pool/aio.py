"""What several parts with tasks and HTTP connections of their own do alike."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # who supervises other processes imports as little as it can
    from aiohttp import StreamReader


async def cancelled(*tasks: "asyncio.Future[Any] | None") -> None:
    """Cancel these and wait until they have ended, however. `None` = it was never begun."""
    begun = [task for task in tasks if task is not None]
    for task in begun:
        task.cancel()
    await asyncio.gather(*begun, return_exceptions=True)


async def until_set(event: asyncio.Event, work: Coroutine[Any, Any, object]) -> None:
    """Do this work, but only until the event is set: then cancel it."""
    task, cut = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait((task, cut), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        await cancelled(task, cut)


async def set_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait until the event is set, for so many seconds at most (`None` = as long as it takes). Return whether it is.

    Not `wait_for`: until Python 3.12 it loses a cancellation that arrives together with the result.
    """
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def call_consumer(call: Callable[[], object], what: str) -> None:
    """Call it. If it raises, report that `what` did, and go on."""
    try:
        call()
    except Exception as error:
        context = {"message": f"{what} raised", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)


async def read_at_most(body: "StreamReader", most: int, error: Exception) -> bytes:
    """All of it. Raises `error` as soon as there are more than `most` bytes."""
    received = bytearray()
    async for part in body.iter_any():
        received += part
        if len(received) > most:
            raise error
    return bytes(received)
