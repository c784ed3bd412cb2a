"""Which conversation a request belongs to, when nobody says so.

Theory. Every turn of a conversation sends all former turns again, so the prompt of a turn begins with the prompt of the
turn before. A conversation is therefore recognised by the exact bytes of prompts that were seen: a request belongs to
the longest of them that its own prompt begins with, and takes over its id.

Prompts are not kept. The hash of a prompt's last full block (`PrefixChain`) covers all before it; from there on a
finer grid of chained hashes reaches to within 1/8 of a block of its end, and one more hash covers the rest. To look a
request up, its own block hashes are tried from the deepest upwards; where prompts are known to end, the grid finds the
ones that agree so far, and the last hash decides.

Rules
* The first prompt of a conversation has no id yet: most prompts stay alone, and a session that is none only costs (the
  session's endpoint is drawn by lot, so it would pull single requests away from the best one). From the second turn on
  the id stays.
* A conversation that forks goes on in all its branches, as an agent's sub-tasks do. But a prompt that more than
  `MAX_BRANCHES` different ones extend is a shared beginning (a system prompt sent ahead to warm a cache, a template),
  and what extends it further are conversations of their own.
* Former prompts of a conversation stay known, so a client that edits its last message is recognised by an earlier turn.
* Ids are made of hashes alone: equal traffic gives equal ids, in every process.
* Prompts shorter than the first block have no chain, and no conversation yet.
* At most `limit` prompts are known (about 0.5 kB each); the one that was not met for longest is forgotten.
"""

from collections import OrderedDict

from msgspec import Struct
from xxhash import xxh3_64_intdigest

from fairlead.core.request import PrefixChain

MAX_BRANCHES = 4
#: Prompts that agree up to the last grid point; of more the oldest is forgotten.
MAX_ALIKE = 16
#: Distance of grid points in bytes: at least this, and 1/256 of the depth (blocks are 1/32 of it).
_FINEST, _GROWTH = 64, 8
#: Grid points behind the last block; of a prompt that is longer than its chain the rest is not looked at.
_MAX_POINTS = 32

#: What ids begin with. Clients that name their sessions rarely use it.
PREFIX = "~"


class _Prompt(Struct):
    """A prompt that was seen."""

    length: int
    #: Of the bytes behind the last grid point, chained.
    digest: int
    #: Of its conversation; empty = nothing came before it, and nothing after it yet.
    id: str = ""
    #: Different prompts that extended it.
    branches: int = 0


class Conversations:
    """Remembers prompts by their ends. All calls take a few µs; see the module's rules."""

    def __init__(self, limit: int = 32768) -> None:
        if limit < 1:
            raise ValueError(f"limit must be positive, not {limit}")
        self._limit = limit
        #: Hash at the last grid point → the prompts that end before the next one; least recently met first.
        self._ends: OrderedDict[int, list[_Prompt]] = OrderedDict()
        #: Hash of a block → how many entries of `_ends` lie behind it and before the end of the next block.
        self._stems: dict[int, int] = {}
        #: Entry of `_ends` → its block.
        self._stem_of: dict[int, int] = {}
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
        if type(prompt) is not memoryview:
            prompt = memoryview(prompt)
        last = chain.ends[-1]
        step = max(_FINEST, last >> _GROWTH)
        end = min(len(prompt), last + _MAX_POINTS * step)
        key = hashes[-1]
        starts = range(last, end - step + 1, step)
        keys = [key := xxh3_64_intdigest(prompt[start : start + step], key) for start in starts]
        start = last + step * len(keys)
        seen = _Prompt(end, xxh3_64_intdigest(prompt[start:end], key))
        stems = self._stems
        if not stems.keys().isdisjoint(hashes):
            points = list(zip(range(last, end + 1, step), (hashes[-1], *keys), strict=True))
            earlier = self._longest(chain, prompt, points, end)
            if earlier is not None:
                if earlier.length == end:
                    return earlier.id
                earlier.branches += 1
                if earlier.branches <= MAX_BRANCHES:
                    seen.id = earlier.id or f"{PREFIX}{earlier.digest:016x}"
        if key in self._ends:
            self._add_alike(key, seen)
        else:
            stem = hashes[-1]
            self._ends[key] = [seen]
            self._stem_of[key] = stem
            stems[stem] = stems.get(stem, 0) + 1
            self._known += 1
            if self._known > self._limit:
                self._forget()
        return seen.id

    def _longest(self, chain: PrefixChain, prompt: memoryview, tail: list[tuple[int, int]], end: int) -> _Prompt | None:
        """The longest known prompt that `prompt` begins with. `tail`: the grid behind its last block."""
        stems, hashes, ends = self._stems, chain.hashes, chain.ends
        last = len(hashes) - 1
        for i in range(last, -1, -1):
            if hashes[i] not in stems:
                continue
            points = tail if i == last else _grid(prompt, ends[i], ends[i + 1] - 1, hashes[i])
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
        key, alike = self._ends.popitem(last=False)
        self._known -= len(alike)
        stem = self._stem_of.pop(key)
        if self._stems[stem] == 1:
            del self._stems[stem]
        else:
            self._stems[stem] -= 1

    def validate(self) -> None:
        """Raise `AssertionError` when the tables disagree or a bound is broken."""
        assert self._known == sum(map(len, self._ends.values())) <= self._limit
        assert self._stem_of.keys() == self._ends.keys()
        counts: dict[int, int] = {}
        for stem in self._stem_of.values():
            counts[stem] = counts.get(stem, 0) + 1
        assert counts == self._stems
        assert all(0 < len(alike) <= MAX_ALIKE for alike in self._ends.values())


def _grid(prompt: memoryview, start: int, end: int, parent: int) -> list[tuple[int, int]]:
    """Grid points (offset, hash of all before) from the end of a block on, the block's own first."""
    step = max(_FINEST, start >> _GROWTH)
    ends = range(start + step, end + 1, step)
    return [
        (start, parent),
        *[(border, parent := xxh3_64_intdigest(prompt[border - step : border], parent)) for border in ends],
    ]


def _match(alike: list[_Prompt], prompt: memoryview, start: int, key: int, end: int) -> _Prompt | None:
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
