"""`session-affinity`: keeps a session at one endpoint.

Rendezvous hashing: the session's endpoint is the one with the highest hash of (session, endpoint id). Nothing is
stored, so several schedulers agree, a restart changes nothing, and if an endpoint leaves, only its sessions move.

Only endpoints that can serve the request and are up are considered (`CANDIDATES`). Otherwise, a session whose endpoint
has another role or model would have no affinity, and the sessions of an unhealthy endpoint would be scattered.
"""

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from fairlead.core.columns import BoolColumn, FloatColumn
from fairlead.core.policy import CANDIDATES, Cycle
from fairlead.core.request import RECOGNISED, Request
from fairlead.core.view import FleetView
from fairlead.plugins.params import NoParams

_CACHE = 4096
#: The finaliser of splitmix64 (Steele, Lea, Flood 2014). It mixes two 64-bit hashes over a whole column in one pass.
_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
_MIX = tuple((np.array(shift, dtype=np.uint64), np.array(factor, dtype=np.uint64)) for shift, factor in _STEPS)


class SessionAffinity:
    """1 for the session's endpoint, 0 for the others. No score for requests without a session."""

    type = "session-affinity"
    Params = NoParams
    weight = 1.0

    def __init__(self, params: NoParams, name: str = type) -> None:
        self.name = name
        self._ids: tuple[str, ...] | None = None
        self._hashes: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self._candidates: BoolColumn | None = None
        #: Hash of a session → its slot, for the endpoints and candidates above.
        self._homes: dict[int, int] = {}

    def score(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None:
        # A conversation that was recognised by its prompt follows its cached prompt and needs no assigned endpoint.
        if not request.session or request.session[0] == RECOGNISED:
            return None
        ids, candidates = fleet.table.ids, cycle.get(CANDIDATES)
        if ids is not self._ids:
            self._ids = ids
            self._hashes = np.array([xxh3_64_intdigest(name.encode()) if name else 0 for name in ids], dtype=np.uint64)
            self._homes.clear()
        if candidates is not self._candidates:
            self._candidates = candidates
            self._homes.clear()
        column = np.zeros(len(ids))
        column[self._home(request.session)] = 1.0
        return column

    def _home(self, session: str) -> int:
        seed = xxh3_64_intdigest(session.encode("utf-8", "surrogatepass"))
        home = self._homes.get(seed)
        if home is None:
            if len(self._homes) >= _CACHE:
                self._homes.clear()
            home = self._homes[seed] = self._compete(seed)
        return home

    def _compete(self, seed: int) -> int:
        rank = self._hashes ^ np.array(seed, dtype=np.uint64)
        for shift, factor in _MIX:
            rank ^= rank >> shift
            rank *= factor
        rank[self._hashes == 0] = 0
        if self._candidates is not None:
            rank[~self._candidates] = 0
        return int(rank.argmax())
