"""How this process treats its memory."""

import contextlib
import ctypes
import gc

#: mallopt(3)
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def settle_memory() -> None:
    """What exists now lives to the end, and what comes later dies by reference count: the cycle collector need not walk
    the former, and need not look at the latter often. Its pauses would land in the middle of decisions."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def keep_heap() -> None:
    """Have glibc keep freed memory. By default it gives back and faults in again the pages of every large body: 0.51 ms
    instead of 0.09 ms for reading one of 500 KB (bench/transport.py). Other C libraries are left alone."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option, value in ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 256 << 20), (_M_TOP_PAD, 16 << 20)):
            mallopt(option, value)
