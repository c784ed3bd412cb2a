"""Ports for a demo: tests run beside each other and beside whatever else the machine runs."""

import contextlib
import random
import socket

#: Of gateway, scheduler, dashboard and eight stubs, counted from the first port.
_OFFSETS = (0, 1, 2, *range(10, 18))


def free_port_block() -> int:
    """Below the range from which the kernel takes ports for connections."""
    for _ in range(100):
        base = random.randrange(20_000, 30_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for offset in _OFFSETS:
                probe = stack.enter_context(socket.socket())
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", base + offset))
            return base
    raise AssertionError("no free ports")
