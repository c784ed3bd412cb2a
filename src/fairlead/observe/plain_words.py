"""What is not as it should be, in sentences that say what follows from it. The gravest first; empty = all is well.

Rules
* One sentence per cause, not per endpoint: a hundred silent endpoints are one sentence with a count.
* Only what is so now, or was within the last minute.
"""

from collections.abc import Callable, Iterable, Sequence
from math import inf

from fairlead.fleet.fleet import ERRORS_TO_EJECT
from fairlead.observe.snapshot_shape import EndpointRow, Notice, Queues
from fairlead.observe.watch import Watch
from fairlead.schedule.breaker import CLOSED

BAD, WATCH = "bad", "watch"
#: Names in one sentence.
_NAMED = 3
#: Forecasts of a minute from which on their share within the band is judged, and what it must be. They promise 0.9.
_ENOUGH, _LEAST_INSIDE = 50, 0.6
#: Seconds that somebody waits before it is worth a sentence.
_LONG_WAIT = 5.0


class Happened:
    """Counters that only ever grow, watched for growth within the last minute."""

    def __init__(self, minute: float = 60.0) -> None:
        self._minute = minute
        #: By name: the count last seen, and when it last grew.
        self._seen: dict[str, tuple[float, float]] = {}

    def lately(self, name: str, count: float, now: float) -> bool:
        """Whether `count` grew within the last minute, as far as was looked."""
        before, grew = self._seen.get(name, (count, -inf))
        if count > before:
            grew = now
        self._seen[name] = count, grew
        return now - grew < self._minute


def notices(
    watch: Watch,
    endpoints: Sequence[EndpointRow],
    queues: Queues | None,
    reasons: Sequence[str],
    happened: Happened,
    now: float,
) -> list[Notice]:
    """`reasons`: why we are not ready."""
    found = [Notice(BAD, f"Not ready: {reason}.") for reason in reasons]
    found += _silent(endpoints)
    found += _avoided(endpoints)
    found += _pressure(watch, queues)
    found += _choosers(watch)
    found += _failing(watch, happened, now)
    found += _events(watch)
    found += _forecasts(endpoints)
    found += _kubernetes(watch)
    return sorted(found, key=lambda notice: notice.level != BAD)


def _silent(endpoints: Iterable[EndpointRow]) -> Iterable[Notice]:
    rows = list(endpoints)
    silent = [row for row in rows if not row.fresh and row.age_s is not None]
    never = [row for row in rows if not row.fresh and row.age_s is None]
    level = BAD if rows and len(silent) + len(never) == len(rows) else WATCH
    if len(silent) == 1:
        row = silent[0]
        yield Notice(
            level,
            f"Endpoint {row.id} has not answered a scrape for {_seconds(row.age_s or 0.0)}; "
            "its load is estimated from our own requests.",
        )
    elif silent:
        age = _seconds(min(row.age_s or 0.0 for row in silent))
        yield Notice(
            level,
            f"{_some(silent, len(rows))} have not answered a scrape for {age} or more; "
            "their load is estimated from our own requests.",
        )
    if never:
        verb = "has" if len(never) == 1 else "have"
        yield Notice(
            level, f"{_some(never, len(rows))} {verb} never answered a scrape; nothing is known but what we sent there."
        )


def _avoided(endpoints: Iterable[EndpointRow]) -> Iterable[Notice]:
    rows = list(endpoints)
    avoided = [row for row in rows if row.avoided_s > 0.0]
    if avoided:
        verb = "is" if len(avoided) == 1 else "are"
        yield Notice(
            BAD, f"{_some(avoided, len(rows))} {verb} avoided for now after {ERRORS_TO_EJECT} failed answers in a row."
        )


def _pressure(watch: Watch, queues: Queues | None) -> Iterable[Notice]:
    if watch.metrics.scale_up_wanted():
        yield Notice(BAD, "All endpoints were overloaded within the last minute; more replicas are wanted.")
    if queues is not None and queues.waiting:
        oldest = max(band.oldest_s for band in queues.bands)
        if oldest >= _LONG_WAIT:
            wait = "1 request waits" if queues.waiting == 1 else f"{queues.waiting:,} requests wait"
            yield Notice(
                WATCH, f"{wait} in the queue, the longest for {_seconds(oldest)}; no endpoint has room for more."
            )


