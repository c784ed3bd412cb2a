"""Turns the headers and body of a request into a `Request`: the one place where client input is interpreted.

Headers give hints, as far as the configuration trusts them. If the client names no session, the prompt tells which
conversation the request continues.
"""

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import count
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from fairlead.apis.body import TransferError, without_transfers
from fairlead.apis.parsed import ParsedRequest, scoped, unread
from fairlead.apis.prompt import openings
from fairlead.apis.request import Parser, explained, parse_request, parser_of, too_large
from fairlead.core import headers as names
from fairlead.core.apis import CONVERSED, EXACT, OTHER, STREAMING, api_of, read_path
from fairlead.core.errors import ClientError
from fairlead.core.models import Catalogue
from fairlead.core.prefix import ChainHasher
from fairlead.core.request import NO_PREFIX, RECOGNISED, PrefixChain, Request
from fairlead.core.tokens import TokenEstimator
from fairlead.gateway.ext_proc import Opening

#: Strings chosen by clients are cut to this many characters before they are stored.
MAX_NAME = 256


class ClientHints(Struct, frozen=True, kw_only=True, gc=False):
    """What a client asks for in headers. Empty or 0 = it asks for nothing."""

    session: str = ""
    fairness_id: str = ""
    objective: str = ""
    #: The model name to send to the endpoint instead of the one in the body.
    rewrite: str = ""
    slo_ttft_ms: float = 0.0
    slo_tpot_ms: float = 0.0
    #: Seconds that the request may wait in a queue.
    ttl_s: float = 0.0
    #: Addresses that the client allows (a header for tests); `None` = any.
    selection: frozenset[str] | None = None


NO_HINTS = ClientHints()


class HintReader:
    """Reads the hints in a client's headers. `trusted`: keys of `core.headers.TRUST`; other hints are ignored."""

    def __init__(self, trusted: Iterable[str] = names.TRUSTED) -> None:
        trusted = frozenset(trusted)
        #: The names of all headers that may hold a trusted hint.
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
    """The value of the first of these headers that is present and not empty, cut to `limit` characters; else empty."""
    for name in candidates:
        value = headers.get(name)
        if value:
            return value[:limit]
    return ""


def within(subset: frozenset[str] | None, selection: frozenset[str] | None) -> frozenset[str] | None:
    """The addresses that both the gateway's hint and the client's selection allow. Entries are `ip` or `ip:port`."""
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
    """Decode a name that may be UTF-8: headers arrive as Latin-1 text, one character per byte. Space around it stays:
    gateways drop that of clients, and a token's claim with it names another tenant than one without."""
    if value.isascii():
        return value
    try:
        return value.encode("latin-1").decode()
    except UnicodeError:
        return value


def _milliseconds(text: str) -> float:
    """A positive number of milliseconds; 0 for any other text."""
    if not text:
        return 0.0
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 < value < 1e9 else 0.0


#: How many different prompts may extend a prompt and stay in its conversation. See the rules of `Conversations`.
MAX_BRANCHES = 4
#: How many requests may begin alike and be turns of one conversation. See `Openings`.
MAX_STARTS = 8
#: How many known prompts may share their last grid point. Beyond that the oldest of them is forgotten.
MAX_ALIKE = 16
#: Distance of grid points in bytes: at least 64, and at least 1/256 of the offset (blocks are 1/32 of it).
_FINEST, _GROWTH = 64, 8
#: Limit of grid points behind the last block. Of a prompt that extends further, the remaining bytes are ignored.
_MAX_POINTS = 32


class _Prompt(Struct):
    """A known prompt."""

    length: int
    #: Hash of the bytes behind the last grid point, chained to the hash at that point.
    digest: int
    #: Hash of the prompt's last full block.
    stem: int
    #: Id of its conversation; empty = it continues no known prompt.
    id: str = ""
    #: How many different prompts extended this one.
    branches: int = 0


