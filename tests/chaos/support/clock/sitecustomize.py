"""A wall clock that is wrong by as many seconds as the file says that $CHAOS_CLOCK names. Python imports this by its
name where the folder is on its path; the monotonic clock is left alone, as the kernel leaves it."""

import os
import time
from pathlib import Path

if "CHAOS_CLOCK" in os.environ:
    _file, _genuine = Path(os.environ["CHAOS_CLOCK"]), time.time

    def _offset() -> float:
        try:
            return float(_file.read_text())
        except (OSError, ValueError):  # it is being written
            return 0.0

    time.time = lambda: _genuine() + _offset()
    time.time_ns = lambda: int(time.time() * 1e9)
