"""Turns prompts of requests into token ids before the requests arrive in the pipeline.

Short prompts are read immediately. Prompts that would hold the event loop are read in a thread. An engine reads the
prompts of models that are configured with `render: engine`.

A request waits for the reading of its prompt at most `PATIENCE` seconds, well below the time after which the gateway
gives up the scheduler (`message_timeout`). Then it continues without token ids, and the learned prefixes of its bytes
are used instead. The same applies while `_MOST_READING` prompts are being read.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from fairlead.apis.parsed import ParsedRequest
from fairlead.apis.splice import splice_model
from fairlead.apis.tokens import PromptTokeniser, PromptTokens
from fairlead.apis.tokens.pieces import ENGINE, NO_TOKENISER, TOO_LONG, absent
from fairlead.config.schema import Tokens
from fairlead.core.exact import ExactKnowledge, Prepared, PromptBlocks
from fairlead.core.kv.recipe import Recipe
from fairlead.gateway.understand import PromptKnown, Reading
from fairlead.pool.aio import cancelled
from fairlead.pool.model_files import load_tokeniser
from fairlead.pool.render import RenderClient
from fairlead.pool.scrape import NO_TOKEN, TokenFile

PATIENCE = 0.5
#: How many prompts may be read at the same time, in the thread and by engines.
_MOST_READING = 32
_ANY_MODEL = "*"


Asker = Callable[[Prepared], Awaitable[Prepared | None]]


class PromptReading:
    """`exact` is offered the token ids of each prompt; `None` = tokens are only counted, and no engine is asked.

    `engine` returns an endpoint (`host:port`) to ask; empty = there is none. `bases`: the names of the base models of
    each endpoint that has a model. `asker`: if another process knows the blocks, asks it and adds its answer to the
    prompt's chains; without an answer the prompt is not offered. `token`: what engines require.
    """

    def __init__(
        self,
        settings: Tokens,
        exact: ExactKnowledge | None,
        engine: Callable[[str], str],
        bases: Callable[[str], Collection[frozenset[str]]],
        asker: Asker | None = None,
        token: TokenFile = NO_TOKEN,
    ) -> None:
        self.tokeniser = PromptTokeniser()
        #: Prompts that are being read.
        self.reading: set[Reading] = set()
        #: How many prompts were not turned into token ids, by reason.
        self.without: dict[str, int] = {}
        #: Why a model's tokeniser cannot be used, by the model's name in the configuration.
        self.unusable: dict[str, str] = {}
        #: Whether the configuration has a tokeniser for any model.
        self.configured = bool(settings.models)
        self._settings = settings
        self._asker = asker
        self._token = token
        self._exact = exact
        self._long = exact.recipe.long if exact is not None else Recipe().long
        self._engine, self._bases = engine, bases
        self._asked = {name for name, model in settings.models.items() if model.render == "engine"}
        self._render: RenderClient | None = None
        self._pool = ThreadPoolExecutor(1, "prompts")

    async def start(self) -> None:
        """Load the tokenisers. This takes seconds for each large vocabulary."""
        loop = asyncio.get_running_loop()
        self.tokeniser = await asyncio.to_thread(load_tokeniser, self._settings)
        models = {name: model for name, model in self.tokeniser.states().items() if name not in self._asked}
        self.unusable = {name: model.state for name, model in models.items() if model.tokeniser is None}
        if self._asked and self._exact is not None:
            self._render = RenderClient(self._settings.engine_timeout, loop.time, token=self._token)

    async def close(self) -> None:
        await cancelled(*self.reading)
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._render is not None:
            await self._render.close()

    def read(self, parsed: ParsedRequest, body: bytes, targets: Sequence[str]) -> PromptKnown | Reading:
        """Read a prompt: the result, or a task that returns it. The result is empty if the prompt cannot be read, or if
        the models that the request may be sent for have different tokenisers."""
        reader = self._reader(targets)
        if reader is None:
            return self._known(absent(NO_TOKENISER, "the targets of the model's name have different ones"))
        if self._render is not None and not parsed.prompt_tokens and self.asks(reader):
            return self._later(targets[0], partial(self._ask, parsed, body, reader))
        long = self._long
        if parsed.prompt_tokens > long or parsed.prompt_bytes > 4 * long or self.tokeniser.in_thread(parsed, reader):
            return self._later(targets[0], partial(self._in_thread, parsed, body, reader))
        tokens = self.tokeniser.tokens_of(parsed, body, reader)
        if self._asker is None or tokens.reason:
            return self._known(tokens)
        if len(self.reading) < _MOST_READING:
            return self._later(targets[0], partial(_ready, tokens))
        return PromptKnown(tokens.total)

    def offer(self, known: PromptKnown) -> PromptBlocks | None:
        """Return the blocks of a prompt that was read; `None` = there are none. Call this when its request is about to
        arrive in the pipeline."""
        return None if self._exact is None else self._exact.offer(*known.blocks)

    def _reader(self, targets: Sequence[str]) -> str | None:
        """The model whose tokeniser reads the prompts of all targets; `None` = they have different ones."""
        groups = {group for target in targets for group in self._bases(target)}
        readers = {reader for target in targets for reader in self._readers(target)}
        entries = {model if model in self._settings.models else _ANY_MODEL for model in readers}
        if len(entries) > 1:
            return None
        if groups and entries & self._asked and not frozenset.intersection(*groups):
            return None  # each engine has a tokeniser of its own
        return min(readers, key=lambda reader: (not self._bases(reader), reader))

    def _readers(self, model: str) -> set[str]:
        """The models whose tokenisers read prompts for `model`: itself, or the base models of an adapter without an
        entry."""
        if model in self._settings.models:
            return {model}
        groups = self._bases(model)
        return {model if model in group else min(group, key=self._unlisted) for group in groups} or {model}

    def _unlisted(self, model: str) -> tuple[bool, str]:
        return model not in self._settings.models, model

    def asks(self, model: str) -> bool:
        """Whether an engine is asked for the token ids of this model's prompts."""
        return model in self._asked or (_ANY_MODEL in self._asked and model not in self._settings.models)

    def _known(self, tokens: PromptTokens, prepared: Prepared | None = None) -> PromptKnown:
        if tokens.reason:
            self.without[tokens.reason] = self.without.get(tokens.reason, 0) + 1
            return PromptKnown()
        return PromptKnown(tokens.total, (tokens, prepared) if self._exact is not None else None)

    def _later(self, model: str, tokens: Callable[[], Awaitable[PromptTokens]]) -> PromptKnown | Reading:
        if len(self.reading) >= _MOST_READING:
            return self._known(absent(TOO_LONG, "other prompts are being read"))
        task = asyncio.get_running_loop().create_task(self._wait(model, tokens))
        self.reading.add(task)
        task.add_done_callback(self.reading.discard)
        return task

    async def _wait(self, model: str, tokens: Callable[[], Awaitable[PromptTokens]]) -> PromptKnown:
        prepared, total = None, 0
        try:
            async with asyncio.timeout(PATIENCE):
                prompt = await tokens()
                total = prompt.total
                exact = self._exact
                if exact is not None and prompt.count > self._long:
                    loop = asyncio.get_running_loop()
                    prepared = await loop.run_in_executor(self._pool, exact.prepare, prompt, model)
                if exact is not None and self._asker is not None and not prompt.reason:
                    prepared = await self._asker(prepared or exact.prepare(prompt, model))
                    if prepared is None:
                        return PromptKnown(total)
        except TimeoutError:
            self._known(absent(TOO_LONG, f"not read within {PATIENCE:g} s"))
            return PromptKnown(total)
        return self._known(prompt, prepared)

    def _in_thread(self, parsed: ParsedRequest, body: bytes, model: str) -> Awaitable[PromptTokens]:
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._pool, self.tokeniser.tokens_of, parsed, body, model)

    async def _ask(self, parsed: ParsedRequest, body: bytes, model: str) -> PromptTokens:
        address = self._engine(model)
        if not address or self._render is None:
            return absent(ENGINE, "there is no engine to ask")
        if model != parsed.model:
            body = splice_model(body, model, api=parsed.api) or body
        return await self._render.tokens_of(parsed, body, f"http://{address}")


async def _ready(tokens: PromptTokens) -> PromptTokens:
    return tokens
