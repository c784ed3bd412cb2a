"""When waiting requests run out of time: in buckets, so that one who leaves early costs no more than one who is late.

A heap would keep those that left until their time comes, or hold everybody up while it is cleaned. Here only the bucket
whose time comes next is sorted, once; most of it is in order already, as requests came.
"""

from bisect import insort
from heapq import heappop, heappush
from math import inf

from fairlead.admit.framework import Waiting

#: Buckets per second.
_PER_SECOND = 8


class Deadlines:
    """Waiting requests by their deadlines; those without one (`inf`) are not kept."""

    def __init__(self) -> None:
        self._buckets: dict[int, dict[int, Waiting]] = {}
        #: Keys of `_buckets`, and of some that are gone by now.
        self._keys: list[int] = []
        #: The bucket that is next: its key, and (-deadline, -number) of its members and some that left, the next last.
        self._next = -1
        self._order: list[tuple[float, int]] = []

    def add(self, waiting: Waiting) -> None:
        if waiting.deadline == inf:
            return
        key = int(waiting.deadline * _PER_SECOND)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = {}
            heappush(self._keys, key)
        bucket[waiting.number] = waiting
        if key == self._next:
            insort(self._order, (-waiting.deadline, -waiting.number))

    def remove(self, waiting: Waiting) -> None:
        if waiting.deadline == inf:
            return
        key = int(waiting.deadline * _PER_SECOND)
        bucket = self._buckets[key]
        del bucket[waiting.number]
        if not bucket:
            del self._buckets[key]
            if key == self._next:
                self._next = -1

    def first(self) -> Waiting | None:
        """Who runs out of time first; of several, who came first."""
        keys = self._keys
        while keys and keys[0] not in self._buckets:
            heappop(keys)
        if not keys:
            return None
        bucket = self._buckets[keys[0]]
        if keys[0] != self._next:
            self._next = keys[0]
            self._order = [(-waiting.deadline, -number) for number, waiting in reversed(bucket.items())]
            self._order.sort()
        while -self._order[-1][1] not in bucket:
            self._order.pop()
        return bucket[-self._order[-1][1]]

    def members(self) -> set[int]:
        """Numbers of all that are kept."""
        return {number for bucket in self._buckets.values() for number in bucket}
