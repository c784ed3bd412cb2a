"""Ask engines for the token ids of prompts, and compare them with those that Fairlead makes.

There are two ways. They are tried in this order for each engine. The result is remembered for `RETRY_AFTER` seconds:

* `POST /v1/…/render` returns ids, and the identifiers and positions of media. A render server (`vllm launch render`)
  has it. `vllm serve` has it only with `--enable-scale-out`, and otherwise answers 403 or 404.
* `POST /tokenize` returns only ids, so requests with media get none, nor do those with fields that it does not take.

Rules
* If no answer arrives in time, or it is not a list of ids, the result is a `PromptTokens` with the reason `engine`, and
  the request continues without ids. There are no retries.
* At most `concurrency` requests are in flight, on as many connections. A request beyond that is not sent, so that a
  hanging engine does not collect requests.
* After `FAILURES` failures in a row, an engine gets no requests for `PAUSE` seconds. Requests that it refuses, or that
  cannot be sent to it, are no failures: one client's would silence it for all.
* The body is sent as the client sent it (to `/tokenize` only the fields that make up the prompt). Redirects are not
  followed, proxies of the environment are not used, and an answer with more ids than the body can have is a failure:
  to read 16 MB of them holds the event loop for a second.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import msgspec
import numpy as np
from msgspec import DecodeError, Raw, Struct, ValidationError

from fairlead.apis.body import ABSENT
from fairlead.apis.parsed import ParsedRequest, is_sent
from fairlead.apis.request import parse_request
from fairlead.apis.tokens import PromptTokeniser, PromptTokens
from fairlead.apis.tokens.chats import GenerateFields
from fairlead.apis.tokens.pieces import API, ENGINE, FIELDS, MEDIA, TOO_LONG, UNREAD, absent, packed
from fairlead.core import apis
from fairlead.pool.aio import read_at_most
from fairlead.pool.scrape import NO_TOKEN, LazySession, TokenFile

CONCURRENCY = 32
FAILURES, PAUSE = 3, 5.0
#: Seconds after which an engine that does not render is asked again: it may have restarted with other flags.
RETRY_AFTER = 60.0
#: A million ids take 8 MB. Answers about media have more than ids.
MAX_ANSWER = 16 << 20
#: Bytes of an answer for each byte of a body, of which a token has one at least, and for what templates and stored
#: conversations add.
ID_BYTES, MORE_BYTES = 16, 1 << 20
#: Statuses of requests that the engine refuses: bad ones, and too long ones.
_REFUSALS = (400, 413, 422)
#: Longer bodies are not sent to be rendered.
MAX_BODY = 4 << 20
#: With more engines, the least recently used is forgotten.
MAX_ENGINES = 1024

#: Not of `RESPONSES_STORED`: any engine may be asked, and only one has what is stored.
_RENDER = {
    apis.CHAT: "/v1/chat/completions/render",
    apis.COMPLETIONS: "/v1/completions/render",
    apis.MESSAGES: "/v1/messages/render",
    apis.RESPONSES: "/v1/responses/render",
}
#: `/tokenize` takes requests of both APIs, but refuses fields that it does not know.
_PROMPT_FIELDS = {
    apis.CHAT: (
        "model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens",
        "chat_template_kwargs",
    ),
    apis.COMPLETIONS: ("model", "prompt", "add_special_tokens"),
}  # fmt: skip
#: Fields that shape the prompt too, and that `/tokenize` does not take, or not from every client.
_NOT_TAKEN = {
    apis.CHAT: ("documents", "reasoning_effort", "chat_template", "truncate_prompt_tokens"),
    apis.COMPLETIONS: ("prompt_embeds", "truncate_prompt_tokens"),
}


class _Tokenized(Struct, gc=False):
    tokens: list[int]


class _Salt(Struct, gc=False):
    cache_salt: str | None = None


_decode_rendered = msgspec.json.Decoder(GenerateFields | list[GenerateFields]).decode
_decode_tokenized = msgspec.json.Decoder(_Tokenized).decode
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_salt = msgspec.json.Decoder(_Salt).decode


class _NoAnswer(Exception):
    """The engine gave no usable answer. The message says what happened instead."""


class _Refused(_NoAnswer):
    """There is no answer because of the request, and other requests may have one. `reason`: see `PromptTokens`."""

    def __init__(self, detail: str, reason: str = ENGINE) -> None:
        super().__init__(detail)
        self.reason = reason


class _Engine(Struct):
    #: APIs whose requests the engine refused to render → when it is asked again.
    unrendered: dict[str, float] = {}
    failures: int = 0
    rest_until: float = 0.0


class RenderClient:
    """Asks engines for token ids. `now`: a monotonic clock in seconds. `timeout_s`: limit of a whole request.
    `token`: what engines require."""

    def __init__(
        self,
        timeout_s: float,
        now: Callable[[], float],
        concurrency: int = CONCURRENCY,
        token: TokenFile = NO_TOKEN,
    ) -> None:
        self._token = token
        self._timeout_s = timeout_s
        self._now = now
        self._concurrency = concurrency
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        self._session = LazySession(headers, limit=concurrency, keepalive_timeout=30)
        self._engines: dict[str, _Engine] = {}
        #: Requests in flight.
        self.rendering = 0

    async def tokens_of(self, parsed: ParsedRequest, body: bytes, url: str) -> PromptTokens:
        """Ask the engine at `url` (`http://host:port`) for the ids of a request. Raises only if cancelled."""
        if parsed.api not in _RENDER:
            return absent(API, f"engines do not render '{parsed.api}'")
        if parsed.unread:
            return absent(UNREAD, parsed.unread)
        if len(body) > MAX_BODY:
            return absent(TOO_LONG, f"a body of more than {MAX_BODY} bytes is not sent to be rendered")
        engine = self._engine(url)
        if self._now() < engine.rest_until:
            return absent(ENGINE, "the engine did not answer before and is left alone for a while")
        if self.rendering >= self._concurrency:
            return absent(ENGINE, f"{self.rendering} other prompts are being rendered")
        self.rendering += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                tokens = await self._ask(engine, parsed, body, url)
        except _Refused as error:
            return absent(error.reason, str(error))
        except TimeoutError:
            return self._failed(engine, f"no answer within {self._timeout_s:g} s")
        except (_NoAnswer, aiohttp.ClientError, OSError, ValueError, OverflowError) as error:
            return self._failed(engine, str(error) or type(error).__name__)
        finally:
            self.rendering -= 1
        engine.failures = 0
        return tokens

    @property
    def known(self) -> tuple[str, ...]:
        """The URLs of the remembered engines, the most recently used last."""
        return tuple(self._engines)

    async def close(self) -> None:
        await self._session.close()

    def _engine(self, url: str) -> _Engine:
        engine = self._engines.pop(url, None) or _Engine()
        self._engines[url] = engine
        if len(self._engines) > MAX_ENGINES:
            del self._engines[next(iter(self._engines))]
        return engine

    def _failed(self, engine: _Engine, why: str) -> PromptTokens:
        engine.failures += 1
        if engine.failures >= FAILURES:
            engine.rest_until = self._now() + PAUSE
        return absent(ENGINE, why)

    async def _ask(self, engine: _Engine, parsed: ParsedRequest, body: bytes, url: str) -> PromptTokens:
        most = MAX_ANSWER if parsed.media else min(MORE_BYTES + ID_BYTES * len(body), MAX_ANSWER)
        if self._now() >= engine.unrendered.get(parsed.api, 0.0):
            status, answer = await self._post(url + _RENDER[parsed.api], body, most)
            if status not in (403, 404, 405) or (status == 404 and _is_of_model(answer)):
                return _rendered(status, answer)
            engine.unrendered[parsed.api] = self._now() + RETRY_AFTER
        if parsed.api not in _PROMPT_FIELDS:
            return absent(ENGINE, f"the engine does not render '{parsed.api}', and /tokenize does not take it")
        if parsed.media:
            return absent(MEDIA, "the engine does not render, and /tokenize does not tell of media")
        status, answer = await self._post(url + "/tokenize", _prompt_only(parsed.api, body), most)
        return _tokenized(status, answer, body)

    async def _post(self, url: str, body: bytes, most: int) -> tuple[int, bytes]:
        headers = await self._token.headers()
        async with self._session.open().post(url, data=body, headers=headers, allow_redirects=False) as response:
            large = _NoAnswer(f"an answer of more than {most} bytes")
            return response.status, await read_at_most(response.content, most, large)


def _is_of_model(answer: bytes) -> bool:
    """Whether an answer with status 404 is about an unknown model. About an unknown path, vLLM and others say
    `{"detail": "Not Found"}`, and llama.cpp `{"error": {"message": "File Not Found", …}}`."""
    return b'"error"' in answer and b"model" in answer


def _other_status(status: int, answer: bytes, what: str = "") -> _NoAnswer:
    """What is raised for an answer that is not 200."""
    refused = _is_of_model(answer) if status == 404 else status in _REFUSALS
    return (_Refused if refused else _NoAnswer)(f"{what}status {status}: {answer[:100]!r}")


def _rendered(status: int, answer: bytes) -> PromptTokens:
    """Read the answer of `…/render`: an object or, for completions, a list with an object for each prompt."""
    if status != 200:
        raise _other_status(status, answer)
    try:
        decoded = _decode_rendered(answer)
    except (DecodeError, ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise _NoAnswer(f"an answer without token ids: {error}") from None
    prompts = decoded if isinstance(decoded, list) else [decoded]
    if not prompts:
        raise _NoAnswer("an answer without a prompt")
    first = prompts[0]
    total = sum(len(prompt.token_ids) for prompt in prompts)
    try:
        media = first.media()
    except ValueError as error:
        raise _NoAnswer(str(error)) from None
    return PromptTokens(packed(first.token_ids), total, salt=first.cache_salt or "", media=media)


def _tokenized(status: int, answer: bytes, body: bytes) -> PromptTokens:
    if status != 200:
        raise _other_status(status, answer, "/tokenize: ")
    try:
        ids = _decode_tokenized(answer).tokens
        salt = _decode_salt(body).cache_salt
    except (DecodeError, ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise _NoAnswer(f"/tokenize: an answer without tokens: {error}") from None
    if not ids:  # that of llama.cpp, which expects other fields
        raise _NoAnswer("/tokenize: no tokens")
    return PromptTokens(packed(ids), len(ids), salt=salt or "")


def _prompt_only(api: str, body: bytes) -> bytes:
    """The members of a body that make up the prompt, as they were sent."""
    try:
        fields = _decode_fields(body)
    except (DecodeError, ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise _Refused(f"a body that cannot be taken apart: {error}") from None
    for name in _NOT_TAKEN[api]:
        if is_sent(fields.get(name, ABSENT)):
            raise _Refused(f"'{name}' changes the prompt, and /tokenize does not take it", FIELDS)
    kept = {name: fields[name] for name in _PROMPT_FIELDS[api] if name in fields}
    prompt = bytes(kept.get("prompt", b""))
    if api == apis.COMPLETIONS and (prompt == b'""' or not prompt.startswith(b'"')):
        raise _Refused("/tokenize takes one text only")
    return msgspec.json.encode(kept)


# Checks that an engine and Fairlead make the same token ids of a prompt. If their ids differ, no block of the exact
# index ever matches, and no other check finds that.
#
# A few probes are encoded here and by an engine. The caller chooses the engine and the time: once per model and engine
# version is enough.

_TEXT = "Naïve  café: 12345 = 3.14?\n\n\tdef f(x):\n        return x  # 你好 👍🏽\n"
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
_ASKED = {"role": "user", "content": _TEXT}
_ANSWER = {"role": "assistant", "content": "Well."}

#: The probes by name: (path, body).
PROBES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": _TEXT}),
    "chat": ("/v1/chat/completions", {"messages": [_ASKED]}),
    "system and turns": (
        "/v1/chat/completions",
        {"messages": [{"role": "system", "content": "Be brief."}, _ASKED, _ANSWER, _ASKED]},
    ),
    "tools": ("/v1/chat/completions", {"messages": [_ASKED], "tools": [_TOOL]}),
    "developer": ("/v1/chat/completions", {"messages": [{"role": "developer", "content": "Be brief."}, _ASKED]}),
    "responses": ("/v1/responses", {"input": _TEXT}),
}


class TokenCheckResult(Struct, frozen=True):
    """The result of a token check. `agreed` and `differing` are names of probes; a probe that either side could not
    encode is in neither."""

    agreed: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()
    #: The result in words: `agrees`, `differs: …` or `unknown: …`.
    state: str = ""


async def compare(tokeniser: PromptTokeniser, client: RenderClient, url: str, model: str) -> TokenCheckResult:
    """Compare the ids of all probes with the engine's at `url` (`http://host:port`). Raises only if cancelled."""
    agreed: list[str] = []
    differing: list[str] = []
    first, why = "", ""
    for name, (path, fields) in PROBES.items():
        body = json.dumps({"model": model, "max_tokens": 1, **fields}).encode()
        parsed = parse_request(path, body)
        here = tokeniser.tokens_of(parsed, body, model)
        there = here if here.reason else await client.tokens_of(parsed, body, url)
        if there.reason:
            why = why or f"{name}: {there.reason}: {there.detail}"
        elif here.ids == there.ids:
            agreed.append(name)
        else:
            differing.append(name)
            first = first or f"{name}: {_difference(here.ids, there.ids)}"
    if differing:
        state = f"differs: {first}"
    else:
        state = "agrees" if agreed else f"unknown: {why}"
    return TokenCheckResult(tuple(agreed), tuple(differing), state)


def _difference(here: bytes, there: bytes) -> str:
    ours, theirs = np.frombuffer(here, "<u4"), np.frombuffer(there, "<u4")
    shared = min(len(ours), len(theirs))
    unequal = np.flatnonzero(ours[:shared] != theirs[:shared])
    first = int(unequal[0]) if len(unequal) else shared
    differing = f"from token {first}: {_shown(ours, first)} and {_shown(theirs, first)}"
    return f"{len(ours)} tokens here, {len(theirs)} there; {differing}"


def _shown(ids: "np.ndarray[Any, Any]", start: int) -> str:
    return ", ".join(map(str, ids[start : start + 4].tolist())) or "none"
