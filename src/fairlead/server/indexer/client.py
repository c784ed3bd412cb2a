"""Asks an indexer in another process, within a time budget, and fetches its index for a warm start.

Theory. A request waits for the answer to its question, even if none comes. So no questions are sent to an indexer that
does not answer. Polling its state, which is needed anyway, shows when it answers again, without delaying requests.

Rules
* `ask` never raises except for cancellation, and never takes longer than the budget. After `None` the request is
  scheduled by learned prefixes.
* `FAILURES` late or failed questions in a row make the indexer `down`: no question is sent until its state was read
  again, and not before a pause of `PAUSE` seconds. The pause doubles if no question was answered since the last pause.
  After a pause one failed question makes it `down` again.
* The state is polled every `POLL` seconds; after failures less and less often, up to `POLL_MOST`, with jitter.
* At most `MOST_ASKED` questions are open, each on a connection of its own, which is kept open. Further questions are
  not sent.
* Redirects are not followed, proxies from the environment are not used, and answers that are too large are failures.
"""

import asyncio
from collections.abc import Callable
from math import inf
from random import Random
from time import perf_counter
from typing import Any

import aiohttp

from fairlead.pool.aio import cancelled, read_at_most
from fairlead.pool.scrape import LazySession
from fairlead.server.indexer.wire import MSGPACK, Answer, StateAnswer, read_answer, read_state, write

FAILURES, POLL, POLL_MOST, POLL_TIMEOUT = 3, 0.5, 5.0, 2.0
PAUSE, PAUSE_MOST = 0.5, 8.0
MOST_ASKED = 64
MAX_BYTES = 4 << 20
#: Results of questions: late = no answer within the budget; down = not sent, because the indexer did not answer before;
#: busy = not sent, because too many questions were open.
RESULTS = ("answered", "late", "failed", "down", "busy")


class IndexClient:
    """`url`: `http://host:port`. `on_state` receives each state, and `None` when the indexer stops answering; `say`
    receives texts for the log when it begins or stops to answer."""

    def __init__(
        self,
        url: str,
        budget: float,
        on_state: Callable[[StateAnswer | None], object],
        say: Callable[[str, str], object],
        took: Callable[[float], object] = lambda seconds: None,
        now: Callable[[], float] = perf_counter,
    ) -> None:
        """`budget`: seconds that one question may take. `took` receives the seconds that each answer took."""
        self.url = url.rstrip("/")
        #: Questions by their result.
        self.ends = dict.fromkeys(RESULTS, 0)
        #: Whether questions are sent: the indexer answered last time.
        self.up = False
        self.budget = budget
        self._now = now
        self._on_state, self._say, self._took = on_state, say, took
        self._failures = self._open = 0
        self._pause, self._until = PAUSE, -inf
        self._complained = False
        self._rng = Random()
        self._session = LazySession({}, limit=MOST_ASKED + 2, keepalive_timeout=30)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._follow())

    async def close(self) -> None:
        await cancelled(self._task)
        self._task, self.up = None, False
        await self._session.close()

    async def ask(self, **fields: Any) -> Answer | None:
        """Send a question with the fields of a `server.indexer.wire.Query`. `None` = no answer (see `RESULTS`)."""
        ends = self.ends
        if not self.up:
            ends["down"] += 1
            return None
        if self._open >= MOST_ASKED:
            ends["busy"] += 1
            return None
        self._open += 1
        started = perf_counter()
        try:
            async with asyncio.timeout(self.budget):
                body = await self._call("POST", "/query", MAX_BYTES, write(fields, MSGPACK))
            answer = read_answer(body)
        except TimeoutError:
            ends["late"] += 1
            self._failed(f"no answer within {self.budget * 1e3:g} ms")
            return None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            ends["failed"] += 1
            self._failed(str(error) or type(error).__name__)
            return None
        finally:
            self._open -= 1
        self._took(perf_counter() - started)
        ends["answered"] += 1
        self._failures, self._pause = 0, PAUSE
        return answer

    def _failed(self, why: str) -> None:
        self._failures += 1
        if self._failures >= FAILURES and self.up:
            self._until = self._now() + self._pause
            self._pause = min(2 * self._pause, PAUSE_MOST)
            self._down(why)

    def _down(self, why: str) -> None:
        was, self.up = self.up, False
        if was or not self._complained:
            self._complained = True
            self._say("the indexer does not answer; learned prefixes are used", why)
            self._on_state(None)

    async def _follow(self) -> None:
        wait = POLL
        while True:
            try:
                async with asyncio.timeout(POLL_TIMEOUT):
                    state = read_state(await self._call("GET", "/state", MAX_BYTES))
            except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
                self._down(str(error) or f"no state within {POLL_TIMEOUT:g} s")
                wait = min(2 * wait, POLL_MOST)
            else:
                self._had(state)
                wait = POLL
            await asyncio.sleep(wait * (1 - 0.2 * self._rng.random()))

    def _had(self, state: StateAnswer) -> None:
        if self._now() < self._until:
            return
        if not self.up:
            self._say("the indexer answers", "")
            self.up, self._complained = True, False
            self._failures = FAILURES - 1 if self._until > -inf else 0
        self._on_state(state)

    async def _call(self, method: str, path: str, most: int, body: bytes | None = None) -> bytes:
        headers = {"Content-Type": MSGPACK} if body is not None else {}
        async with self._session.open().request(
            method, self.url + path, data=body, headers=headers, allow_redirects=False
        ) as response:
            received = await read_at_most(response.content, most, ValueError(f"{path}: more than {most} bytes"))
        if response.status != 200:
            raise ValueError(f"{path}: status {response.status}: {received[:100]!r}")
        return received


#: Limits of fetching a snapshot: seconds, bytes.
TIMEOUT, MAX_SNAPSHOT = 30.0, 1 << 30


async def fetch(session: aiohttp.ClientSession, url: str) -> bytes:
    """Fetch the index of the running indexer at `url` (`http://host:port`) as a snapshot. Raises `ValueError` if it
    does not answer, is too slow, or the snapshot is too large."""
    try:
        async with (
            asyncio.timeout(TIMEOUT),
            session.get(f"{url.rstrip('/')}/snapshot", allow_redirects=False) as response,
        ):
            if response.status != 200:
                raise ValueError(f"{url}: status {response.status}")
            large = ValueError(f"{url}: its snapshot is larger than {MAX_SNAPSHOT} bytes")
            return await read_at_most(response.content, MAX_SNAPSHOT, large)
    except TimeoutError:
        raise ValueError(f"{url}: no snapshot within {TIMEOUT:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise ValueError(f"{url}: {error or type(error).__name__}") from None
