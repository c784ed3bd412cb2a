"""Small scenarios and plain policies for the simulator's tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fairlead.core.fleet import Fleet
from fairlead.core.policy import Context, Picked, Refused
from fairlead.core.request import Request
from fairlead.lab.simulator.world import Scenario, World, replicas
from fairlead.lab.workload.record import Record, Workload, arranged

DATA = Path(__file__).parents[3] / "data" / "traces"


class LeastPending:
    """The endpoint with the fewest own requests, the first of equals. Never asks chance."""

    name = "least-pending"

    def choose(self, request: Request, fleet: Fleet, context: Context) -> Picked | Refused:
        alive = fleet.table.slots()
        if not alive:
            return Refused("rejected-no-endpoints", "none")
        return Picked(min(alive, key=lambda entry: fleet.table.inflight[entry[0]])[0])


class Always:
    """One endpoint by its slot."""

    name = "always"

    def __init__(self, slot: int = 0) -> None:
        self.slot = slot

    def choose(self, request: Request, fleet: Fleet, context: Context) -> Picked:
        return Picked(self.slot)


@pytest.fixture
def least_pending() -> Callable[[], LeastPending]:
    return LeastPending


@pytest.fixture
def always() -> Callable[..., Always]:
    return Always


@pytest.fixture
def workload() -> Callable[..., Workload]:
    """`count` requests, `gap` seconds apart, each with its own blocks of 64 tokens behind `shared` common ones."""

    def make(count: int = 4, gap: float = 1.0, tokens: int = 640, out: int = 5, shared: int = 0, **fields) -> Workload:
        blocks = -(-tokens // 64)
        records = [
            Record(
                id=str(i),
                arrival_us=int(i * gap * 1e6),
                in_tokens=tokens,
                out_tokens=out,
                max_tokens=out,
                block_size=64,
                hash_ids=(*range(shared), *range(1000 * (i + 1), 1000 * (i + 1) + blocks - shared)),
                **fields,
            )
            for i in range(count)
        ]
        return arranged("w", records)

    return make


@pytest.fixture
def scenario() -> Callable[..., Scenario]:
    """Two servers, no chance involved."""

    def make(workload: Workload, servers: int = 2, world: World | None = None, **fields) -> Scenario:
        return Scenario(
            name="s",
            workload=workload,
            replicas=fields.pop("replicas", None) or replicas(servers, block_size=64),
            world=world or World(usage_share=1.0),
            **fields,
        )

    return make


@pytest.fixture
def mooncake_head() -> Path:
    return DATA / "mooncake_head.jsonl"
