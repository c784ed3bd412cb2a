"""Headers and body of a request → `Request`: the one place where client input becomes something to schedule.

Headers give hints, as far as the configuration trusts them. The prompt tells which conversation the request goes on
with, if nobody says so.
"""

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from itertools import count
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from fairlead.apis.parsed import ParsedRequest, unread
from fairlead.apis.request import Parser, explained, parse_request, parser_of, too_large
from fairlead.core import headers as names
from fairlead.core.apis import EXACT, OTHER, STREAMING, api_of, read_path
from fairlead.core.errors import ClientError
from fairlead.core.prefix import ChainHasher
from fairlead.core.request import NO_PREFIX, RECOGNISED, PrefixChain, Request
from fairlead.core.tokens import TokenEstimator
from fairlead.gateway.ext_proc import Opening

#: Client-chosen strings that are kept are cut to this.
MAX_NAME = 256


class ClientHints(Struct, frozen=True, kw_only=True, gc=False):
    """What a client's headers ask of the scheduler. Empty or 0 = not asked for."""

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


NO_HINTS = ClientHints()


class HintReader:
    """`trusted`: keys of `core.headers.TRUST`."""

    def __init__(self, trusted: Iterable[str] = names.TRUSTED) -> None:
        trusted = frozenset(trusted)
        #: Where hints stand.
        self.names = frozenset(name for key in trusted for name in names.TRUST[key])
        self._session = names.SESSION_HEADERS if "session" in trusted else ()
        self._fairness = names.FAIRNESS_HEADERS if "fairness" in trusted else ()
        self._objective = names.OBJECTIVE_HEADERS if "objective" in trusted else ()
        self._rewrite = names.REWRITE_HEADERS if "model-rewrite" in trusted else ()
        self._ttft = names.TTFT_SLO_HEADERS if "slo" in trusted else ()
        self._tpot = names.TPOT_SLO_HEADERS if "slo" in trusted else ()
        self._ttl = names.TTL_HEADERS if "slo" in trusted else ()
        self._selection = (names.TEST_SELECTION,) if "test-selection" in trusted else ()

    def read(self, headers: Mapping[str, str]) -> ClientHints:
        if self.names.isdisjoint(headers):
            return NO_HINTS
        selection = first(headers, self._selection, limit=65536) if self._selection else ""
        return ClientHints(
            session=first(headers, self._session),
            fairness_id=_text(first(headers, self._fairness)),
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


def _those(named: frozenset[str], allowed: frozenset[str]) -> frozenset[str]:
    return frozenset(address for address in named if address in allowed or _host(address) in allowed)


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


#: See the rules of `Conversations`.
MAX_BRANCHES = 4
#: Prompts that agree up to the last grid point; of more the oldest is forgotten.
MAX_ALIKE = 16
#: Distance of grid points in bytes: at least this, and 1/256 of the depth (blocks are 1/32 of it).
_FINEST, _GROWTH = 64, 8
#: Grid points behind the last block; of a prompt that is longer than its chain the rest is not looked at.
_MAX_POINTS = 32


class _Prompt(Struct):
    """A prompt that was seen."""

    length: int
    #: Of the bytes behind the last grid point, chained.
    digest: int
    #: Hash of its last full block.
    stem: int
    #: Of its conversation; empty = nothing came before it, and nothing after it yet.
    id: str = ""
    #: Different prompts that extended it.
    branches: int = 0


class Conversations:
    """Which conversation a request belongs to, when nobody says so.

    Theory. Every turn of a conversation sends all former turns again, so the prompt of a turn begins with the prompt of
    the turn before. A conversation is therefore recognised by the exact bytes of prompts that were seen: a request
    belongs to the longest of them that its own prompt begins with, and takes over its id.

    Prompts are not kept. The hash of a prompt's last full block (`PrefixChain`) covers all before it; from there on a
    finer grid of chained hashes reaches to within 1/8 of a block of its end, and one more hash covers the rest. To look
    a request up, its own block hashes are tried from the deepest upwards; where prompts are known to end, the grid
    finds the ones that agree so far, and the last hash decides.

    Rules
    * The first prompt of a conversation has no id yet: most prompts stay alone, and a session that is none only costs
      (the session's endpoint is drawn by lot, so it would pull single requests away from the best one). From the second
      turn on the id stays.
    * A conversation that forks goes on in all its branches, as an agent's sub-tasks do. But a prompt that more than
      `MAX_BRANCHES` different ones extend is a shared beginning (a system prompt sent ahead to warm a cache, a
      template), and what extends it further are conversations of their own.
    * Former prompts of a conversation stay known, so a client that edits its last message is recognised by an earlier
      turn.
    * Ids are made of hashes alone: equal traffic gives equal ids, in every process.
    * Prompts shorter than the first block have no chain, and no conversation yet.
    * At most `limit` prompts are known (about 0.5 kB each); the one that was not met for longest is forgotten.
    """

    def __init__(self, limit: int = 32768) -> None:
        if limit < 1:
            raise ValueError(f"limit must be positive, not {limit}")
        self._limit = limit
        #: Hash at the last grid point → the prompts that end before the next one, all behind the same block; least
        #: recently met first.
        self._ends: OrderedDict[int, list[_Prompt]] = OrderedDict()
        #: Hash of a block → how many entries of `_ends` lie behind it and before the end of the next block.
        self._stems: dict[int, int] = defaultdict(int)
        self._known = 0

    def __len__(self) -> int:
        return self._known

    def of(self, chain: PrefixChain, prompt: bytes | memoryview) -> str:
        """The id of the conversation that `prompt` goes on with, and remember it. `chain` is the chain of `prompt`.

        Empty for a prompt that begins one, and for one that is too short to have a chain.
        """
        hashes = chain.hashes
        if not hashes:
            return ""
        last = chain.ends[-1]
        stem = key = hashes[-1]
        end = len(prompt)
        step, blocks = _tail(last)
        points = (end - last) // step
        start = last + step * points
        if points >= _MAX_POINTS:
            start = end = last + step * _MAX_POINTS
        for block in blocks[:points]:
            key = xxh3_64_intdigest(prompt[block], key)
        seen = _Prompt(end, xxh3_64_intdigest(prompt[start:end], key), stem)
        stems = self._stems
        if not stems.keys().isdisjoint(hashes):
            earlier = self._longest(chain, prompt, end)
            if earlier is not None:
                if earlier.length == end:
                    return earlier.id
                earlier.branches += 1
                if earlier.branches <= MAX_BRANCHES:
                    seen.id = earlier.id or f"{RECOGNISED}{earlier.digest:016x}"
        if key in self._ends:
            self._add_alike(key, seen)
        else:
            self._ends[key] = [seen]
            stems[stem] += 1
            self._known += 1
            if self._known > self._limit:
                self._forget()
        return seen.id

    def _longest(self, chain: PrefixChain, prompt: bytes | memoryview, end: int) -> _Prompt | None:
        """The longest known prompt that `prompt` begins with. `end`: of the grid behind its last block."""
        stems, hashes, ends = self._stems, chain.hashes, chain.ends
        last = len(hashes) - 1
        for i in range(last, -1, -1):
            if hashes[i] not in stems:
                continue
            points = _grid(prompt, ends[i], end if i == last else ends[i + 1] - 1, hashes[i])
            for start, key in reversed(points):
                alike = self._ends.get(key)
                if alike is None:
                    continue
                match = _match(alike, prompt, start, key, end)
                if match is not None:
                    self._ends.move_to_end(key)
                    return match
        return None

    def _add_alike(self, key: int, prompt: _Prompt) -> None:
        """Beside others that agree with it up to their last grid point."""
        alike = self._ends[key]
        self._ends.move_to_end(key)
        alike.append(prompt)
        if len(alike) > MAX_ALIKE:
            del alike[0]
            return
        self._known += 1
        while self._known > self._limit:
            self._forget()

    def _forget(self) -> None:
        """Let go of the prompts that were not met for longest."""
        _, alike = self._ends.popitem(last=False)
        self._known -= len(alike)
        stem = alike[0].stem
        if self._stems[stem] == 1:
            del self._stems[stem]
        else:
            self._stems[stem] -= 1

    def validate(self) -> None:
        """Raise `AssertionError` when the tables disagree or a bound is broken."""
        assert self._known == sum(map(len, self._ends.values())) <= self._limit
        counts: dict[int, int] = {}
        for alike in self._ends.values():
            counts[alike[0].stem] = counts.get(alike[0].stem, 0) + 1
        assert counts == self._stems
        assert all(0 < len(alike) <= MAX_ALIKE for alike in self._ends.values())


@lru_cache(maxsize=1024)  # as many as there are ends of blocks
def _tail(last: int) -> tuple[int, list[slice]]:
    """Behind the last block of a prompt, which ends there: the distance of grid points, and what is between them."""
    step = max(_FINEST, last >> _GROWTH)
    return step, [slice(start, start + step) for start in range(last, last + _MAX_POINTS * step, step)]


def _grid(prompt: bytes | memoryview, start: int, end: int, parent: int) -> list[tuple[int, int]]:
    """Grid points (offset, hash of all before) from the end of a block on, the block's own first."""
    step = max(_FINEST, start >> _GROWTH)
    ends = range(start + step, end + 1, step)
    return [
        (start, parent),
        *[(border, parent := xxh3_64_intdigest(prompt[border - step : border], parent)) for border in ends],
    ]


def _match(alike: list[_Prompt], prompt: bytes | memoryview, start: int, key: int, end: int) -> _Prompt | None:
    """The longest of some prompts that `prompt` begins with; they agree up to `start`."""
    best: _Prompt | None = None
    for candidate in alike:
        length = candidate.length
        if (
            length <= end
            and (best is None or length > best.length)
            and xxh3_64_intdigest(prompt[start:length], key) == candidate.digest
        ):
            best = candidate
    return best


#: Heads that are kept: one per opening, and of these as many as `ext_proc` keeps.
_MAX_HEADS = 256


class Head(Struct, frozen=True, gc=False):
    """What a request's headers say. That is the same in most requests, so it is read once for all that begin alike."""

    headers: Mapping[str, str]
    path: str = ""
    content_type: str = ""
    encoding: str = ""
    #: Reads a body that is not empty; `None` = only `Understanding.parse` does.
    parser: Parser | None = None
    hints: ClientHints = NO_HINTS
    #: Addresses that the gateway and the client allow; `None` = any.
    subset: frozenset[str] | None = None
    #: Headers that no model server gets.
    removed: frozenset[str] = frozenset()
    #: A POST that ended without a body. Else the gateway may not show one.
    empty: bool = False


NO_HEAD = Head({})


class PromptKnown(Struct, frozen=True, gc=False):
    """What was read of a prompt: how many tokens it has, 0 = unknown, and its blocks (`Request.blocks`)."""

    tokens: int = 0
    blocks: Any = None


Reading = asyncio.Task[PromptKnown]


class PromptReader(Protocol):
    def read(self, parsed: ParsedRequest, body: bytes, model: str) -> PromptKnown | Reading:
        """At once, or by a task that always ends within a second or two."""
        ...

    def offer(self, known: PromptKnown) -> Any:
        """The request is about to arrive. Returns its `blocks`."""


class Understanding:
    """Makes `Request`s. `ids` are internal and rise by one; nothing a client sends can collide with them.

    `conversations`: recognise a conversation by its prompts when the client names neither session nor user.
    `trusted`: whose headers of a client are listened to, keys of `core.headers.TRUST`.
    `parse`: called as `parse_request` is; parser plugins may stand before that.
    `prompts`: who wants to know the prompt itself before the request arrives.
    `trace`: gives each request, with its headers, its `Request.trace`.
    """

    def __init__(
        self,
        tokens: TokenEstimator,
        hasher: ChainHasher,
        now: Callable[[], float],
        conversations: bool = True,
        trusted: Iterable[str] = names.TRUSTED,
        parse: Callable[..., ParsedRequest] = parse_request,
        prompts: PromptReader | None = None,
        trace: Callable[[Request, Mapping[str, str]], Any] | None = None,
    ) -> None:
        self._tokens = tokens
        self._hasher = hasher
        self._now = now
        self._parse = parse
        self._hints = HintReader(trusted)
        self._ids = count(1)
        self._conversations = Conversations() if conversations else None
        self._prompts = prompts
        self._trace = trace
        #: Nobody but the parser reads a body: asked for every request.
        self._alone = prompts is None and trace is None
        #: The head of a request that begins as others do: one for all of them.
        self.known_head: Callable[[Opening], Head] = lru_cache(maxsize=_MAX_HEADS)(self._head_of)

    def api(self, headers: Mapping[str, str]) -> str:
        """The API of a request, for answers to one that cannot be understood."""
        return api_of(_path(headers))

    def head(self, headers: Mapping[str, str], subset: frozenset[str] | None = None) -> Head:
        """What these headers say; `subset`: addresses that the gateway allows, `None` = any."""
        path, encoding = _path(headers), headers.get("content-encoding", "")
        parser = parser_of(path, encoding) if self._parse is parse_request else None
        hints = self._hints.read(headers)
        if hints.selection is not None:
            subset = within(subset, hints.selection)
        removed = names.REMOVED_HEADERS.intersection(headers)
        return Head(headers, path, headers.get("content-type", ""), encoding, parser, hints, subset, removed)

    def _head_of(self, opening: Opening) -> Head:
        return self.head(opening.headers, opening.subset)

    def request(
        self, head: Head, body: bytes, blind: bool = False, external_id: str = ""
    ) -> tuple[Request, Reading | None]:
        """The request (`blind`: nobody will see its first token; `external_id`: its x-request-id, of `MAX_NAME`
        characters at most), and who still reads its prompt, for `known`. Raises `ClientError` when no model server
        could understand the body either."""
        hints = head.hints
        if not body:  # none was sent, or the gateway does not show it: whether that is right the model server knows
            api = api_of(head.path)
            parsed = unread(api, "empty" if head.empty and api != OTHER else "no-body")
        elif head.parser is None:
            parsed = self._parse(head.path, body, head.content_type, content_encoding=head.encoding)
        else:
            try:
                parsed = head.parser(body, head.content_type) or too_large(head.path, body)
            except ClientError as error:
                raise explained(error, head.path, head.content_type) from None
        api = parsed.api
        session, prefix, segments = hints.session or parsed.user, NO_PREFIX, parsed.prompt
        if segments:
            text, *more = segments
            if more:
                text = b"".join(segments)
            prefix = self._hasher.chain(parsed.root, text)
            if not session and self._conversations is not None and api in STREAMING:
                session = self._conversations.of(prefix, text)
        # In the order of the fields: as keywords they would take 0.6 µs more, half of a percent of a request.
        request = Request(
            next(self._ids),
            self._now(),
            api,
            head.path,
            parsed.model,
            "",  # target
            hints.rewrite,
            hints.objective,
            "",  # rewritten_by
            parsed.stream,
            len(body),
            parsed.prompt_bytes,
            parsed.prompt_tokens or self._tokens.estimate(parsed.model, parsed.prompt_bytes, api),
            parsed.max_tokens,
            prefix,
            parsed.media,
            parsed.unread,
            session[:MAX_NAME],
            0,  # priority
            hints.fairness_id,
            head.subset,
            hints.slo_ttft_ms,
            hints.slo_tpot_ms,
            hints.ttl_s,
            external_id,
            blind,
            parsed.n,
            parsed.recomputed,
        )
        if self._alone:
            return request, None
        return self._accompanied(request, head, body, parsed)

    def _accompanied(
        self, request: Request, head: Head, body: bytes, parsed: ParsedRequest
    ) -> tuple[Request, Reading | None]:
        """With what is known of its prompt, and its trace."""
        reading = None
        if self._prompts is not None:
            read = self._prompts.read(parsed, body, head.hints.rewrite or parsed.model)
            request, reading = (self.known(request, read), None) if isinstance(read, PromptKnown) else (request, read)
        if self._trace is not None and (trace := self._trace(request, head.headers)) is not None:
            request = replace(request, trace=trace)
        return request, reading

    def known(self, request: Request, read: PromptKnown) -> Request:
        """The request with what was read of its prompt."""
        blocks = self._prompts.offer(read) if self._prompts is not None and read.blocks is not None else None
        if not read.tokens and blocks is None:
            return request
        return replace(request, prompt_tokens=read.tokens or request.prompt_tokens, blocks=blocks)


def _path(headers: Mapping[str, str]) -> str:
    path = headers.get(":path") or first(headers, names.PATH_HEADERS)
    return path if path in EXACT else read_path(path)
