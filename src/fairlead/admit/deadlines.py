"""When waiting requests run out of time: in buckets, so that one who leaves early costs no more than one who is late.

A heap would keep those that left until their time comes, or hold everybody up while it is cleaned. Here only the bucket
whose time comes next is sorted, once; most of it is in order already, as requests came.
"""

from bisect import bisect_left
from heapq import heappop, heappush
from math import inf
from operator import attrgetter

from fairlead.admit.framework import Waiting

#: Buckets per second.
_PER_SECOND = 8
_deadline = attrgetter("deadline")


class Deadlines:
    """Waiting requests by their deadlines; those without one (`inf`) are not kept."""

    def __init__(self) -> None:
        self._buckets: dict[int, dict[int, Waiting]] = {}
        #: Keys of `_buckets`, and of some that are gone by now.
        self._keys: list[int] = []
        #: The bucket that is next: its key, and negative deadlines and numbers of its members and some that left, the
        #: next last. No tuples, for thousands of them would call the cycle collector; and no members, for thousands of
        #: them would die in one call.
        self._next = -1
        self._times: list[float] = []
        self._numbers: list[int] = []

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
            place = bisect_left(self._times, -waiting.deadline)
            self._times.insert(place, -waiting.deadline)
            self._numbers.insert(place, waiting.number)

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
            members = sorted(bucket.values(), key=_deadline)  # of equal ones who came first is first
            members.reverse()
            self._times = [-waiting.deadline for waiting in members]
            self._numbers = [waiting.number for waiting in members]
        while self._numbers[-1] not in bucket:
            self._numbers.pop()
            self._times.pop()
        return bucket[self._numbers[-1]]

    def members(self) -> set[int]:
        """Numbers of all that are kept."""
        return {number for bucket in self._buckets.values() for number in bucket}
