"""Whether this process hung a moment ago.

When it did, sockets hold requests that the gateway gave up meanwhile, each followed by its reset. A session that leaves
at the pick would not see the reset, and what the gateway logged of that request it may have dropped. So for a moment
after a hang no session leaves at the pick.
"""

from collections.abc import Callable
from math import inf

#: Seconds without a turn of the event loop after which requests may have been given up unseen: twice the period of its
#: heartbeat, and no more than gateways wait for us. For as long afterwards they are looked at with doubt.
HANG = 1.0


class Pulse:
    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._beat = inf
        self._doubt_until = -inf

    def beat(self) -> None:
        """Called twice a second or more often while the event loop turns. Who never calls it never hangs."""
        now = self._now()
        self.doubtful(now)  # after a hang, timers may come before what the sockets hold
        self._beat = now

    def doubtful(self, now: float) -> bool:
        """Whether a request read now may have been given up by its gateway while we hung."""
        if now - self._beat > HANG:
            self._doubt_until = now + HANG
        return now < self._doubt_until
