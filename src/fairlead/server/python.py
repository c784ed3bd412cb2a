"""Starts Python for a module of Fairlead in a child process."""

import os
import sys
from contextlib import suppress


def python_module(name: str) -> list[str]:
    """The command that runs the module. It imports from where this process does: `-m` alone would import from the
    working directory before all else, where files may have names of the standard library."""
    working_directory = ""
    with suppress(OSError):  # it was removed
        working_directory = os.getcwd()
    return [sys.executable, *([] if sys.path[0] in ("", working_directory) else ["-P"]), "-m", name]
