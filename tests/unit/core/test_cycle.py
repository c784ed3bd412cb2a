"""One decision's typed state."""

from random import Random

from fairlead.core.policy import Context, Cycle, Key

ANSWER: Key[int | None] = Key("answer")
OTHER: Key[int | None] = Key("answer")


def test_a_value_is_computed_at_the_first_question_only() -> None:
    cycle = Cycle(Context(5.0, Random(1)))
    calls: list[int] = []

    def compute() -> int | None:
        calls.append(1)
        return None

    assert cycle.get(ANSWER) is None
    assert [cycle.once(ANSWER, compute) for _ in range(3)] == [None, None, None]
    assert len(calls) == 1, "also when the answer is None"
    assert cycle.now == 5.0


def test_keys_are_told_apart_by_identity_not_by_name() -> None:
    cycle = Cycle(Context(0.0, Random(1)))
    assert cycle.once(ANSWER, lambda: 42) == 42
    assert cycle.get(OTHER) is None
    assert cycle.once(OTHER, lambda: 7) == 7
    assert cycle.get(ANSWER) == 42
    assert repr(ANSWER) == "Key(answer)"
