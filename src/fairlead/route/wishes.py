"""What a client's headers ask of the scheduler, as far as the configuration trusts them."""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from fairlead.route import headers as names

#: Client-chosen strings that are kept are cut to this.
MAX_NAME = 256


class Wishes(Struct, frozen=True, kw_only=True, gc=False):
    """Empty or 0 = not asked for."""

    session: str = ""
    fairness_id: str = ""
    objective: str = ""
    #: The model to ask the endpoint for.
    rewrite: str = ""
    slo_ttft_ms: float = 0.0
    slo_tpot_ms: float = 0.0
    #: Seconds that it may wait in a queue.
    ttl_s: float = 0.0
    #: Addresses to choose from; `None` = any.
    selection: frozenset[str] | None = None


NO_WISHES = Wishes()


class WishReader:
    """`trusted`: keys of `headers.TRUST`."""

    def __init__(self, trusted: Iterable[str] = names.TRUSTED) -> None:
        trusted = frozenset(trusted)
        self._read = frozenset(name for key in trusted for name in names.TRUST[key])
        self._session = names.SESSION_HEADERS if "session" in trusted else ()
        self._fairness = names.FAIRNESS_HEADERS if "fairness" in trusted else ()
        self._objective = names.OBJECTIVE_HEADERS if "objective" in trusted else ()
        self._rewrite = names.REWRITE_HEADERS if "model-rewrite" in trusted else ()
        self._ttft = names.TTFT_SLO_HEADERS if "slo" in trusted else ()
        self._tpot = names.TPOT_SLO_HEADERS if "slo" in trusted else ()
        self._ttl = names.TTL_HEADERS if "slo" in trusted else ()
        self._selection = (names.TEST_SELECTION,) if "test-selection" in trusted else ()

    def read(self, headers: Mapping[str, str]) -> Wishes:
        if self._read.isdisjoint(headers):
            return NO_WISHES
        selection = first(headers, self._selection, limit=65536) if self._selection else ""
        return Wishes(
            session=first(headers, self._session),
            fairness_id=first(headers, self._fairness),
            objective=_text(first(headers, self._objective)),
            rewrite=_text(first(headers, self._rewrite)),
            slo_ttft_ms=_milliseconds(first(headers, self._ttft)),
            slo_tpot_ms=_milliseconds(first(headers, self._tpot)),
            ttl_s=_milliseconds(first(headers, self._ttl)) / 1000.0,
            selection=_addresses(selection) if selection else None,
        )


def first(headers: Mapping[str, str], candidates: Iterable[str], limit: int = MAX_NAME) -> str:
    """The value of the first of these headers that says something."""
    for name in candidates:
        value = headers.get(name)
        if value:
            return value[:limit]
    return ""


def within(subset: frozenset[str] | None, selection: frozenset[str] | None) -> frozenset[str] | None:
    """What both the gateway's hint and the client's selection allow; each entry is `ip` or `ip:port`."""
    if subset is None or selection is None:
        return selection if subset is None else subset
    return _those(subset, selection) | _those(selection, subset)


def _those(some: frozenset[str], allowed: frozenset[str]) -> frozenset[str]:
    return frozenset(one for one in some if one in allowed or _host(one) in allowed)


def _host(address: str) -> str:
    """`10.0.0.1:80` → `10.0.0.1`; `[::1]:80` → `::1`."""
    host = address.rpartition(":")[0] if "]" in address or address.count(":") == 1 else address
    return (host or address).strip("[]")


def _addresses(text: str) -> frozenset[str]:
    return frozenset(entry.strip() for entry in text.split(",") if entry.strip())


def _text(value: str) -> str:
    """Names may be UTF-8, which headers carry as bytes."""
    if value.isascii():
        return value.strip()
    try:
        return value.encode("latin-1").decode().strip()
    except UnicodeError:
        return value.strip()


def _milliseconds(text: str) -> float:
    """A positive number of ms; anything else is none."""
    if not text:
        return 0.0
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 < value < 1e9 else 0.0
