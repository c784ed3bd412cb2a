"""What the dashboard of a running scheduler shows."""

import time
from collections.abc import Callable, Sequence

from fairlead.config.schema import Config
from fairlead.io.dashboard import DashboardSources
from fairlead.live.core import Core
from fairlead.observe.snapshot import TICK, SnapshotMaker
from fairlead.observe.watch import POOL


def dashboard(
    config: Config, core: Core, now: Callable[[], float], reasons: Callable[[], Sequence[str]]
) -> DashboardSources:
    """`now`: the clock of records. `reasons`: why we are not ready."""
    pipeline = core.pipeline
    maker = SnapshotMaker(
        core.watch,
        now,
        time.time() - now(),
        pool=config.kubernetes.pool or POOL,
        policy=lambda: pipeline.policy.name,
        reasons=reasons,
    )
    return DashboardSources(begin=maker.begin, end=maker.end, beginning=maker.beginning, take=maker.take, tick=TICK)
