"""Closed, open, half-open."""

from fairlead.core.remote import CLOSED, HALF_OPEN, OPEN, Breaker, BreakerRules


def tripped() -> Breaker:
    breaker = Breaker(BreakerRules(failures=3, cooldown=10.0))
    for _ in range(3):
        assert breaker.allows(100.0)
        breaker.failed(100.0)
    return breaker


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(BreakerRules(failures=3))
    for _ in range(10):
        breaker.failed(0.0)
        breaker.failed(0.0)
        breaker.succeeded()
    assert (breaker.state, breaker.opened) == (CLOSED, 0)
    assert (tripped().state, tripped().opened) == (OPEN, 1)


def test_nothing_passes_until_the_cooldown_is_over_then_one_does() -> None:
    breaker = tripped()
    assert not breaker.allows(109.9)
    assert breaker.allows(110.0) and breaker.state == HALF_OPEN
    assert not breaker.allows(110.1), "one at a time"


def test_the_probe_decides() -> None:
    breaker = tripped()
    assert breaker.allows(110.0)
    breaker.failed(110.5)
    assert not breaker.allows(120.0) and breaker.state == OPEN
    assert breaker.allows(120.5)
    breaker.succeeded()
    assert breaker.state == CLOSED and breaker.allows(120.6) and breaker.allows(120.6)


def test_a_probe_that_is_dropped_lets_another_one_go() -> None:
    breaker = tripped()
    assert breaker.allows(110.0)
    breaker.dropped()
    assert breaker.allows(110.0)


def test_late_failures_of_requests_sent_before_do_not_prolong_it() -> None:
    breaker = tripped()
    breaker.failed(105.0)
    assert breaker.opened == 1 and breaker.allows(110.0)
