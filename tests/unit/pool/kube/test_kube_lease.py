"""Who may take a lease, and when: the table of leader election; and when a condition already stands."""

import json
from typing import Any

from msgspec import Raw

from fairlead.pool.kube.elector import (
    Keep,
    Lease,
    Sight,
    Take,
    Wait,
    claimed,
    lease_object,
    micro_time,
    next_step,
    read_lease,
    released,
)
from fairlead.pool.kube.status import MAX_MESSAGE, Condition, stands, status_patch

OURS = Lease("me", 10, "t0", "t1", 3, "7")
THEIRS = Lease("other", 20, "t0", "t1", 3, "7")


def test_no_lease_or_a_free_one_is_taken() -> None:
    assert next_step(Sight(None, 0.0), "me", 0.0, 10.0) == Take()
    assert next_step(Sight(Lease("", 1), 0.0), "me", 0.0, 10.0) == Take()


def test_ours_is_kept_however_old() -> None:
    assert next_step(Sight(OURS, 0.0), "me", 1e6, 10.0) == Keep()


def test_anothers_is_waited_for_by_its_own_duration() -> None:
    assert next_step(Sight(THEIRS, 100.0), "me", 100.0, 10.0) == Wait(120.0)
    assert next_step(Sight(THEIRS, 100.0), "me", 119.99, 10.0) == Wait(120.0)
    assert next_step(Sight(THEIRS, 100.0), "me", 120.0, 10.0) == Take()
    nameless = Lease("other", 0, version="7")
    assert next_step(Sight(nameless, 100.0), "me", 100.0, 10.0) == Wait(110.0)


def test_only_a_change_begins_a_new_time() -> None:
    sight = Sight(THEIRS, 100.0)
    assert sight.seen(THEIRS, 115.0) is sight
    renewed = Lease("other", 20, "t0", "t2", 3, "8")
    assert sight.seen(renewed, 115.0).since == 115.0


def test_what_is_written() -> None:
    first = claimed(None, "me", 10.0, 0.0)
    assert (first.holder, first.duration, first.transitions, first.version) == ("me", 10, 0, "")
    taken = claimed(THEIRS, "me", 10.0, 0.0, "10.0.0.1:9003", "http://10.0.0.1:9090/learned/x")
    assert (taken.transitions, taken.version, taken.acquired) == (4, "7", taken.renewed)
    kept = claimed(OURS, "me", 10.0, 0.0)
    assert (kept.transitions, kept.acquired, kept.renewed) == (3, "t0", micro_time(0.0))
    free = released(OURS, 0.0)
    assert (free.holder, free.duration, free.version, free.address, free.page) == ("", 1, "7", "", "")
    assert micro_time(0.25) == "1970-01-01T00:00:00.250000Z"
    assert "resourceVersion" not in lease_object(first, "n", "x")["metadata"]
    assert read_lease(Raw(json.dumps(lease_object(taken, "n", "x")).encode())) == taken


ITEM: dict[str, Any] = {
    "apiVersion": "g/v1",
    "kind": "K",
    "metadata": {"name": "a", "namespace": "n", "generation": 3},
    "status": {
        "conditions": [
            {"type": "Ready", "status": "Unknown"},
            {
                "type": "Accepted",
                "status": "True",
                "reason": "Accepted",
                "message": "in use",
                "observedGeneration": 3,
                "lastTransitionTime": "2020-01-01T00:00:00Z",
            },
        ]
    },
}


def test_a_condition_that_stands_is_not_written() -> None:
    wanted = Condition(True, "Accepted", "in use")
    assert stands(wanted, ITEM)
    assert not stands(Condition(True, "Accepted", "other words"), ITEM)
    assert not stands(Condition(False, "Accepted", "in use"), ITEM)
    newer = {**ITEM, "metadata": {**ITEM["metadata"], "generation": 4}}
    assert not stands(wanted, newer)
    for broken in ({}, {"status": None}, {"status": {"conditions": "x"}}, {"status": {"conditions": [7]}}):
        assert not stands(wanted, broken)


def test_the_time_changes_with_the_status_only() -> None:
    (same,) = status_patch(Condition(True, "Accepted", "x" * 40_000), ITEM, 0.0)["status"]["conditions"]
    assert same["lastTransitionTime"] == "2020-01-01T00:00:00Z"
    assert len(same["message"]) == MAX_MESSAGE
    (other,) = status_patch(Condition(False, "Invalid", "no"), ITEM, 0.0)["status"]["conditions"]
    assert other["lastTransitionTime"] == "1970-01-01T00:00:00Z"
    assert other["observedGeneration"] == 3
