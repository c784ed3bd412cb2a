"""Becomes another program, e.g. Envoy, tied to the life of its parent: see `tied`.

Runs in a bare interpreter between fork and exec, and imports nothing of Fairlead. The alternative, `preexec_fn`, runs
Python in a forked copy of a threaded process, which may deadlock (Python 3.12 warns of it).

PR_SET_PDEATHSIG (prctl(2)) survives execve, so the kernel ends the program when our parent dies, even by SIGKILL. The
parent may have died before the call, so its id is checked afterwards.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def tied(*command: str) -> list[str]:
    """The command that runs `command` until it or this process ends."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def tie_to(parent: int) -> None:
    """End by SIGKILL when the parent ends, for whatever reason. Only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the parent is gone")


def main(parent: int, command: list[str]) -> None:
    tie_to(parent)
    # Ignored across execve, unless the program handles them: Envoy handles SIGUSR1, and nothing ends at SIGUSR2.
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        os.execv(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
