"""Read the models and adapters of each endpoint from `/v1/models`. Metrics pages name an adapter only while it is used.

Rules
* An endpoint is queried when it comes up and then every `ScrapeOptions.models_s` (up to a fifth more or less, to spread
  the queries), at most `AT_ONCE` at a time and `MOST_RATE` per second: with many endpoints the period is longer.
* After a 404 for a model (`look`), its endpoint is queried immediately and all others soon, because the adapter may
  have been loaded at one of them. Clients choose the names, so no endpoint is queried twice within `SOON` seconds.
* A list is reported if it changed, or was queried because of a 404. A server that refuses (4xx) has no list: `None`. A
  server that cannot be reached, or answers with a broken page, is tried again after `RETRY` seconds, then twice that,
  …; its last list stays in force. If that was the first attempt, `None` is reported, and requests need not wait for it.
* After a list, a refusal counts only if it is the third in a row (`REFUSALS`) and the metrics page is read: while an
  engine restarts, a sidecar or another process at its address may answer 404 to everything.
* The bearer token is sent only if the metrics page is at the same address.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from math import inf
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from fairlead.core.endpoint import NOT_READ, BaseModels, Endpoint
from fairlead.core.events import AdaptersListed
from fairlead.core.models import ModelCard
from fairlead.pool.scrape import Pace, ScrapeError, ScrapeOptions, SecureFetcher

PATH = "/v1/models"
AT_ONCE, MOST_RATE = 16, 20.0
SOON, RETRY, TIMEOUT = 1.0, 2.0, 5.0
REFUSALS = 3
MAX_PAGE = 1 << 20
#: Lists of more models are refused, and longer names are left out.
MOST_NAMES, MOST_LETTERS = 10_000, 1024
#: A context of this many tokens or more is ignored.
LONGEST = 1 << 53

log = logging.getLogger(__name__)


class _Model(Struct, gc=False):
    id: str = ""
    parent: str | None = None
    #: vLLM and SGLang give it. The value may have any type.
    max_model_len: Any = None

    @property
    def context(self) -> float:
        tokens = self.max_model_len
        return tokens if type(tokens) is int and 0 < tokens < LONGEST else inf


class _Page(Struct, gc=False):
    data: list[Raw]


class ModelList(Struct, frozen=True):
    """A server's base models, and the names of its adapters; `None` = it refuses to list them."""

    base: BaseModels = BaseModels()
    adapters: frozenset[str] | None = None
    #: The entries of base models and adapters, by name.
    entries: Mapping[str, ModelCard] = {}

    def names_as(self, newer: "ModelList") -> bool:
        """Whether the names and contexts are equal. Entries are not compared: they have a new date each time."""
        return self.base == newer.base and self.adapters == newer.adapters


def read_model_list(page: bytes) -> ModelList:
    """Read the body of `/v1/models`. Raises `ValueError` if it is malformed, or lists more than `MOST_NAMES`."""
    try:
        raw = msgspec.json.decode(page, type=_Page).data
        if len(raw) > MOST_NAMES:
            raise ValueError(f"a list of more than {MOST_NAMES} models")
        cards = [(msgspec.json.decode(said, type=_Model), said) for said in raw]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"no list of models: {error}") from None
    cards = [(card, said) for card, said in cards if 0 < len(card.id) <= MOST_LETTERS]
    base = frozenset(card.id for card, _ in cards if not card.parent)
    own = {card.id: card.context for card, _ in cards if card.context < inf}
    # vLLM gives adapters no context of their own.
    entries = {card.id: ModelCard(said, own.get(card.id) or own.get(card.parent or "", inf)) for card, said in cards}
    contexts = {name: int(entries[name].context) for name in base if entries[name].context < inf}
    adapters = frozenset(card.id for card, _ in cards if card.parent)
    return ModelList(BaseModels(base, contexts), adapters, entries)


class _Target(Struct, eq=False):
    """An endpoint, and when it is queried."""

    endpoint: Endpoint
    timer: asyncio.TimerHandle | None = None
    due: float = 0.0
    task: asyncio.Task[None] | None = None
    read_at: float = -SOON
    fails: int = 0
    #: Refusals in a row.
    refused: int = 0
    #: The list reported last.
    listed: ModelList = ModelList(NOT_READ)
    #: Report the next list even if it is unchanged.
    looked: bool = False


