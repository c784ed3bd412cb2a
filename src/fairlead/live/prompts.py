"""Prompts of requests to token ids, before the requests arrive.

At once; in a thread if that would hold the loop; by an engine where the model is configured so.

A request whose prompt is being read waits for it, `PATIENCE` seconds at most; then it goes on without ids, and what was
learned of its bytes serves it. So do those that would have to queue for the thread.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from fairlead.config.tokens import Tokens
from fairlead.fleet.exact import ExactKnowledge, Prepared
from fairlead.fleet.recipe import Recipe
from fairlead.io.model_files import load_tokeniser
from fairlead.io.render import RenderClient
from fairlead.parse.parsed import ParsedRequest
from fairlead.tokens import PromptTokeniser, PromptTokens
from fairlead.tokens.prompt_tokens import ENGINE, TOO_LONG, absent

PATIENCE = 1.0
#: Prompts that are being read, in the thread and by engines.
_MOST_READING = 32
_OTHERS = "*"


class PromptReading:
    """`exact` is offered the ids of each prompt; without it tokens are only counted, and no engine is asked for that.

    `engine` names an endpoint (`host:port`) to ask; empty = none.
    """

    def __init__(self, settings: Tokens, exact: ExactKnowledge | None, engine: Callable[[str], str]) -> None:
        self.tokeniser = PromptTokeniser()
        #: By request: gives the number of its prompt's tokens, 0 = unknown.
        self.reading: dict[int, asyncio.Task[int]] = {}
        #: Prompts that came without ids, by reason.
        self.without: dict[str, int] = {}
        #: There are models whose texts can be tokenised.
        self.configured = bool(settings.models)
        self._settings = settings
        #: Where the blocks are known in another process: adds its answer to a prompt's chains. `None` = it has none,
        #: and the prompt is not offered.
        self.asker: Callable[[Prepared], Awaitable[Prepared | None]] | None = None
        self._exact = exact
        self._long = exact.recipe.long if exact is not None else Recipe().long
        self._engine = engine
        self._asked = {name for name, model in settings.models.items() if model.render == "engine"}
        self._render: RenderClient | None = None
        self._pool = ThreadPoolExecutor(1, "prompts")

    async def start(self) -> None:
        """Load the tokenisers: seconds for each large vocabulary."""
        loop = asyncio.get_running_loop()
        self.tokeniser = await asyncio.to_thread(load_tokeniser, self._settings)
        if self._asked and self._exact is not None:
            self._render = RenderClient(self._settings.engine_timeout, loop.time)

    async def close(self) -> None:
        tasks = list(self.reading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._render is not None:
            await self._render.close()

    def read(self, request_id: int, parsed: ParsedRequest, body: bytes, model: str) -> int:
        """The number of the prompt's tokens; 0 = it is unknown, or will be known by `reading`."""
        if self._render is not None and not parsed.prompt_tokens and self.asks(model):
            return self._later(request_id, model, partial(self._ask, parsed, body, model))
        long = self._long
        if parsed.prompt_tokens > long or parsed.prompt_bytes > 4 * long or self.tokeniser.in_thread(parsed, model):
            return self._later(request_id, model, partial(self._in_thread, parsed, body, model))
        found = self.tokeniser.tokens_of(parsed, body, model)
        if self.asker is None or found.reason:
            return self._take(request_id, found)
        if len(self.reading) < _MOST_READING:
            self._later(request_id, model, partial(_ready, found))
        return found.total

    def asks(self, model: str) -> bool:
        """Whether an engine is asked for the ids of its prompts."""
        return model in self._asked or (_OTHERS in self._asked and model not in self._settings.models)

    def _take(self, request_id: int, tokens: PromptTokens, prepared: Prepared | None = None) -> int:
        if tokens.reason:
            self.without[tokens.reason] = self.without.get(tokens.reason, 0) + 1
            return 0
        if self._exact is not None:
            self._exact.offer(request_id, tokens, prepared)
        return tokens.total

    def _later(self, request_id: int, model: str, tokens: Callable[[], Awaitable[PromptTokens]]) -> int:
        if len(self.reading) >= _MOST_READING:
            return self._take(request_id, absent(TOO_LONG, "other prompts are being read"))
        task = asyncio.get_running_loop().create_task(self._wait(request_id, model, tokens))
        self.reading[request_id] = task
        task.add_done_callback(lambda _: self.reading.pop(request_id, None))
        return 0

    async def _wait(self, request_id: int, model: str, tokens: Callable[[], Awaitable[PromptTokens]]) -> int:
        prepared = None
        try:
            async with asyncio.timeout(PATIENCE):
                found = await tokens()
                exact = self._exact
                if exact is not None and found.count > self._long:
                    loop = asyncio.get_running_loop()
                    prepared = await loop.run_in_executor(self._pool, exact.prepare, found, model)
                if exact is not None and self.asker is not None and not found.reason:
                    prepared = await self.asker(prepared or exact.prepare(found, model))
                    if prepared is None:
                        return found.total
        except TimeoutError:
            found = absent(TOO_LONG, f"not read within {PATIENCE:g} s")
        return self._take(request_id, found, prepared)

    def _in_thread(self, parsed: ParsedRequest, body: bytes, model: str) -> Awaitable[PromptTokens]:
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._pool, self.tokeniser.tokens_of, parsed, body, model)

    async def _ask(self, parsed: ParsedRequest, body: bytes, model: str) -> PromptTokens:
        address = self._engine(model)
        if not address or self._render is None:
            return absent(ENGINE, "there is no engine to ask")
        return await self._render.tokens_of(parsed, body, f"http://{address}")


async def _ready(found: PromptTokens) -> PromptTokens:
    return found
