"""Whether engines make the same token ids as we do, found out once for each model that they serve.

A tokeniser or template that differs makes no error anywhere: blocks just never match. So the first endpoint that serves
a model is asked for the ids of a few probes (`io.token_parity`), beside all requests.

Rules
* One endpoint at a time is asked, each question within `TIMEOUT` seconds. A model that was compared is not compared
  again; one that could not be is tried again with each endpoint that comes, and `TRIES` times later on.
* At most `MOST_MODELS` models. Adapters have their base model's tokens and are left out.
"""

import asyncio
from collections.abc import Callable, Mapping

import aiohttp
import msgspec
from msgspec import Struct

from fairlead.fleet.diagnosis import TEMPLATE, TOKENISER, Finding
from fairlead.io.render import RenderClient
from fairlead.io.token_parity import PROBES, Parity, compare
from fairlead.model.endpoint import MODEL_LABEL, Endpoint
from fairlead.observe.log import get
from fairlead.tokens import PromptTokeniser

log = get("tokens")

TIMEOUT, TRIES, LATER = 2.0, 3, 20.0
MOST_MODELS, _MOST_QUEUED, _MOST_BYTES = 64, 256, 1 << 20
AGREES, DIFFERS, UNKNOWN = "agrees", "differs", "unknown"


class _Model(Struct):
    id: str = ""
    parent: str | None = None


class _Models(Struct):
    data: list[_Model] = []


class TokenParity:
    """`asks(model)`: whether an engine itself is asked for that model's ids, so that there is nothing to compare.

    `found` hears why predictions of blocks will fail, where token ids differ.
    """

    def __init__(
        self,
        tokeniser: Callable[[], PromptTokeniser],
        asks: Callable[[str], bool],
        found: Callable[[Finding], object] = lambda finding: None,
        later: float = LATER,
    ) -> None:
        #: By model, as engines call it.
        self.results: dict[str, Parity] = {}
        self._tokeniser, self._asks, self._found = tokeniser, asks, found
        self._later = later
        self._waiting: dict[str, tuple[Endpoint, int]] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def up(self, endpoint: Endpoint) -> None:
        """An endpoint came, or changed."""
        if len(self._waiting) < _MOST_QUEUED:
            self._waiting[endpoint.id] = endpoint, TRIES
            self._wake.set()

    def states(self) -> Mapping[str, str]:
        """`agrees`, `differs` or `unknown`, by model."""
        return {model: result.state.partition(":")[0] for model, result in self.results.items()}

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        client = RenderClient(TIMEOUT, loop.time, 4)
        try:
            async with aiohttp.ClientSession() as session:
                while True:
                    await self._wake.wait()
                    self._wake.clear()
                    while self._waiting:
                        endpoint, tries = self._waiting.pop(next(iter(self._waiting)))
                        if not await self._check(session, client, endpoint) and tries > 1:
                            loop.call_later(self._later, self._again, endpoint, tries - 1)
        finally:
            await client.close()

    def _again(self, endpoint: Endpoint, tries: int) -> None:
        self._waiting.setdefault(endpoint.id, (endpoint, tries))
        self._wake.set()

    async def _check(self, session: aiohttp.ClientSession, client: RenderClient, endpoint: Endpoint) -> bool:
        """Whether nothing is left to be found out there."""
        url = f"http://{endpoint.address}"
        settled = True
        names = await _served(session, url) or {endpoint.labels.get(MODEL_LABEL, "")} - {""}
        for model in sorted(names):
            before = self.results.get(model)
            if before is not None and not before.state.startswith(UNKNOWN):
                continue
            if self._asks(model) or not self._tokeniser().knows(model):
                continue
            if before is None and len(self.results) >= MOST_MODELS:
                continue
            result = self.results[model] = await compare(self._tokeniser(), client, url, model)
            self._tell(model, endpoint, result)
            settled &= not result.state.startswith(UNKNOWN)
        return settled and bool(names)

    def _tell(self, model: str, endpoint: Endpoint, result: Parity) -> None:
        if result.differing:
            finding = Finding(cause_of(result), f"{model} at {endpoint.id} {result.state}")
            log.warning(
                "an engine makes other token ids than we do; its KV blocks will not match",
                model=model,
                endpoint=endpoint.id,
                cause=finding.cause,
                detail=result.state,
            )
            self._found(finding)
        elif result.agreed:
            log.info("an engine makes the same token ids", model=model, endpoint=endpoint.id)
        else:
            log.info("token ids could not be compared", model=model, endpoint=endpoint.id, reason=result.state)


def cause_of(result: Parity) -> str:
    """Chats that differ where plain texts agree are the template's fault."""
    plain = {name for name, (path, _) in PROBES.items() if path == "/v1/completions"}
    return TEMPLATE if plain & {*result.agreed} and not plain & {*result.differing} else TOKENISER


async def _served(session: aiohttp.ClientSession, url: str) -> set[str]:
    """Names of the base models that the engine says it serves; none if it does not say."""
    try:
        async with asyncio.timeout(TIMEOUT), session.get(f"{url}/v1/models", allow_redirects=False) as response:
            body = await response.content.read(_MOST_BYTES) if response.status == 200 else b""
            while not response.content.at_eof() and len(body) < _MOST_BYTES:
                body += await response.content.read(_MOST_BYTES - len(body))
        models = msgspec.json.decode(body, type=_Models).data if body else []
    except (OSError, aiohttp.ClientError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return set()
    return {model.id for model in models if model.id and not model.parent}
