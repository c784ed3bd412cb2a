"""`weights-322`: prefix, queue and KV memory weighed 3:2:2, the tuned weights of the reference picker's guides."""

from collections.abc import Sequence
from typing import Any

from fairlead.plugins.params import NoParams
from fairlead.plugins.pickers.max_score import MaxScore, MaxScoreParams
from fairlead.plugins.scorers.kv_utilization import KvUtilization
from fairlead.plugins.scorers.prefix_aware import PrefixAware, PrefixAwareParams
from fairlead.plugins.scorers.queue import Queue
from fairlead.schedule.framework import Filter, Scorer
from fairlead.schedule.profile import Profile


class Weights322(Profile):
    """Σ weight · score, ties at random."""

    type = "weights-322"
    Params = NoParams
    takes_filters = True

    def __init__(self, params: Any = None, name: str = type, filters: Sequence[Filter] = ()) -> None:
        scorers: list[tuple[Scorer, float]] = [
            (PrefixAware(PrefixAwareParams()), 3.0),
            (Queue(NoParams()), 2.0),
            (KvUtilization(NoParams()), 2.0),
        ]
        super().__init__(name, filters, scorers, MaxScore(MaxScoreParams(near_tie=0.0)))
