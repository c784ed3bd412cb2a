"""What an explanation consists of; its JSON has the same names."""

from msgspec import Struct


class Candidate(Struct, frozen=True, kw_only=True):
    """One endpoint in one decision. Tokens and requests are what was believed at that moment."""

    endpoint: str
    chosen: bool
    #: The filters that spoke against it.
    removed_by: tuple[str, ...] = ()
    cached_tokens: int = 0
    queued_requests: float = 0.0
    queued_tokens: float = 0.0
    running_requests: float = 0.0
    kv_usage: float = 0.0
    #: `None` = it was not rated.
    total: float | None = None
    #: How far it is behind the chosen one.
    behind: float | None = None
    terms: dict[str, float] = {}
    #: With so many more cached prompt tokens, or so many fewer queued ones, it would have tied; `None` = with none.
    more_cached_tokens: int | None = None
    fewer_queued_tokens: float | None = None


class Explanation(Struct, frozen=True, kw_only=True):
    """`unit` is `ms` (of cost, negative) or `points`."""

    policy: str
    unit: str
    endpoint: str
    reproduced: bool
    #: The chosen one first, then by total.
    candidates: tuple[Candidate, ...] = ()
    why: tuple[str, ...] = ()
