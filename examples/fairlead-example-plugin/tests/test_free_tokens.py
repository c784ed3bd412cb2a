from fairlead_example_plugin import FreeTokens, FreeTokensParams

from fairlead.core.profile import Profile
from fairlead.plugins.pickers import MaxScore, MaxScoreParams
from fairlead.testing import assert_routed, check_scorer, cycle, fleet, request

SAMPLES = {
    "e0": {"kv_usage": 0.9, "running": 9, "block_size": 16, "num_blocks": 625},
    "e1": {"kv_usage": 0.1, "running": 1, "block_size": 16, "num_blocks": 625},
}


def scorer(output: int = 500) -> FreeTokens:
    return FreeTokens(FreeTokensParams(expected_output=output))


def test_it_keeps_the_contract() -> None:
    check_scorer(scorer())


def test_it_prefers_room_for_the_whole_request() -> None:
    profile = Profile("p", [], [(scorer(), 1.0)], MaxScore(MaxScoreParams()))
    assert_routed(profile, request("x" * 4000), fleet("e0", "e1", samples=SAMPLES), "e1")


def test_the_score_is_the_share_that_fits() -> None:
    known = fleet("e0", "e1", "e2", samples=SAMPLES)
    scores = scorer().score(request("x" * 4000, max_tokens=1000), known, cycle())
    assert scores is not None
    assert scores.round(3).tolist() == [0.5, 1.0, 0.5]  # 1000 of 2000 tokens; 9000; nothing is known
