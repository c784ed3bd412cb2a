"""Where requests go."""

from collections.abc import Collection
from random import Random

from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.schedule.cycle import Context
from fairlead.schedule.framework import Pick, Policy


def choose(policy: Policy, request: Request, fleet: Fleet, *, now: float = 0.0, seed: int = 0) -> Pick:
    """One decision, with its trace; nothing is charged."""
    (pick,) = policy.choose((request,), fleet, Context(now, Random(seed)))
    return pick


def assert_routed(
    policy: Policy, request: Request, fleet: Fleet, to: str | Collection[str], *, seeds: int = 20, now: float = 0.0
) -> None:
    """Whatever the dice say, the request goes to this endpoint (or one of these), and to each of several at times."""
    allowed = {to} if isinstance(to, str) else set(to)
    reached = set()
    for seed in range(seeds if len(allowed) < 2 else max(seeds, 20 * len(allowed))):
        pick = choose(policy, request, fleet, now=now, seed=seed)
        endpoint = fleet.table.ids[pick.slot] if pick.slot >= 0 else ""
        went = endpoint or f"nobody ({pick.reason})"
        assert endpoint in allowed, f"went to {went}, not to {_list(allowed)}"
        reached.add(endpoint)
    assert reached == allowed, f"never went to {_list(allowed - reached)}"


def assert_refused(policy: Policy, request: Request, fleet: Fleet, reason: str = "") -> None:
    """Nobody gets the request."""
    pick = choose(policy, request, fleet)
    assert pick.slot < 0, f"went to {fleet.table.ids[pick.slot]}"
    assert not reason or pick.reason == reason, f"refused as {pick.reason!r}, not {reason!r}"


def _list(names: Collection[str]) -> str:
    return " or ".join(sorted(names))
