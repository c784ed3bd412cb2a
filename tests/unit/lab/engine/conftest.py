"""A small engine with round numbers, and a way to run it to the end in virtual time."""

from collections.abc import Callable

import pytest

from fairlead.lab.engine.engine import Engine
from fairlead.lab.engine.request import EngineRequest
from fairlead.lab.engine.spec import EngineSpec, LatencyModel

#: One millisecond per step, and one more per hundred prompt tokens.
ROUND = LatencyModel(c0_ms=1.0, c_pf_us=10.0)


@pytest.fixture
def make_spec() -> Callable[..., EngineSpec]:
    def make(**changes: object) -> EngineSpec:
        values: dict[str, object] = {
            "latency": ROUND,
            "num_blocks": 65,
            "block_size": 4,
            "max_model_len": 200,
            "max_num_seqs": 8,
            "max_batched_tokens": 64,
        }
        return EngineSpec(**(values | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture
def run() -> Callable[[Engine], list[EngineRequest]]:
    """Step by step until nothing is left, checking the invariants after each; returns the finished ones in order."""

    def drive(engine: Engine) -> list[EngineRequest]:
        done: list[EngineRequest] = []
        for _ in range(10_000):
            at = engine.next_step_at()
            if at is None:
                return done
            done += engine.step(at).finished
            engine.validate()
        raise AssertionError("the engine does not come to an end")

    return drive


@pytest.fixture
def prompt() -> Callable[..., bytes]:
    """`count` tokens of prompt; another `of` is another text from the first token on."""

    def make(count: int, of: int = 0) -> bytes:
        return b"".join((of * 100_000 + i).to_bytes(4, "little") for i in range(count))

    return make
