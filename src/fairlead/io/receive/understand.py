"""Headers and body of a request → `Request`: the one place where client input becomes something to schedule."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from itertools import count

from fairlead.fleet.conversations import Conversations
from fairlead.fleet.prefix import ChainHasher
from fairlead.model.request import NO_PREFIX, PrefixChain, Request
from fairlead.parse.api import STREAMING, api_of
from fairlead.parse.request import ParsedRequest, parse_request, unread
from fairlead.parse.tokens import TokenEstimator
from fairlead.route import headers as names
from fairlead.route.wishes import MAX_NAME, WishReader, first, within


class Understanding:
    """Makes `Request`s. `ids` are internal and rise by one; nothing a client sends can collide with them.

    `conversations`: recognise a conversation by its prompts when the client names neither session nor user.
    `trusted`: whose headers of a client are listened to, keys of `route.headers.TRUST`.
    `parse`: called as `parse_request` is; parser plugins may stand before that.
    """

    def __init__(
        self,
        tokens: TokenEstimator,
        hasher: ChainHasher,
        now: Callable[[], float],
        conversations: bool = True,
        trusted: Iterable[str] = names.TRUSTED,
        parse: Callable[..., ParsedRequest] = parse_request,
    ) -> None:
        self._tokens = tokens
        self._hasher = hasher
        self._now = now
        self._parse = parse
        self._wishes = WishReader(trusted)
        self._ids = count(1)
        self._conversations = Conversations() if conversations else None
        #: Takes a request's id, parsed body, body and model, and returns its number of prompt tokens, 0 = unknown. For
        #: who wants to know the prompt itself before the request arrives; `None` = nobody does.
        self.read_prompt: Callable[[int, ParsedRequest, bytes, str], int] | None = None
        #: Told each request and its headers; `None` = nobody wants to know.
        self.on_request: Callable[[Request, Mapping[str, str]], object] | None = None
        #: Requests whose prompts are still being read; the result is the number of tokens, 0 = unknown.
        self.reading: Mapping[int, asyncio.Task[int]] = {}

    def api(self, headers: Mapping[str, str]) -> str:
        """The API of a request, for answers to one that cannot be understood."""
        return api_of(_path(headers))

    def request(self, headers: Mapping[str, str], body: bytes, subset: frozenset[str] | None) -> Request:
        """Raises `ClientError` when the body cannot be understood by any model server either."""
        path = _path(headers)
        if body:
            parsed = self._parse(
                path,
                body,
                headers.get("content-type", ""),
                content_encoding=headers.get("content-encoding", ""),
            )
        else:  # none was sent, or the gateway does not show it: whether that is right the model server knows
            parsed = unread(api_of(path), "no-body")
        wishes = self._wishes.read(headers)
        if wishes.selection is not None:
            subset = within(subset, wishes.selection)
        prefix, recognised = self._recognise(parsed, wishes.session or parsed.user)
        number, counted = next(self._ids), parsed.prompt_tokens
        if self.read_prompt is not None:
            counted = self.read_prompt(number, parsed, body, wishes.rewrite or parsed.model) or counted
        request = Request(
            id=number,
            arrived=self._now(),
            api=parsed.api,
            path=path,
            model=parsed.model,
            rewrite=wishes.rewrite,
            objective=wishes.objective,
            stream=parsed.stream,
            body_bytes=len(body),
            prompt_bytes=parsed.prompt_bytes,
            prompt_tokens=counted or self._tokens.estimate(parsed.model, parsed.prompt_bytes, parsed.api),
            max_tokens=parsed.max_tokens,
            prefix=prefix,
            media=parsed.media,
            unread=parsed.unread,
            session=recognised,
            fairness_id=wishes.fairness_id,
            subset=subset,
            slo_ttft_ms=wishes.slo_ttft_ms,
            slo_tpot_ms=wishes.slo_tpot_ms,
            ttl_s=wishes.ttl_s,
            external_id=headers.get(names.REQUEST_ID, "")[:MAX_NAME],
        )
        if self.on_request is not None:
            self.on_request(request, headers)
        return request

    def _recognise(self, parsed: ParsedRequest, named: str) -> tuple[PrefixChain, str]:
        """The prompt's chain, and the session: as `named`, else recognised by the prompt."""
        segments = parsed.prompt
        if not segments:
            return NO_PREFIX, named[:MAX_NAME]
        text = segments[0] if len(segments) == 1 else b"".join(segments)
        prefix = self._hasher.chain(parsed.root, (text,))
        if named or self._conversations is None or parsed.api not in STREAMING:
            return prefix, named[:MAX_NAME]
        return prefix, self._conversations.of(prefix, text)


def _path(headers: Mapping[str, str]) -> str:
    return headers.get(":path") or first(headers, names.PATH_HEADERS)
