"""Prompts that every server answers with an error, as clients repeat them: servers are not to blame."""

from random import Random

import pytest

from fairlead.core import events as ev
from fairlead.core.endpoint import Endpoint
from fairlead.core.fleet import ERRORS_TO_EJECT, FAILED, FAILED_S, Fleet
from fairlead.core.instructions import Route
from fairlead.core.prefix import ChainHasher
from fairlead.core.profile import Profile
from fairlead.core.request import NO_PREFIX, Request
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.plugins.params import NoParams
from fairlead.plugins.pickers import RoundRobin
from fairlead.testing import SimClock

SYSTEM = b"You are a helpful assistant. " * 100


class Rig:
    """Three endpoints that take turns."""

    def __init__(self) -> None:
        self.clock = SimClock()
        profile = Profile("p", [], [], RoundRobin(NoParams()))
        self.pipeline = Pipeline(self.clock, Random(1), Fleet(), profile, TokenEstimator())
        for number in range(3):
            self.pipeline.handle(ev.EndpointUp(Endpoint(f"e{number}", f"10.0.0.{number}:8000")))
        self._asked = 0
        self.random = Random(2)

    def ask(self, prompt: bytes, status: int, times: int = 1, broken: str = "") -> list[str]:
        """Where it was asked. `broken`: answers everything with an error."""
        chain = ChainHasher().chain(b"m", prompt) if prompt else NO_PREFIX
        asked = []
        for _ in range(times):
            self.clock.now += 0.1
            self._asked += 1
            request = Request(
                id=self._asked, arrived=self.clock.now, prompt_tokens=9, prompt_bytes=len(prompt), prefix=chain
            )
            routes = [one for one in self.pipeline.handle(ev.RequestArrived(request)) if isinstance(one, Route)]
            asked += [route.endpoint.id for route in routes]
            status = 500 if broken in asked else status
            self.pipeline.handle(ev.ResponseEnded(request_id=self._asked, status=status))
        self.pipeline.validate()
        return asked

    def avoided(self) -> int:
        return int((self.pipeline.fleet.table.ejected_until > self.clock.now).sum())


def test_a_prompt_that_fails_everywhere_puts_nobody_out_of_use() -> None:
    rig = Rig()
    rig.ask(SYSTEM + b"a good question", 200, times=3)
    assert len(set(rig.ask(SYSTEM + b"a bad one", 500, times=30))) == 3
    assert rig.avoided() == 0


@pytest.mark.parametrize("prompt", [SYSTEM + b"a question", b""], ids=["one prompt", "short ones"])
def test_where_nothing_else_is_answered_each_failure_counts(prompt: bytes) -> None:
    rig = Rig()
    rig.ask(prompt, 500, times=9)
    assert rig.avoided() == 3


def test_failures_of_different_prompts_count() -> None:
    rig = Rig()
    rig.ask(SYSTEM, 200, times=3)
    for number in range(9):
        rig.ask(SYSTEM + b"%03d" % number * 99, 500)
    assert rig.avoided() == 3


def mixed(rig: Rig, bad: float, times: int, broken: str = "") -> int:
    """Ask so often; this share fails everywhere, and everything at `broken`. Each prompt is new. Return how often an
    endpoint was avoided."""
    avoided = 0
    for _ in range(times):
        fails = rig.random.random() < bad
        rig.ask(SYSTEM + rig.random.randbytes(400), 500 if fails else 200, broken=broken)
        avoided += rig.avoided()
    return avoided


@pytest.mark.parametrize("bad", [0.3, 0.6, 0.9])
def test_prompts_that_fail_everywhere_put_nobody_out_though_each_is_new(bad: float) -> None:
    rig = Rig()
    mixed(rig, bad, 60)
    assert mixed(rig, bad, 600) < 60, "of 600"


