"""Ports for what tests start, beside each other and beside whatever else the machine runs.

They lie below the range from which the kernel takes ports for connections. From that range it may give a port to a
client before the server has it, and a client that dials a port on which nobody listens may be connected to itself.
"""

import contextlib
import random
import socket
from collections.abc import Sequence

#: The kernel's own range begins at 32,768.
_FIRST, _LAST = 20_000, 32_700
#: Of a demo's gateway, scheduler, dashboard and eight stubs, counted from its first port.
_DEMO = (0, 1, 2, *range(10, 18))


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that nobody listens on now, in a row."""
    return _row(range(count), host)


def free_port() -> int:
    return free_ports(1)[0]


def free_port_block() -> int:
    """The first port of a demo."""
    return _row(_DEMO, "127.0.0.1")[0]


def _row(offsets: Sequence[int], host: str) -> list[int]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(1000):
        # Tests may set the seed of `random`, and several processes the same one.
        first = random.SystemRandom().randrange(_FIRST, _LAST - offsets[-1])
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for offset in offsets:
                probe = stack.enter_context(socket.socket(family))
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, first + offset))
            return [first + offset for offset in offsets]
    raise AssertionError("no free ports")