def _choosers(watch: Watch) -> Iterable[Notice]:
    for name, policy in watch.choosers.remotes().items():
        if not policy.connected:
            yield Notice(BAD, f"The external scheduler '{name}' is not connected; the built-in policy decides.")
        elif policy.breaker.state != CLOSED:
            yield Notice(BAD, f"The external scheduler '{name}' failed too often; the built-in policy decides for now.")
    for name, reason in watch.shadows.cut().items():
        yield Notice(WATCH, f"The shadow '{name}' is cut off ({reason}); traffic is not affected.")


def _events(watch: Watch) -> Iterable[Notice]:
    fleet = watch.fleet
    exact = fleet.exact
    if exact is None:
        return
    for slot, endpoint in fleet.table.slots():
        trust, finding = exact.check.trust(slot), exact.check.finding(slot)
        if trust.distrusted:
            cause = f" Likely cause: {finding.detail or finding.cause}." if finding else ""
            yield Notice(
                WATCH,
                f"KV events of endpoint {endpoint.id} are not believed: predictions came true in {trust.level:.0%} of "
                f"the last answers; learned knowledge is used instead.{cause}",
            )
        elif any(cache.heard and not cache.linked for cache in exact.index.caches_of(slot)):
            yield Notice(WATCH, f"KV events of endpoint {endpoint.id} have stopped; its cache is known up to then.")


def _forecasts(endpoints: Iterable[EndpointRow]) -> Iterable[Notice]:
    rows = [row for row in endpoints if row.judged]
    judged = sum(row.judged for row in rows)
    if judged < _ENOUGH:
        return
    inside = sum(row.judged * (row.inside or 0.0) for row in rows) / judged
    if inside < _LEAST_INSIDE:
        yield Notice(
            WATCH,
            f"Only {inside:.0%} of the last minute's first tokens came within their forecast's 90 % band; "
            "decisions rest on forecasts that are off.",
        )


def _kubernetes(watch: Watch) -> Iterable[Notice]:
    lost = [resource for resource, followed in watch.kube.source().items() if not followed.connected]
    if lost:
        yield Notice(BAD, f"The API server does not answer for {', '.join(lost)}; the last known state stays in force.")


def _some(rows: Sequence[EndpointRow], of: int) -> str:
    names = ", ".join(row.id for row in rows[:_NAMED])
    if len(rows) == 1:
        return f"Endpoint {names}"
    more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    return f"{len(rows)} of {of} endpoints ({names}{more})"


def _seconds(value: float) -> str:
    if value < 120.0:
        return f"{value:.0f} s"
    return f"{value / 60.0:.0f} min" if value < 7200.0 else f"{value / 3600.0:.0f} h"


def _failing(watch: Watch, happened: Happened, now: float) -> Iterable[Notice]:
    """Of counters of things that should not happen."""
    families = watch.metrics.families
    rows: tuple[tuple[str, float, str, Callable[[float], str]], ...] = (
        (
            "past", sum(c.value for c in families.fallbacks.children.values()), BAD,
            lambda n: f"The gateway serves requests without asking us ({n:,.0f} since the start); it could not reach "
            "the scheduler, or not in time.",
        ),
        (
            "expired", families.expired.child().value, WATCH,
            lambda n: f"The end of some requests is never told ({n:,.0f} since the start); check the gateway's access "
            "log.",
        ),
    )  # fmt: skip
    for name, count, level, text in rows:
        if happened.lately(name, count, now):
            yield Notice(level, text(count))
    for (plugin,), counter in families.plugin_errors.children.items():
        if happened.lately(f"plugin {plugin}", counter.value, now):
            yield Notice(
                BAD, f"The plugin '{plugin}' fails ({counter.value:,.0f} times since the start) and is left out."
            )