class Conversations:
    """Recognises which conversation a request belongs to when the client does not say.

    Theory. Every turn of a conversation sends all earlier turns again, so the prompt of a turn begins with the prompt
    of the previous turn. A conversation is therefore recognised by the exact bytes of known prompts: a request takes
    over the id of the longest known prompt that its own prompt begins with.

    Prompts are not stored, only hashes. The hash of a prompt's last full block (`PrefixChain`) covers all bytes before
    it. From there, a finer grid of chained hashes reaches to within 1/8 of a block of the prompt's end, and one more
    hash covers the rest. A lookup tries the request's own block hashes, the deepest first. Behind a block where known
    prompts end, the grid finds the prompts that agree so far, and the last hash decides.

    Rules
    * The first prompt of a conversation has no id yet. Most prompts are never continued, and an id would only do harm:
      the endpoint of a session is drawn at random and may not be the best. From the second turn on the id stays.
    * If a conversation forks, all branches keep its id, such as an agent's sub-tasks. But a prompt that more than
      `MAX_BRANCHES` different prompts extend is a shared beginning (a template, or a system prompt sent ahead to warm a
      cache). Prompts that extend it after that belong to conversations of their own.
    * Earlier prompts of a conversation stay known: a client that edits its last message is recognised by them.
    * Ids are made of hashes alone: equal traffic gives equal ids in every process.
    * A prompt shorter than the first block has no chain, so it belongs to no conversation yet.
    * At most `limit` prompts are known (about 0.5 kB each); the least recently matched is forgotten first.
    """

    def __init__(self, limit: int = 32768) -> None:
        if limit < 1:
            raise ValueError(f"limit must be positive, not {limit}")
        self._limit = limit
        #: Hash at the last grid point → the prompts that end before the next grid point, all behind the same block. The
        #: least recently matched come first.
        self._ends: OrderedDict[int, list[_Prompt]] = OrderedDict()
        #: Hash of a block → how many entries of `_ends` lie between the end of this block and the end of the next.
        self._stems: dict[int, int] = defaultdict(int)
        self._known = 0

    def __len__(self) -> int:
        return self._known

    def of(self, chain: PrefixChain, prompt: bytes | memoryview) -> str:
        """Return the id of the conversation that `prompt` continues, and remember `prompt`. `chain`: its hash chain.

        Empty for a prompt that continues no known prompt, and for one that is too short to have a chain.
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
        """The longest known prompt that `prompt` begins with. `end`: where the grid behind its last block ends."""
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
        """Remember a prompt beside known prompts that share its last grid point."""
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
        """Forget the prompts of the least recently matched grid point."""
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


@lru_cache(maxsize=1024)  # block ends are few fixed offsets: this holds all of them
def _tail(last: int) -> tuple[int, list[slice]]:
    """The grid behind a prompt's last block, which ends at `last`: its step, and the slices between its points."""
    step = max(_FINEST, last >> _GROWTH)
    return step, [slice(start, start + step) for start in range(last, last + _MAX_POINTS * step, step)]


def _grid(prompt: bytes | memoryview, start: int, end: int, parent: int) -> list[tuple[int, int]]:
    """Grid points (offset, hash of all bytes before it) behind a block. The first is the block's own end, `start`."""
    step = max(_FINEST, start >> _GROWTH)
    ends = range(start + step, end + 1, step)
    return [
        (start, parent),
        *[(border, parent := xxh3_64_intdigest(prompt[border - step : border], parent)) for border in ends],
    ]


def _match(alike: list[_Prompt], prompt: bytes | memoryview, start: int, key: int, end: int) -> _Prompt | None:
    """The longest of these known prompts that `prompt` begins with. All of them agree with it up to `start`."""
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


#: How many heads are cached: as many as `ext_proc` caches openings.
_MAX_HEADS = 256


class Openings:
    """Tells the openings of conversations from those that many requests share: the same examples before each question,
    or one prompt again and again. By such an opening, a canary or target of 1 % would take all of them, or none.

    An opening is shared once `MAX_STARTS` requests began with it that continue no known prompt. A conversation has one
    such turn in each scheduler, or a few while it is too short to be recognised. Behind a shared opening, the next one
    counts, which has the user's text up to one more answer: after equal examples the first question.
    """

    def __init__(self, limit: int = 32768) -> None:
        self._limit = limit
        #: The requests of each opening that continued nothing, the least recently seen opening first.
        self._starts: OrderedDict[str, int] = OrderedDict()

    def shared(self, opening: str, continues: bool) -> bool:
        """Count a request with this opening. `continues`: it belongs to a known session."""
        starts = self._starts.pop(opening, 0) + (not continues)
        self._starts[opening] = starts
        if len(self._starts) > self._limit:
            self._starts.popitem(last=False)
        return starts > MAX_STARTS


class Head(Struct, frozen=True, gc=False):
    """What a request's headers say. Most requests begin with the same bytes, so this is read once for all of them."""

    headers: Mapping[str, str]
    path: str = ""
    content_type: str = ""
    encoding: str = ""
    #: Reads a body that is not empty; `None` = use `Understanding.parse`.
    parser: Parser | None = None
    hints: ClientHints = NO_HINTS
    #: Addresses that the gateway and the client allow; `None` = any.
    subset: frozenset[str] | None = None
    #: Headers that are removed before the request goes to a model server.
    removed: frozenset[str] = frozenset()
    #: Whether the request ended without a body. False also if the gateway does not show the body.
    empty: bool = False
    #: The definitions that may give the request another target than the model in the body; `None` = there are none.
    catalogue: Catalogue | None = None
    #: Whether the request is known once its body is parsed.
    alone: bool = False


