"""`bench/groups.py` on a few cells: decided one after the other, a group is placed about as well as it can be, and who
thinks for long loses its place in the caches without the default sending anybody there in vain."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def groups(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module("groups")


@pytest.mark.parametrize(
    ("load", "endpoints", "size", "prefix"),
    [("idle", 2, 4, 4096), ("idle", 4, 4, 16384), ("warm", 2, 4, 4096), ("warm", 2, 8, 16384)],
)
def test_a_group_ends_about_as_early_as_with_the_best_split(groups, load, endpoints, size, prefix):
    found = groups.judge(groups.Cell(load, endpoints, size, prefix, 1))
    assert found["regret"]["ttft"] <= 1.05
    assert found["regret"]["last"] <= 1.05


def test_splits_are_tried_once_each(groups):
    assert sorted(groups.splits(groups.Cell("idle", 2, 4, 512, 1))) == [(2, 2), (3, 1), (4, 0)]
    assert len(set(groups.splits(groups.Cell("loaded", 2, 4, 512, 1)))) == 5


def test_sessions_that_pause_for_long_give_way_and_are_not_followed_to_where_they_were(groups):
    by_think = groups.sessions((20, 250.0, -1.0))
    cached = {think: shares[1] for think, shares in by_think.items()}
    assert cached["1"] > 0.9 > cached["60"] > cached["180"]
    assert max(shares[2] for shares in by_think.values()) < 0.02
