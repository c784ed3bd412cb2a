import random

import pytest

from fairlead.core.tokens import (
    DEFAULT_BYTES_PER_TOKEN,
    DEFAULT_OUTPUT_TOKENS,
    MAX_BYTES_PER_TOKEN,
    MIN_BYTES_PER_TOKEN,
    TokenEstimator,
)


def test_an_unknown_model_gets_the_default() -> None:
    estimator = TokenEstimator()
    assert estimator.estimate("m", 4200) == 1000
    assert estimator.estimate("m", 1) == 1
    assert estimator.estimate("m", 0) == 0
    assert estimator.estimate("m", -5) == 0
    assert estimator.bytes_per_token("m") == pytest.approx(DEFAULT_BYTES_PER_TOKEN)
    assert len(estimator) == 0


@pytest.mark.parametrize("ratio", [1.5, 3.0, 6.0, 9.0])
def test_it_finds_the_ratio_through_noise(ratio: float) -> None:
    rng = random.Random(1)
    estimator = TokenEstimator()
    for _ in range(300):
        size = int(rng.lognormvariate(8, 1.5)) + 10
        estimator.learn("m", size, max(1, round(size / ratio * rng.uniform(0.8, 1.2))))
    assert estimator.bytes_per_token("m") == pytest.approx(ratio, rel=0.1)
    assert estimator.estimate("m", 100_000) == pytest.approx(100_000 / ratio, rel=0.1)


def test_it_follows_a_change() -> None:
    estimator = TokenEstimator()
    for _ in range(200):
        estimator.learn("m", 10_000, 5_000)
    for _ in range(200):
        estimator.learn("m", 10_000, 1_250)
    assert estimator.bytes_per_token("m") == pytest.approx(8.0, rel=0.05)


def test_one_huge_report_does_not_set_the_ratio() -> None:
    estimator = TokenEstimator()
    for _ in range(100):
        estimator.learn("m", 20_000, 5_000)
    estimator.learn("m", 100_000_000, 8_400_000)
    assert estimator.bytes_per_token("m") == pytest.approx(4.0, rel=0.06)


def test_many_tiny_prompts_count_by_their_bytes() -> None:
    """`hi` has 36 bytes, and with the chat template as many tokens."""
    estimator = TokenEstimator()
    for _ in range(100):
        estimator.learn("m", 8_000, 2_000)
    for _ in range(500):
        estimator.learn("m", 36, 39)
    assert estimator.bytes_per_token("m") == pytest.approx(4.0, rel=0.15)
    for _ in range(200):
        estimator.learn("m", 500, 200)
    for _ in range(1000):
        estimator.learn("m", 500, 250)
    assert estimator.bytes_per_token("m") == pytest.approx(2.0, rel=0.05)


def test_models_and_apis_are_apart() -> None:
    estimator = TokenEstimator()
    for _ in range(200):
        estimator.learn("m", 10_000, 5_000)
        estimator.learn("m", 10_000, 2_000, "completions")
    assert estimator.bytes_per_token("m", "chat") == pytest.approx(2.0, rel=0.02)
    assert estimator.bytes_per_token("m", "completions") == pytest.approx(5.0, rel=0.02)
    assert estimator.bytes_per_token("n") == pytest.approx(DEFAULT_BYTES_PER_TOKEN)


@pytest.mark.parametrize("report", [(0, 5), (5, 0), (-1, 5), (5, -1), (0, 0)])
def test_empty_reports_are_ignored(report: tuple[int, int]) -> None:
    estimator = TokenEstimator()
    estimator.learn("m", *report)
    assert len(estimator) == 0


@pytest.mark.parametrize(
    "report",
    [(1, 2**31), (10**18, 1), (1, 10**300), (10**300, 10**300), (2**63, 2**63), (10**400, 10**400), (10**400, 1)],
)
def test_nonsense_stays_within_bounds(report: tuple[int, int]) -> None:
    estimator = TokenEstimator()
    for _ in range(1000):
        estimator.learn("m", *report)
        assert MIN_BYTES_PER_TOKEN * 0.99 <= estimator.bytes_per_token("m") <= MAX_BYTES_PER_TOKEN * 1.01
    assert estimator.estimate("m", 10**400) == 2**31 - 1


def test_memory_is_bounded_and_the_used_stay() -> None:
    estimator = TokenEstimator(max_models=10)
    for i in range(1000):
        estimator.learn("kept", 10_000, 5_000)
        estimator.learn(f"m{i}", 100, 20)
        estimator.estimate(f"asked{i}", 100)
    assert len(estimator) == 10
    assert estimator.bytes_per_token("kept") == pytest.approx(2.0, rel=0.02)


def test_output_lengths() -> None:
    estimator = TokenEstimator()
    assert estimator.estimate_output("m") == DEFAULT_OUTPUT_TOKENS
    assert estimator.estimate_output("m", 16) == 16
    for _ in range(300):
        estimator.learn_output("m", 40, 1000)
    assert estimator.estimate_output("m") == pytest.approx(40, abs=1)
    assert estimator.estimate_output("m", 16) == 16
    assert estimator.estimate_output("m", 100) == pytest.approx(40, abs=1)
    for bad in (0, -1):
        estimator.learn_output("m", bad)
    assert estimator.estimate_output("m") == pytest.approx(40, abs=1)


def test_a_completion_cut_by_its_limit_does_not_shorten_the_mean() -> None:
    estimator = TokenEstimator()
    for _ in range(300):
        estimator.learn_output("m", 500, 1000)
    for _ in range(300):
        estimator.learn_output("m", 1, 1)
    assert estimator.estimate_output("m") == pytest.approx(500, abs=2)
    for _ in range(300):
        estimator.learn_output("m", 800, 800)
    assert estimator.estimate_output("m") == pytest.approx(800, abs=2)


def test_output_nonsense_stays_within_bounds() -> None:
    estimator = TokenEstimator()
    for _ in range(1000):
        estimator.learn_output("m", 10**400)
    assert 1 <= estimator.estimate_output("m") <= 2**31 - 1


@pytest.mark.parametrize("api", ["embeddings", "score", "tokenize", "count_tokens", "images", "grpc_embed"])
def test_what_generates_nothing_is_expected_to_end_at_once(api: str) -> None:
    estimator = TokenEstimator()
    assert estimator.estimate_output("m", 0, api) == 1
    assert estimator.estimate_output("m", 500, api) == 1