NO_HEAD = Head({})


class PromptKnown(Struct, frozen=True, gc=False):
    """What reading a prompt showed: its number of tokens (0 = unknown) and its blocks (see `Request.blocks`)."""

    tokens: int = 0
    blocks: Any = None


Reading = asyncio.Task[PromptKnown]


class PromptReader(Protocol):
    def read(self, parsed: ParsedRequest, body: bytes, targets: Sequence[str]) -> PromptKnown | Reading:
        """What the prompt shows: at once, or from a task that always ends within one or two seconds. `targets`: the
        models that the request may be sent for, at least one."""
        ...

    def offer(self, known: PromptKnown) -> Any:
        """Take what is known of a request that is about to arrive. Returns the value of `Request.blocks`."""


def _without_body(head: Head) -> ParsedRequest:
    """The client sent no body, or the gateway does not show it: the model server judges that. A known API is asked by
    POST. At another path a POST without a body may still be work for the model."""
    api = api_of(head.path)
    missing = head.empty and (head.headers.get(":method") == "POST") != (api == OTHER)
    return unread(api, "empty" if missing else "no-body")


def _with_transfers(parse: Callable[..., ParsedRequest]) -> Callable[..., ParsedRequest]:
    """Parse as `parse` does, but accept what names hosts to the engine: the client is a proxy that may."""

    def parsed(path: str, body: bytes, content_type: str = "", *, content_encoding: str = "") -> ParsedRequest:
        with suppress(TransferError):
            return parse(path, body, content_type, content_encoding=content_encoding)
        with suppress(TransferError):
            return parse(path, without_transfers(body), content_type, content_encoding=content_encoding)
        return too_large(path, body)

    return parsed