@pytest.mark.parametrize("bad", [0.0, 0.3, 0.6])
def test_a_server_that_fails_for_everybody_is_put_out_beside_prompts_that_fail_everywhere(bad: float) -> None:
    rig = Rig()
    mixed(rig, bad, 200)
    rig.clock.now += 4.0
    rounds = 0
    while not rig.avoided():
        rounds += 1
        mixed(rig, bad, 3, broken="e1")
    assert rounds <= (24 if bad else 3)
    assert rig.pipeline.fleet.table.errors[1] >= ERRORS_TO_EJECT


def test_a_hedged_request_of_an_endpoint_that_makes_progress_is_no_failure() -> None:
    rig = Rig()
    fleet = rig.pipeline.fleet
    errors = []
    for waited, stream in ((0.1, True), (9.0, True), (9.0, False), (11.0, False)):
        request = Request(id=1, arrived=rig.clock.now, prompt_tokens=9, max_tokens=9, stream=stream)
        lease = fleet.charge(request, 0, rig.clock.now, 0, 9.0)
        moved = fleet.move(lease, 1, rig.clock.now + waited, first_token=True)
        fleet.ledger.release(moved)
        errors.append(float(fleet.table.errors[0]))
    assert errors == [1.0, 1.0, 2.0, 2.0], "a whole answer is hedged later than the beginning of a stream"


def test_a_bad_prompt_that_ran_elsewhere_too_leaves_no_trace() -> None:
    rig = Rig()
    rig.ask(SYSTEM + b"a good question", 200, times=3)
    rig.ask(SYSTEM + b"a bad one", 500, times=2)
    rig.ask(SYSTEM + b"a good question", 200, times=3)
    fleet = rig.pipeline.fleet
    assert not fleet.table.troubled
    chain = ChainHasher().chain(b"m", SYSTEM + b"a bad one")
    request = Request(id=99, arrived=rig.clock.now, prompt_tokens=9, prompt_bytes=len(SYSTEM) + 9, prefix=chain)
    fleet.ledger.release(fleet.move(fleet.charge(request, 0, rig.clock.now, 0, 9.0), 1, rig.clock.now, False))
    assert not fleet.table.errors.any() and not fleet.table.troubled, "otherwise each choice takes the long way"


def test_what_a_prompt_did_is_forgotten() -> None:
    rig = Rig()
    fleet = rig.pipeline.fleet
    rig.ask(SYSTEM, 200, times=3)
    rig.ask(SYSTEM + b"bad" * 99, 500)
    for number in range(FAILED):
        fleet.table.errors[:] = 0.0
        rig.ask(SYSTEM + b"%04d" % number * 99, 500)
    fleet.table.errors[:] = 0.0
    rig.ask(SYSTEM + b"bad" * 99, 500, times=2)
    assert fleet.table.errors.sum() == 1.0, "the first one counts"
    rig.clock.now += FAILED_S + 1.0
    rig.ask(SYSTEM + b"bad" * 99, 500, times=2)
    assert fleet.table.errors.sum() == 3.0, "nobody answered anything for a minute"
    rig.ask(SYSTEM, 200, times=3)
    rig.ask(SYSTEM + b"bad" * 99, 500, times=2)
    assert fleet.table.errors.sum() == 0.0, "it is the prompt's fault"
    rig.clock.now += FAILED_S + 1.0
    rig.ask(SYSTEM, 200, times=3)
    rig.ask(SYSTEM + b"bad" * 99, 500, times=2)
    assert fleet.table.errors.sum() == 1.0, "after a minute the first one counts again"


def test_a_new_endpoint_has_no_part_in_what_failed_before() -> None:
    rig = Rig()
    (failed,) = rig.ask(SYSTEM + b"bad" * 99, 500)
    rig.pipeline.handle(ev.EndpointDown(failed))
    rig.pipeline.handle(ev.EndpointUp(Endpoint("new", "10.0.0.9:8000")))
    rig.ask(SYSTEM, 200, times=3)
    assert rig.ask(SYSTEM + b"bad" * 99, 500) != ["new"]
    assert rig.pipeline.fleet.table.errors.sum() == 1.0
