"""When predictions from KV events are relied on."""

from fairlead.core.trust import PROOFS, RECOVERY, WINDOW, Trust, agrees


def test_an_endpoint_is_proven_by_some_agreements_in_a_row() -> None:
    trust = Trust()
    changed = [trust.judge(right) for right in (True, True, False, True, True, True)]
    assert changed == [False, False, False, False, False, True]
    assert trust.proven
    assert not trust.distrusted


def test_systematic_errors_end_the_trust_after_three() -> None:
    trust = Trust()
    assert [trust.judge(False) for _ in range(3)] == [False, False, True]
    assert trust.distrusted


def test_some_errors_among_many_do_not() -> None:
    trust = Trust()
    for number in range(400):
        trust.judge(number % 3 != 0)
        assert not trust.distrusted
    assert trust.level is not None
    assert 0.6 < trust.level < 0.7


def test_a_proven_endpoint_needs_more_errors_than_agreements() -> None:
    trust = Trust()
    for _ in range(WINDOW):
        trust.judge(True)
    assert trust.settled
    errors = 0
    while not trust.distrusted:
        trust.judge(False)
        errors += 1
        assert not trust.settled
    assert errors == WINDOW // 2 + 1


def test_agreements_in_a_row_bring_it_back() -> None:
    trust = Trust()
    for _ in range(30):
        trust.judge(False)
    for _ in range(RECOVERY - 1):
        assert not trust.judge(True)
    assert not trust.judge(False)
    assert [trust.judge(True) for _ in range(RECOVERY)] == [False] * (RECOVERY - 1) + [True]
    assert (trust.proven, trust.distrusted, trust.level) == (True, False, 1.0)


def test_another_engine_begins_anew() -> None:
    trust = Trust()
    for _ in range(PROOFS):
        trust.judge(True)
    trust.reset()
    assert (trust.proven, trust.level) == (False, None)


def test_pairs_agree_within_a_block_or_a_tenth() -> None:
    assert agrees(96, 112, 120, 16)
    assert not agrees(96, 113, 120, 16)
    assert agrees(900, 1000, 1000, 16)
    assert not agrees(0, 112, 1000, 16)
