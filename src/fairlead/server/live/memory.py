"""How this process manages its memory, and how late its event loop is."""

import asyncio
import contextlib
import ctypes
import gc
from collections.abc import Callable

#: mallopt(3)
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def settle_memory() -> None:
    """Tune the cycle collector. What exists now lives to the end, so the collector need not walk it; what is made later
    is freed by reference count, so the collector need not run over it often. Its pauses land in the middle of
    decisions, so the youngest generation must be small: 50,000 objects take 7 to 9 ms, 5,000 take 0.5 ms, and the total
    cost is the same (bench/flow.py, where 10,000 requests queue up). Older generations are collected as rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 50, 400)


def keep_heap() -> None:
    """Make glibc keep freed memory. By default it returns the pages of every large body and faults them in again: 0.51
    ms instead of 0.09 ms to read a body of 500 KB (bench/transport.py). Other C libraries are left alone."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option, value in ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 256 << 20), (_M_TOP_PAD, 16 << 20)):
            mallopt(option, value)


class _Mallinfo(ctypes.Structure):
    """mallinfo2(3), glibc 2.33."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    )]  # fmt: skip


class HeapTrim:
    """Returns to the system what glibc keeps of freed memory (`keep_heap`) once it has been unused for a while: after
    an attack or a burst of large bodies the process shrinks to its former size. Needs glibc's mallinfo2."""

    MOST = 24 << 20

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float = 10.0) -> None:
        self._loop = loop
        self._interval = interval_s
        #: Free bytes: the fewest since the last trim, and at the last check.
        self._least = self._last = 0
        #: Times that memory was given back.
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


# How late the event loop fires its timers: shows whether something blocks the loop.


class LoopLag:
    """Calls `observe(seconds late)` each `interval_s` until closed."""

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
