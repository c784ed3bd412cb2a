"""Tunes the memory management of this process, measures how late its event loop is, and logs the loop's errors."""

import asyncio
import contextlib
import ctypes
import errno
import gc
from collections.abc import Callable
from math import inf
from typing import Any

from fairlead.server.observe.log import get

#: mallopt(3)
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def settle_memory() -> None:
    """Tune the cycle collector. Objects that exist now live until the process ends, so the collector need not walk
    them. Most later objects are freed by reference count. The collector's pauses fall into decisions, so the youngest
    generation must be small: 50,000 objects take 7 to 9 ms, 5,000 take 0.5 ms, and the total cost is the same
    (bench/flow.py, with 10,000 queued requests). Older generations are collected rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 50, 400)


def keep_heap() -> None:
    """Make glibc keep freed memory. By default glibc returns the pages of every large body to the system and faults
    them in again. Then reading a body of 500 KB takes 0.51 ms instead of 0.09 ms (bench/transport.py). With other C
    libraries this does nothing."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option, value in ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 256 << 20), (_M_TOP_PAD, 16 << 20)):
            mallopt(option, value)


#: Errors of a process or system that has no file descriptor or memory left for a connection.
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class LoopErrors:
    """The exception handler of an event loop. asyncio logs a traceback for each attempt to accept a connection for
    which there is no descriptor, a thousand a second, and for each attempt that was still to come when its socket was
    closed. Here one line says it every `GAP_S` seconds."""

    GAP_S = 15.0

    def __init__(self) -> None:
        self._written_at = -inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _SHORT and "socket" in context:
            if loop.time() - self._written_at >= self.GAP_S:
                self._written_at = loop.time()
                get("serve").error("new connections have to wait", reason=error.strerror)
        elif not (isinstance(error, ValueError) and "._start_serving(" in str(context.get("message"))):
            loop.default_exception_handler(context)


class _Mallinfo(ctypes.Structure):
    """mallinfo2(3), glibc 2.33."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    )]  # fmt: skip


class HeapTrim:
    """Returns freed memory that glibc keeps (`keep_heap`) to the system once it has been unused for a while. So the
    process shrinks again after an attack or a burst of large bodies. Without glibc's mallinfo2 it does nothing."""

    #: Bytes that may stay free without being returned.
    MOST = 24 << 20

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float = 10.0) -> None:
        self._loop = loop
        self._interval = interval_s
        #: Bytes of the heap that are free: the fewest since the last trim, and at the last check.
        self._least = self._last = 0
        #: How many times memory was returned to the system.
        self.trims = 0
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL("libc.so.6")
            self._info, self._trim = ctypes.CFUNCTYPE(_Mallinfo)(("mallinfo2", libc)), libc.malloc_trim
            self._timer = loop.call_later(interval_s, self.look)

    def look(self) -> None:
        free = int(self._info().fordblks)
        self._least = min(self._least, free)
        if min(free, self._last) - self._least > self.MOST:
            self._trim(0)
            self.trims += 1
            self._least = free
        self._last = free
        self._timer = self._loop.call_later(self._interval, self.look)

    def close(self) -> None:
        with contextlib.suppress(AttributeError):
            self._timer.cancel()


class LoopLag:
    """Calls `observe` every `interval_s` until closed, with the seconds that the event loop fired this timer late. Long
    delays show that something blocks the loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, observe: Callable[[float], object], interval_s: float = 0.5
    ) -> None:
        self._loop = loop
        self._observe = observe
        self._interval = interval_s
        self._due = loop.time() + interval_s
        self._timer = loop.call_at(self._due, self._fired)

    def close(self) -> None:
        self._timer.cancel()

    def _fired(self) -> None:
        now = self._loop.time()
        self._observe(max(now - self._due, 0.0))
        self._due = now + self._interval
        self._timer = self._loop.call_at(self._due, self._fired)
