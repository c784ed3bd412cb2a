"""What endpoints will hold soon: prompts that were just sent there, each under a lease.

Engines report a block only once it is computed. Between the decision and that event, an equal prompt must follow the
first one to the same endpoint. So the decision itself is entered here, until the request's first token or the end of
the lease.

Rules
* A lease covers its prompt from the beginning to some depth. So a block never has more holders than the one before it,
  and the depth that a slot holds is found by bisection.
* Only blocks at certain depths are entered: 1, 2, … 16, then in steps of about a sixteenth of the depth. These are 80
  entries for 1,000 blocks. A guess may be up to one sixteenth too short, but never too long.
* Leases are counted: if one of two leases with the same prompt ends, the other still holds.
* An engine that keeps only the last blocks of a prompt in some groups (`RankCache.sparse`) has hits only for prompts
  that continue it. So only whole prompts count there.
"""

from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterator

from msgspec import Struct

from fairlead.core.kv.table import Keys

#: Estimated bytes per entry and per lease.
_ENTRY_SIZE, _LEASE_SIZE = 150, 500


class Guess(Struct, eq=False, gc=False):
    """A prompt that was sent to a slot."""

    slot: int
    keys: list[int]
    until: float
    #: The key of its last block.
    end: int


class Speculation:
    """All leases. `limit`: their maximum number; beyond it the oldest are dropped."""

    def __init__(self, limit: int = 20_000) -> None:
        self.limit = limit
        self._depths = [1]
        #: An ordered set, in the order of sending.
        self._leases: OrderedDict[Guess, None] = OrderedDict()
        #: Slot → last key of a prompt → number of leases.
        self._ends: dict[int, dict[int, int]] = {}
        #: Key → slot → number of leases.
        self._holders: dict[int, dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def nbytes(self) -> int:
        return _ENTRY_SIZE * len(self._holders) + _LEASE_SIZE * len(self._leases)

    def depths_up_to(self, blocks: int) -> list[int]:
        """Return the depths at which blocks are entered."""
        depths = self._depths
        while depths[-1] <= blocks:
            depths.append(depths[-1] + max(1, depths[-1] // 16))
        return depths[: bisect_right(depths, blocks)]

    def add(self, slot: int, keys: Keys, until: float) -> Guess | None:
        """Enter a prompt with these keys that was sent to `slot`. Return its lease; `None` = it has no whole block."""
        depths = self.depths_up_to(len(keys))
        if not depths:
            return None
        entered = [int(keys[depth - 1]) for depth in depths]
        for key in entered:
            slots = self._holders.setdefault(key, {})
            slots[slot] = slots.get(slot, 0) + 1
        guess = Guess(slot, entered, until, int(keys[-1]))
        self._leases[guess] = None
        ends = self._ends.setdefault(slot, {})
        ends[guess.end] = ends.get(guess.end, 0) + 1
        if len(self._leases) > self.limit:
            self.release(next(iter(self._leases)))
        return guess

    def release(self, ended: Guess) -> None:
        """End a lease, because the engine's own events take over or the request is gone. Does nothing if it has already
        ended."""
        if ended not in self._leases:
            return
        del self._leases[ended]
        ends = self._ends[ended.slot]
        ends[ended.end] -= 1
        if not ends[ended.end]:
            del ends[ended.end]
            if not ends:
                del self._ends[ended.slot]
        for key in ended.keys:
            slots = self._holders[key]
            if slots[ended.slot] > 1:
                slots[ended.slot] -= 1
            elif len(slots) > 1:
                del slots[ended.slot]
            else:
                del self._holders[key]

    def expire(self, now: float) -> None:
        """End expired leases, oldest first. A lease may last as long as an older one that expires later."""
        while self._leases:
            oldest = next(iter(self._leases))
            if oldest.until > now:
                return
            self.release(oldest)

    def drop_slot(self, slot: int) -> None:
        """End all leases of a slot. O(leases)."""
        for guess in [guess for guess in self._leases if guess.slot == slot]:
            self.release(guess)

    def continued(self, slot: int, keys: Keys) -> int:
        """Return the blocks of the longest prompt that was sent to the slot and that these keys continue."""
        ends = self._ends.get(slot)
        if ends:
            for place in range(len(keys), 0, -1):
                if int(keys[place - 1]) in ends:
                    return place
        return 0

    def depths(self, keys: Keys) -> Iterator[tuple[int, int]]:
        """Iterate over (slot, blocks) of all slots that were sent at least the first block."""
        holders = self._holders
        here = holders.get(int(keys[0])) if len(keys) else None
        if here is None:
            return
        depths = self.depths_up_to(len(keys))
        for slot in list(here):
            low, high = 0, len(depths)
            while high - low > 1:
                middle = (low + high) // 2
                if slot in holders.get(int(keys[depths[middle] - 1]), ()):
                    low = middle
                else:
                    high = middle
            yield slot, depths[low]

    def validate(self) -> None:
        """Raise `AssertionError` if leases and holders disagree."""
        counted: dict[int, dict[int, int]] = {}
        ends: dict[int, Counter[int]] = {}
        for lease in self._leases:
            ends.setdefault(lease.slot, Counter())[lease.end] += 1
            for key in lease.keys:
                slots = counted.setdefault(key, {})
                slots[lease.slot] = slots.get(lease.slot, 0) + 1
        assert counted == self._holders
        assert ends == self._ends
        assert len(self._leases) <= self.limit
