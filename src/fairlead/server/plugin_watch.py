"""Interrupts a plugin that does not return and so holds up the event loop.

Rules
* A thread waits for the event loop's next turn. If none comes within the limit, it sends a signal to the main thread,
  again and again. Python handles signals between two instructions of that thread, so nothing else runs meanwhile.
* The same call of a plugin at two signals is interrupted: `NeverReturned` is raised in it, and whoever called it goes
  on as with any failure of a plugin. Code of this package is never interrupted, so its state stays whole.
* All plugins are called so that this works. What else holds up the loop, and what goes on in spite of it, is logged
  with its place. C code that keeps the interpreter lock, such as a long search of `re`, stops this thread too.
* Simulations and replays run without an event loop (`watched`): they are sent signals all the time. In another thread
  than the main one, as on a Dask worker, there are no signals: the watching thread looks instead, and has Python raise
  the exception at the next line of the plugin.
"""

import asyncio
import ctypes
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CodeType, FrameType

import fairlead
from fairlead.core.errors import NeverReturned
from fairlead.core.policy import interruptible
from fairlead.server.observe.log import get

log = get("plugins")

#: Seconds without a turn of the event loop until the first signal; half of it between two signals.
LIMIT_S = 1.0
#: Seconds between two signals where there is no event loop. Each interruption halves them, down to the second number:
#: a simulated day has a thousand rests of a plugin that never returns.
ALONE_S, ALONE_LEAST_S = 1.0, 0.03
_SIGNAL = int(signal.SIGRTMIN) + 1
#: If the thread itself wakes so much later, no call is blamed.
_LATE_S = 0.05
#: Signals without effect until the place is logged.
_LOGGED_AFTER = 4
#: All plugins are called by this.
_CALL = interruptible.__code__
_OWN = f"{Path(fairlead.__file__).parent}/"


class PluginWatch:
    """Make it on the thread that calls plugins, the main one if there is an event loop; `close()` it there. `loop`:
    `None` = there is none."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None, limit_s: float = LIMIT_S) -> None:
        #: Interrupted calls, and times that the loop was held up by what could not be interrupted.
        self.count = 0
        self._limit = limit_s
        self._thread_id = threading.get_ident()
        self._signals = threading.current_thread() is threading.main_thread()
        self._call: FrameType | None = None
        self._turned, self._closed = threading.Event(), threading.Event()
        self._before = signal.signal(_SIGNAL, self._interrupt) if self._signals else None
        run = self._signal_alone if loop is None else partial(self._watch_turns, loop)
        self._thread = threading.Thread(target=run, name="plugin-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._turned.set()
        self._thread.join()
        if self._signals:
            signal.signal(_SIGNAL, self._before)

    def _signal_alone(self) -> None:
        began, wait = time.monotonic(), self._limit
        while not self._closed.wait(wait):
            self._signal(began, wait)
            began, wait = time.monotonic(), max(self._limit * 0.5**self.count, ALONE_LEAST_S)

    def _watch_turns(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._closed.wait(self._limit):
            self._turned.clear()
            try:
                loop.call_soon_threadsafe(self._turned.set)
            except RuntimeError:  # the loop is closed
                return
            signals, wait, began = 0, self._limit, time.monotonic()
            while not self._turned.wait(wait) and not self._closed.is_set():
                if self._signal(began, wait):
                    signals, wait = signals + 1, self._limit / 2
                    if signals == _LOGGED_AFTER:
                        self._log()
                began = time.monotonic()
            self._call = None

    def _signal(self, began: float, wait: float) -> bool:
        """Send a signal after having waited since `began`, unless that took so long that the whole machine stalls."""
        if time.monotonic() - began > 1.25 * wait + _LATE_S:
            self._call = None
            return False
        if self._signals:
            signal.pthread_kill(self._thread_id, _SIGNAL)
        elif self._hangs(sys._current_frames().get(self._thread_id)):
            raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
            raise_in(ctypes.c_ulong(self._thread_id), ctypes.py_object(NeverReturned))
        return True

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._hangs(frame):
            raise NeverReturned

    def _hangs(self, frame: FrameType | None) -> bool:
        """Whether the same call of a plugin runs as the last time, and is to be interrupted."""
        call, _ = _plugin_call(frame)
        known, self._call = self._call, call
        if call is None or call is not known or frame is None or _own(frame.f_code):
            return False
        self.count += 1
        self._call = None
        return True

    def _log(self) -> None:
        frame = sys._current_frames().get(self._thread_id)
        call, code = _plugin_call(frame)
        code = code or _place(frame)
        if call is not None:
            self.count += 1
        where = (
            "" if code is None else f"{code.co_qualname} ({Path(code.co_filename).name}, line {code.co_firstlineno})"
        )
        log.error("the event loop is held up", plugin=call is not None, where=where)


@contextmanager
def watched() -> Iterator[None]:
    """Interrupt plugins that do not return in the body, which runs without an event loop: calls that last for two
    signals."""
    watch = PluginWatch(None, ALONE_S)
    try:
        yield
    finally:
        watch.close()


def _plugin_call(frame: FrameType | None) -> tuple[FrameType | None, CodeType | None]:
    """Return the frame that calls a plugin, and the code of the plugin; `None` = none, unknown."""
    code = None
    while frame is not None and frame.f_code is not _CALL:
        code = code if _own(frame.f_code) else frame.f_code
        frame = frame.f_back
    return frame, code if frame is not None else None


def _place(frame: FrameType | None) -> CodeType | None:
    """Return the innermost code of this package, else the innermost code."""
    innermost = frame
    while frame is not None and not _own(frame.f_code):
        frame = frame.f_back
    place = frame or innermost
    return None if place is None else place.f_code


def _own(code: CodeType) -> bool:
    return code.co_filename.startswith(_OWN)