class Understanding:
    """Makes `Request`s. Their ids count up from 1 and are internal, so nothing that a client sends can equal one.

    `now`: clock seconds.
    `conversations`: recognise a conversation by its prompts when the client names neither session nor user.
    `trusted`: which hints of clients are read, as keys of `core.headers.TRUST`.
    `parse`: has the signature of `parse_request`; parser plugins may come before that.
    `prompts`: reads the prompt itself before the request arrives; `None` = nothing does.
    `trace`: gives the `Request.trace` of a request with these headers; `None` = no traces.
    """

    def __init__(
        self,
        tokens: TokenEstimator,
        hasher: ChainHasher,
        now: Callable[[], float],
        conversations: bool = True,
        trusted: Collection[str] = names.TRUSTED,
        parse: Callable[..., ParsedRequest] = parse_request,
        prompts: PromptReader | None = None,
        trace: Callable[[Request, Mapping[str, str]], Any] | None = None,
    ) -> None:
        self._tokens = tokens
        self._hasher = hasher
        self._now = now
        self._parse = _with_transfers(parse) if "kv-transfer" in trusted else parse
        self._hints = HintReader(trusted)
        self._ids = count(1)
        self._conversations = Conversations() if conversations else None
        self._prompts = prompts
        self._trace = trace
        self._catalogue = Catalogue()
        #: Which openings are shared; `None` = the first one of each request counts.
        self._openings = Openings() if conversations else None
        #: Whether there is a canary, to which conversations are assigned by their openings.
        self._canary = False
        #: Whether only the parser reads bodies. Computed once because every request needs it.
        self._alone = prompts is None and trace is None
        #: The head of a request that begins like earlier ones: cached per opening.
        self.known_head = lru_cache(maxsize=_MAX_HEADS)(self._head_of)

    def define(self, catalogue: Catalogue) -> None:
        """Take the definitions of model names. Prompts are read for the targets of the names."""
        self._catalogue = catalogue
        self.known_head.cache_clear()

    def canary(self, on: bool) -> None:
        """Say whether there is a canary, to which conversations are assigned by their openings."""
        self._canary = on and self._conversations is not None
        self.known_head.cache_clear()

    def api(self, headers: Mapping[str, str]) -> str:
        """The API of a request with these headers, for the error answer when the body cannot be read."""
        return api_of(_path(headers))

    def head(self, headers: Mapping[str, str], subset: frozenset[str] | None = None) -> Head:
        """What these headers say; `subset`: addresses that the gateway allows, `None` = any."""
        path, encoding = _path(headers), headers.get("content-encoding", "")
        hints = self._hints.read(headers)
        catalogue = self._catalogue if self._catalogue.rewrites or hints.rewrite else None
        parser = parser_of(path, encoding) if self._parse is parse_request and catalogue is None else None
        if hints.selection is not None:
            subset = within(subset, hints.selection)
        removed = names.REMOVED_HEADERS.intersection(headers)
        content_type = headers.get("content-type", "")
        alone = self._alone and catalogue is None and not self._canary
        return Head(headers, path, content_type, encoding, parser, hints, subset, removed, False, catalogue, alone)

    def _head_of(self, opening: Opening) -> Head:
        return self.head(opening.headers, opening.subset)

    def request(
        self, head: Head, body: bytes, blind: bool = False, external_id: str = ""
    ) -> tuple[Request, Reading | None]:
        """Make the request. `blind`: no session will see its first token. `external_id`: its x-request-id, at most
        `MAX_NAME` characters. Also returns the task that still reads its prompt, whose result goes to `known`; `None` =
        no such task. Raises `ClientError` if no model server could understand the body either."""
        hints = head.hints
        if not body:
            parsed = _without_body(head)
        elif head.parser is None:
            parsed = self._parse(head.path, body, head.content_type, content_encoding=head.encoding)
            if head.catalogue is not None:
                parsed = scoped(parsed, "")  # the core adds the target to the hashes
        else:
            try:
                parsed = head.parser(body, head.content_type) or too_large(head.path, body)
            except ClientError as error:
                raise explained(error, head.path, head.content_type) from None
        api = parsed.api
        session, prefix, segments = hints.session or (parsed.user and parsed.user[:MAX_NAME]), NO_PREFIX, parsed.prompt
        if segments:
            text, *more = segments
            if more:
                text = b"".join(segments)
            prefix = self._hasher.chain(parsed.root, text)
            if not session and self._conversations is not None and api in STREAMING:
                session = self._conversations.of(prefix, text)
        # Positional, in the order of the fields: keywords would add 0.6 µs, half a percent of a request.
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
            session,
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
        return (request, None) if head.alone else self._accompanied(request, head, body, parsed)

    def _opening(self, session: str, parsed: ParsedRequest) -> str:
        """See `Request.opening`."""
        if not parsed.prompt or parsed.api not in CONVERSED:
            return ""
        for begins in openings(parsed.prompt[-1]):
            name = f"{RECOGNISED}{xxh3_64_intdigest(begins):016x}"
            if self._openings is None or not self._openings.shared(name, bool(session)):
                return name
        return ""

    def _accompanied(
        self, request: Request, head: Head, body: bytes, parsed: ParsedRequest
    ) -> tuple[Request, Reading | None]:
        """Add to the request what is known of its prompt, and its trace. Also return the task that reads its prompt."""
        reading = None
        targets = self._catalogue.targets(parsed.model, head.hints.rewrite) or (parsed.model,)
        if head.catalogue is not None and not parsed.prompt_tokens:
            # Which one of several is drawn later; versions and adapters of one model mostly share a tokenizer.
            tokens = self._tokens.estimate(targets[0], parsed.prompt_bytes, parsed.api)
            request = replace(request, prompt_tokens=tokens)
        if self._catalogue.sticky or self._canary:
            request = replace(request, opening=self._opening(request.session, parsed))
        if self._prompts is not None:
            read = self._prompts.read(parsed, body, targets)
            request, reading = (
                (self.known(request, read, head), None) if isinstance(read, PromptKnown) else (request, read)
            )
        if self._trace is not None and (trace := self._trace(request, head.headers)) is not None:
            request = replace(request, trace=trace)
        return request, reading

    def known(self, request: Request, read: PromptKnown, head: Head) -> Request:
        """The request, completed with what reading its prompt showed. Without its prefix if the first models were
        defined meanwhile, or the last ones taken away: then the core expects other hashes."""
        if (head.catalogue is not None) != (self._catalogue.rewrites or bool(head.hints.rewrite)):
            request = replace(request, prefix=NO_PREFIX)
        blocks = self._prompts.offer(read) if self._prompts is not None and read.blocks is not None else None
        if not read.tokens and blocks is None:
            return request
        return replace(request, prompt_tokens=read.tokens or request.prompt_tokens, blocks=blocks)


def _path(headers: Mapping[str, str]) -> str:
    path = headers.get(":path") or first(headers, names.PATH_HEADERS)
    return path if path in EXACT else read_path(path)
