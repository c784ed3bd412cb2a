"""An event loop that waits for no name service. asyncio resolves names in the threads of the default executor: while a
name service does not answer, these are taken, so no file can be read, and the process waits for them before it ends.

Here each name has a thread of its own that nobody waits for. A name that is asked for again meanwhile shares it. An
answer that comes when all who asked have given up is kept for who asks next: else no answer would ever be in time where
a name service always takes longer than those who ask wait.
"""

import asyncio
import socket
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from fairlead.pool.aio import in_own_thread

#: An answer that nobody took is kept for so many seconds.
KEPT_S = 30.0

_T = TypeVar("_T")
#: Host, port, family, type, protocol and flags of a question, as `socket.getaddrinfo` takes them.
_Asked = tuple[Any, Any, int, int, int, int]


class Loop(asyncio.SelectorEventLoop):
    """asyncio's loop with another `getaddrinfo`."""

    def __init__(self) -> None:
        super().__init__()
        #: What is being resolved, or was and is still to be taken, with the future answer: the addresses, or an error.
        self._asked: dict[_Asked, asyncio.Future[Any]] = {}

    async def getaddrinfo(
        self, host: Any, port: Any, *, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> Any:
        """As `socket.getaddrinfo`. Raises `OSError` also if no thread can be started."""
        asked = (host, port, family, type, proto, flags)
        future = self._asked.get(asked)
        if future is None:
            try:
                future = in_own_thread(partial(socket.getaddrinfo, *asked), "name lookup")
            except OSError as error:
                raise OSError(f"cannot resolve {host}: {error}") from None
            self._asked[asked] = future
            future.add_done_callback(partial(self._answered, asked))
        answer = await asyncio.shield(future)
        self._forget(asked, future)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _answered(self, asked: _Asked, future: asyncio.Future[Any]) -> None:
        kept_s = 0.0 if isinstance(future.result(), Exception) else KEPT_S
        self.call_later(kept_s, self._forget, asked, future)

    def _forget(self, asked: _Asked, future: asyncio.Future[Any]) -> None:
        if self._asked.get(asked) is future:
            del self._asked[asked]


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Do the work on a new `Loop`, like `asyncio.run`."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(work)
