"""What asyncio reports without file descriptors is one line, and other errors are reported as ever."""

import asyncio
import errno
import socket

import pytest

from fairlead.server.live.memory import LoopErrors


async def test_attempts_to_accept_without_descriptors_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    loop, errors = asyncio.get_running_loop(), LoopErrors()
    with socket.socket() as listening:
        short = OSError(errno.EMFILE, "Too many open files")
        for _ in range(1000):
            errors(loop, {"message": "socket.accept() out of system resource", "exception": short, "socket": listening})
    closed = ValueError("Invalid file descriptor: -1")
    errors(loop, {"message": "Exception in callback BaseSelectorEventLoop._start_serving(...)", "exception": closed})
    (record,) = caplog.records
    assert (record.getMessage(), record.exc_info) == ("new connections have to wait", None)


async def test_other_errors_keep_their_tracebacks(caplog: pytest.LogCaptureFixture) -> None:
    loop, errors = asyncio.get_running_loop(), LoopErrors()
    for error in (OSError(errno.EMFILE, "Too many open files"), ValueError("no")):
        errors(loop, {"message": "Exception in callback f()", "exception": error})
    errors(loop, {"message": "a future was lost"})
    assert [record.name for record in caplog.records] == ["asyncio"] * 3
