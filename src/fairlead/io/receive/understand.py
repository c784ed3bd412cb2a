"""Headers and body of a request → `Request`: the one place where client input becomes something to schedule."""

from collections.abc import Callable, Mapping
from itertools import count

from fairlead.fleet.prefix import ChainHasher
from fairlead.model.request import NO_PREFIX, Request
from fairlead.parse.request import UNREAD_PATH, parse_request
from fairlead.parse.tokens import TokenEstimator
from fairlead.route import headers as names

#: Client-chosen strings that are kept are cut to this.
MAX_NAME = 256


class Understanding:
    """Makes `Request`s. `ids` are internal and rise by one; nothing a client sends can collide with them."""

    def __init__(self, tokens: TokenEstimator, hasher: ChainHasher, now: Callable[[], float]) -> None:
        self._tokens = tokens
        self._hasher = hasher
        self._now = now
        self._ids = count(1)

    def request(self, headers: Mapping[str, str], body: bytes, subset: frozenset[str] | None) -> Request:
        """Raises `ClientError` when the body cannot be understood by any model server either."""
        path = headers.get(":path") or _first(headers, names.PATH_HEADERS)
        if body:
            parsed = parse_request(
                path,
                body,
                headers.get("content-type", ""),
                content_encoding=headers.get("content-encoding", ""),
            )
        else:  # none was sent, or the gateway does not show it: whether that is right the model server knows
            parsed = UNREAD_PATH
        session = fairness = ""
        ttft = tpot = 0.0
        if not names.RARE_HEADERS.isdisjoint(headers):
            session = _first(headers, names.SESSION_HEADERS)
            fairness = _first(headers, names.FAIRNESS_HEADERS)
            ttft = _milliseconds(_first(headers, names.TTFT_SLO_HEADERS))
            tpot = _milliseconds(_first(headers, names.TPOT_SLO_HEADERS))
        return Request(
            id=next(self._ids),
            arrived=self._now(),
            api=parsed.api,
            path=path,
            model=parsed.model,
            stream=parsed.stream,
            body_bytes=len(body),
            prompt_bytes=parsed.prompt_bytes,
            prompt_tokens=parsed.prompt_tokens or self._tokens.estimate(parsed.model, parsed.prompt_bytes, parsed.api),
            max_tokens=parsed.max_tokens,
            prefix=self._hasher.chain(parsed.root, parsed.prompt) if parsed.prompt else NO_PREFIX,
            session=session,
            fairness_id=fairness,
            subset=subset,
            slo_ttft_ms=ttft,
            slo_tpot_ms=tpot,
            external_id=headers.get(names.REQUEST_ID, "")[:MAX_NAME],
        )


def _first(headers: Mapping[str, str], candidates: tuple[str, ...]) -> str:
    for name in candidates:
        value = headers.get(name)
        if value:
            return value[:MAX_NAME] if name[0] != ":" else value
    return ""


def _milliseconds(text: str) -> float:
    """A positive number of ms; anything else is no SLO."""
    if not text:
        return 0.0
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 < value < 1e9 else 0.0
