"""`consistent-hashing-bounded`: equal beginnings go to one endpoint, as long as that is not overloaded.

Every endpoint gets a rank from a hash of (beginning of the prompt, endpoint id): rendezvous hashing, so several
schedulers agree and an endpoint that leaves moves only its own. The highest rank with at most 1.25 times the mean load
is taken (Mirrokni, Thorup, Zadimoghaddam 2018).
"""

from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.params import Params
from fairlead.plugins.policies.ranked import Ranked
from fairlead.schedule.cycle import Cycle

_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(31)


class ConsistentHashingParams(Params, frozen=True, kw_only=True):
    #: Bound of an endpoint's requests in flight, as a multiple of the mean.
    load_factor: Annotated[float, Meta(ge=1)] = 1.25
    #: Blocks of the prompt that are hashed (64 tokens each in the beginning); a session id takes their place.
    blocks: Annotated[int, Meta(ge=1)] = 8


class ConsistentHashingBounded(Ranked):
    """Requests without a session or a whole block are spread by their id."""

    type = "consistent-hashing-bounded"
    Params = ConsistentHashingParams
    _ids: tuple[str, ...] = ()
    _hashes: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)

    def cost(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn:
        table = fleet.table
        if table.ids is not self._ids:
            self._ids = table.ids
            self._hashes = np.array([xxh3_64_intdigest(name.encode()) for name in table.ids], dtype=np.uint64)
        mixed = (self._hashes ^ np.uint64(self._key(request))) * _MULTIPLIER
        mixed = (mixed ^ (mixed >> _SHIFT)) * _MULTIPLIER
        rank: FloatColumn = (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53
        load = table.queue + table.active + 1.0
        bound = self.params.load_factor * float(load[table.alive].mean())
        return np.where(load <= bound, rank, 1.0 + load)

    def _key(self, request: Request) -> int:
        if request.session:
            return xxh3_64_intdigest(request.session.encode("utf-8", "surrogatepass"))
        hashes = request.prefix.hashes
        if hashes:
            return hashes[min(len(hashes), int(self.params.blocks)) - 1] & 0xFFFF_FFFF_FFFF_FFFF
        return xxh3_64_intdigest(request.id.to_bytes(8, "little"))