class ServedModels:
    """Queries endpoints and feeds `AdaptersListed`. Make all calls on the loop's thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        feed: Callable[[AdaptersListed], object],
        options: ScrapeOptions,
        rng: random.Random | None = None,
        pace: Pace | None = None,
        scraped: Callable[[str], bool] = lambda endpoint_id: True,
    ) -> None:
        """`pace`: shared with everything that queries endpoints; `None` = nothing else does. `scraped`: whether the
        last scrape of an endpoint succeeded."""
        self._pace, self._scraped = pace, scraped
        #: Seconds between two queries of an endpoint; 0 = none is queried.
        self.period_s = options.models_s
        self._loop, self._feed = loop, feed
        self._rng = rng or random.Random()
        options = replace(options, max_page=MAX_PAGE)
        own = replace(options, token_file=options.upstream_token_file)
        trusted = own if options.upstream_token_file else options
        self._trusted = SecureFetcher(trusted, accept="application/json", keep=False)
        self._plain = SecureFetcher(own, accept="application/json", keep=False)
        self._targets: dict[str, _Target] = {}
        self._free = asyncio.Semaphore(AT_ONCE)
        #: Whether endpoints serve different names, and the union of all names; `None` = to be computed again.
        self._union: tuple[bool, Mapping[str, ModelCard]] | None = None
        #: Whether there are endpoints, and each has listed its models; `None` = to be computed again.
        self._all_known: bool | None = None
        #: How many lists were reported.
        self.reported = 0

    def up(self, endpoint: Endpoint) -> None:
        """Query an endpoint from now on, or take note that it changed."""
        old = self._targets.get(endpoint.id)
        if old is not None and old.endpoint.address == endpoint.address:
            old.endpoint = endpoint
        elif self.period_s:
            self.down(endpoint.id)
            target = self._targets[endpoint.id] = _Target(endpoint)
            self._all_known = None
            self._schedule(target, 0.0)

    def down(self, endpoint_id: str) -> None:
        target = self._targets.pop(endpoint_id, None)
        if target is None:
            return
        self._union = self._all_known = None
        if target.timer is not None:
            target.timer.cancel()
        if target.task is not None:
            target.task.cancel()

    def look(self, endpoint_id: str) -> None:
        """Query an endpoint, which answered 404 for a possible adapter, immediately, and all others soon."""
        now = self._loop.time()
        soon = max(SOON, len(self._targets) / MOST_RATE)
        for name, target in self._targets.items():
            due = max(target.read_at + SOON, now) if name == endpoint_id else max(target.read_at, now - soon) + soon
            target.looked = True
            if target.task is None and due < target.due:
                self._schedule(target, due - now)

    def names(self) -> Iterator[str]:
        """Yield the models and adapters that endpoints serve; a name once for each endpoint that serves it."""
        for target in self._targets.values():
            yield from target.listed.entries

    def lists(self) -> Iterator[ModelList]:
        """Yield what each endpoint listed last."""
        for target in self._targets.values():
            yield target.listed

    def union(self, alike: bool) -> Mapping[str, ModelCard]:
        """All names that endpoints serve. Each has the entry of the endpoint with the shortest context.

        If all endpoints serve the same names, the result is empty unless `alike`: any endpoint can give that list.
        """
        if self._union is None:
            lists = [target.listed.entries for target in self._targets.values() if target.listed.entries]
            shortest: dict[str, ModelCard] = {}
            for name, entry in chain.from_iterable(entries.items() for entries in lists):
                if name not in shortest or entry.context < shortest[name].context:
                    shortest[name] = entry
            unlike = any(entries.keys() != lists[0].keys() for entries in lists)
            self._union = unlike, shortest
        unlike, names = self._union
        return names if unlike or alike else {}

    def knows_all(self) -> bool:
        """Whether there are endpoints, and each of them has listed its models."""
        if self._all_known is None:
            targets = self._targets.values()
            self._all_known = bool(targets) and all(target.listed.entries for target in targets)
        return self._all_known

    def settled(self) -> bool:
        """Whether each endpoint has answered the last query, with a list or that it has none."""
        return all(not target.listed.base.unread and not target.fails for target in self._targets.values())

    async def close(self) -> None:
        tasks = [target.task for target in self._targets.values() if target.task is not None]
        for endpoint_id in list(self._targets):
            self.down(endpoint_id)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._trusted.close()
        await self._plain.close()

    def _schedule(self, target: _Target, delay: float) -> None:
        if target.timer is not None:
            target.timer.cancel()
        target.due = self._loop.time() + delay
        target.timer = self._loop.call_later(delay, self._start, target)

    def _start(self, target: _Target) -> None:
        target.timer = None
        target.task = self._loop.create_task(self._ask(target))

    async def _ask(self, target: _Target) -> None:
        url, trusted = _address(target.endpoint)
        fetcher = self._trusted if trusted else self._plain
        listed, looked, problem = ModelList(), False, ""
        try:
            async with self._free, asyncio.timeout(TIMEOUT):
                target.read_at = self._loop.time()
                looked, target.looked = target.looked, False
                listed = read_model_list(await fetcher.fetch(url))
        except ScrapeError as error:
            target.refused = target.refused + 1 if error.answered else 0
            problem = "" if self._refuses(target) else str(error)
        except (TimeoutError, ValueError) as error:
            target.refused, problem = 0, str(error) or "no answer in time"
        else:
            target.refused = 0
        target.task = self._union = self._all_known = None
        self._schedule(target, self._pause(target, problem))
        if problem:
            target.looked |= looked
            log.debug("%s: %s", url, problem)
            if not target.listed.base.unread:
                return
        news, target.listed = looked or not listed.names_as(target.listed), listed
        if news:
            self.reported += 1
            self._feed(AdaptersListed(target.endpoint.id, listed.adapters, listed.base))

    def _refuses(self, target: _Target) -> bool:
        """Whether an endpoint has no list any more, or never had one."""
        if target.listed.adapters is None:
            return target.refused > 0
        return target.refused >= REFUSALS and self._scraped(target.endpoint.id)

    def _pause(self, target: _Target, problem: str) -> float:
        """The seconds until the endpoint is queried again."""
        among = self._pace.targets if self._pace is not None else len(self._targets)
        period = max(self.period_s, among / MOST_RATE) * self._rng.uniform(0.8, 1.2)
        if problem:
            target.fails += 1
            return min(RETRY * 2.0 ** min(target.fails - 1, 16), period)
        target.fails = 0
        return SOON if target.looked else period


def _address(endpoint: Endpoint) -> tuple[str, bool]:
    """The URL of an endpoint's list, and whether the metrics page is at the same address."""
    page = urlsplit(endpoint.scrape_url)
    same = page.netloc == endpoint.address
    return f"{page.scheme if same else 'http'}://{endpoint.address}{PATH}", same
