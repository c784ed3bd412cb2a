"""Prompts that every server answers with an error, as clients repeat them: servers are not to blame."""

from math import inf, log10
from random import Random

import pytest

from fairlead.core import events as ev
from fairlead.core.endpoint import Endpoint
from fairlead.core.fleet import ERRORS_TO_EJECT, FAILED, FAILED_S, Fleet
from fairlead.core.instructions import Route
from fairlead.core.ledger import Lease
from fairlead.core.prefix import ChainHasher
from fairlead.core.profile import Profile
from fairlead.core.reports import SharedFleet
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


class Ends:
    """Requests that end at chosen endpoints; each prompt is new."""

    def __init__(self) -> None:
        self.fleet = SharedFleet()
        for number in range(3):
            self.fleet.up(Endpoint(f"e{number}", f"10.0.0.{number}:8000"))
        self.now = 100.0
        self._sent = 0

    def _lease(self, slot: int, client: str, model: str, cached: int) -> Lease:
        self.now += 0.01
        self._sent += 1
        chain = ChainHasher().chain(b"m", b"%04d" % self._sent * 200)
        request = Request(self._sent, self.now, model=model, prompt_tokens=9, prefix=chain, fairness_id=client)
        lease = self.fleet.charge(request, slot, self.now, cached, 9.0)
        self.fleet.ledger.release(lease)
        return lease

    def answer(self, slot: int, times: int = 1, client: str = "buggy", model: str = "m", cached: int = 0) -> None:
        for _ in range(times):
            self.fleet.completed(self._lease(slot, client, model, cached), self.now, 5)

    def blame(self, slot: int, times: int = 1, client: str = "buggy", model: str = "m", cached: int = 0) -> float:
        """How much the last failure tells against the endpoint."""
        for _ in range(times):
            told = self.fleet.blame(self._lease(slot, client, model, cached), self.now)
        return told


def test_a_failure_counts_less_the_more_requests_like_it_fail_elsewhere() -> None:
    ends = Ends()
    ends.answer(1, client="good")
    ends.blame(1, times=9)
    assert ends.blame(0) == 1.0, "nothing shows that e1 still answers"
    ends.answer(1, client="good")
    one = ends.blame(0)
    assert one == pytest.approx(-log10(9 / 12))
    assert {ends.blame(0, client="other"), ends.blame(0, model="n"), ends.blame(0, cached=5)} == {1.0}
    ends.answer(1, times=100, client="good")
    ends.answer(0, times=100)
    assert ends.blame(0) == one, "others' answers, and its own, tell nothing of that"
    ends.answer(1, times=9)
    assert ends.blame(0) == pytest.approx(-log10(9 / 21))
    ends.answer(2, times=500, client="good")
    assert ends.blame(0) == 1.0, "the answers that are remembered begin after these failures"


def test_a_server_that_is_out_fails_for_all_and_shows_nothing_of_them() -> None:
    ends = Ends()
    ends.answer(1, client="good")
    for _ in range(9):
        ends.fleet.answered(1, False, ends.now, blame=ends.blame(1))
    ends.answer(1, client="good")
    assert ends.blame(0) == pytest.approx(-log10(3 / 6))


def test_a_small_blame_puts_nobody_out_again_and_is_not_reported() -> None:
    fleet = Ends().fleet
    for blame, errors, until in ((0.4, 0.4, -inf), (1.0, 1.4, -inf), (1.0, 2.4, -inf), (1.0, 3.4, 103.0)):
        fleet.answered(0, False, 100.0, blame=blame)
        assert (fleet.table.errors[0], fleet.table.ejected_until[0]) == (pytest.approx(errors), until)
        assert (fleet.reports.batch(100.0) == b"") == (blame < 0.5)
    fleet.answered(0, False, 102.0, blame=0.4)
    assert (fleet.table.errors[0], fleet.table.ejected_until[0]) == (pytest.approx(2.4), 103.0)
    fleet.answered(0, False, 102.0)
    assert fleet.table.ejected_until[0] == 105.0
