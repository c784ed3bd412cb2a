"""Ports for what tests start, beside each other and beside whatever else the machine runs.

They lie below the range from which the kernel takes ports for connections. From that range it may give a port to a
client before the server has it, and a client that dials a port on which nobody listens may be connected to itself.
Processes that run tests beside each other take them from parts of their own, because nobody listens on a port yet when
it is given away. For the same reason one process does not give a port away again soon.
"""

import contextlib
import os
import random
import socket
from collections import deque
from collections.abc import Sequence

#: The kernel's own range begins at 32,768.
_FIRST, _LAST = 20_000, 32_700
#: Of a demo's gateway, scheduler, dashboard and eight stubs, counted from its first port.
_DEMO = (0, 1, 2, *range(10, 18))
#: Those given away last.
_given: deque[int] = deque(maxlen=500)


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that nobody listens on now, in a row."""
    return _row(range(count), host)


def free_port() -> int:
    return free_ports(1)[0]


def free_port_block() -> int:
    """The first port of a demo."""
    return _row(_DEMO, "127.0.0.1")[0]


def part(worker: str, workers: int) -> tuple[int, int]:
    """The first and the last port of a worker, by its name in pytest-xdist. One that takes the place of a worker that
    died has the next number, and shares a part with another one."""
    size = (_LAST - _FIRST) // workers
    first = _FIRST + int(worker.removeprefix("gw")) % workers * size
    return first, first + size - 1


def _row(offsets: Sequence[int], host: str) -> list[int]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    begin, end = part(os.environ.get("PYTEST_XDIST_WORKER", "gw0"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))
    for _ in range(1000):
        # Tests may set the seed of `random`, and several processes the same one.
        first = random.SystemRandom().randint(begin, end - offsets[-1])
        row = [first + offset for offset in offsets]
        if not {*row}.isdisjoint(_given):
            continue
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in row:
                probe = stack.enter_context(socket.socket(family))
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
            _given.extend(row)
            return row
    raise AssertionError("no free ports")
