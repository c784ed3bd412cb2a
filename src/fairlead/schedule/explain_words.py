"""A choice between endpoints, in words."""

from collections.abc import Sequence

from fairlead.schedule.explained import Candidate


def why(candidates: Sequence[Candidate], unit: str) -> list[str]:
    """The choice in words: against the best of the others, and against who held most of the prompt."""
    if not candidates or not candidates[0].chosen:
        return ["no endpoint was chosen"]
    chosen, others = candidates[0], candidates[1:]
    rated = [one for one in others if one.total is not None and not one.removed_by]
    if chosen.total is None:
        return [f"{chosen.endpoint} was taken without being rated: everything else was filtered out or overloaded"]
    rivals = [max(rated, key=lambda one: one.total or 0.0)] if rated else []
    held_most = max(others, key=lambda one: one.cached_tokens, default=None)
    if held_most is not None and held_most.cached_tokens > chosen.cached_tokens and held_most not in rivals:
        rivals.append(held_most)
    lines = [_against(chosen, rival, unit) for rival in rivals]
    removed = [one for one in others if one.removed_by]
    if removed:
        names = ", ".join(sorted({name for one in removed for name in one.removed_by}))
        lines.append(f"{len(removed)} of {len(candidates)} endpoints were filtered out by {names}")
    return lines or [f"{chosen.endpoint} was the only endpoint"]


def _against(chosen: Candidate, rival: Candidate, unit: str) -> str:
    if rival.removed_by:
        held = f" although it holds {rival.cached_tokens - chosen.cached_tokens:,} more cached tokens"
        return f"{rival.endpoint} was filtered out by {', '.join(rival.removed_by)}{held}"
    gains = {name: value - rival.terms.get(name, 0.0) for name, value in chosen.terms.items()}
    better = ", ".join(f"{name} {gain:+,.1f}" for name, gain in _largest(gains) if gain > 0)
    worse = ", ".join(f"{name} {gain:+,.1f}" for name, gain in _largest(gains) if gain < 0)
    if rival.behind is not None and rival.behind < 0:
        ending = f"{rival.endpoint} was rated {-rival.behind:,.1f} {unit} better, and lost by lot or service level"
    else:
        ending = f"{rival.endpoint} was {rival.behind or 0.0:,.1f} {unit} behind {chosen.endpoint}"
    more = rival.cached_tokens - chosen.cached_tokens
    text = ending + (f" although it held {more:,} more cached tokens" if more > 0 else "")
    parts = [f"for {chosen.endpoint} speak {better}" if better else "", f"against it {worse}" if worse else ""]
    detail = "; ".join(part for part in parts if part)
    taken = []
    if rival.more_cached_tokens:
        taken.append(f"{rival.more_cached_tokens:,} more cached tokens")
    if rival.fewer_queued_tokens:
        taken.append(f"{rival.fewer_queued_tokens:,.0f} fewer queued tokens")
    tie = f"; with {' or '.join(taken)} it would have tied" if taken else ""
    return f"{text}: {detail}{tie}" if detail else text + tie


def _largest(gains: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(((name, gain) for name, gain in gains.items() if abs(gain) >= 0.05), key=lambda one: -abs(one[1]))
