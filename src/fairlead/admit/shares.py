"""Minimum shares: what a lower band gets although higher ones want everything.

Theory. Bands are strict, so a lower one may starve. A band with a share `s` is owed `s` of all work that leaves the
queues while it waits, and pays with what it is given. While it is owed something it goes first; otherwise it takes its
turn below the others as ever. So a waiting band gets at least its share, late by at most `MOST` tokens, and never more
than its share at the cost of a higher one.

Rules
* Nobody is owed anything for the time in which nobody of the band waits.
* A debt is bounded: a band that nobody could serve for a while does not take all afterwards.
* Without shares nothing is counted.
"""

from collections.abc import Mapping, Sequence

from fairlead.admit.queues import Band

#: Uncached prompt tokens that a band is owed at most, or owes.
MOST = 65_536.0


class Shares:
    """`of`: priority → share of the work, 0..1. Raises `ValueError` if they exceed the whole."""

    def __init__(self, of: Mapping[int, float]) -> None:
        self._of = {priority: share for priority, share in of.items() if share > 0.0}
        if any(not 0.0 <= share <= 1.0 for share in of.values()) or sum(of.values()) > 1.0:
            raise ValueError("the bands' shares must be at most 1 together")
        #: Priority → tokens that the band is owed.
        self.owed = dict.fromkeys(self._of, 0.0)

    def order(self, bands: Sequence[Band]) -> Sequence[Band]:
        """`bands` in the order in which they are served; those that are owed something come first."""
        if not self._of:
            return bands
        owed = self.owed
        return sorted(bands, key=lambda band: -max(owed.get(band.priority, 0.0), 0.0))

    def spent(self, bands: Sequence[Band], priority: int, cost: float) -> None:
        """A request of the band is sent to an endpoint. To be called while it is still counted in its band."""
        if not self._of:
            return
        waiting = {band.priority for band in bands if band.count}
        for other, share in self._of.items():
            if other not in waiting:
                self.owed[other] = 0.0
                continue
            owed = self.owed[other] + share * cost - (cost if other == priority else 0.0)
            self.owed[other] = min(max(owed, -MOST), MOST)
