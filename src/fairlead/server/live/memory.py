"""How this process treats its memory, and how late its event loop is."""

import asyncio
import contextlib
import ctypes
import gc
from collections.abc import Callable

#: mallopt(3)
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def settle_memory() -> None:
    """What exists now lives to the end, and what comes later dies by reference count: the cycle collector need not walk
    the former, and need not look at the latter often. Its pauses land in the middle of decisions, so the youngest must
    be few: 50,000 of them take 7 to 9 ms, 5,000 half of one, and all in all they cost the same (bench/flow.py, where
    10,000 requests queue up). Older ones are as rarely looked at as ever."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 50, 400)


def keep_heap() -> None:
    """Have glibc keep freed memory. By default it gives back and faults in again the pages of every large body: 0.51 ms
    instead of 0.09 ms for reading one of 500 KB (bench/transport.py). Other C libraries are left alone."""
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
    """Gives back what glibc keeps of freed memory (`keep_heap`) once it has not been used again for a while: after an
    attack or a burst of large bodies the process is as small as before. Where that cannot be asked nothing is done."""

    MOST = 24 << 20

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float = 10.0) -> None:
        self._loop = loop
        self._interval = interval_s
        #: Free bytes, the fewest since the last trim, and at the last look.
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


# How late the event loop fires its timers: the one number that tells whether something blocks it.


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
