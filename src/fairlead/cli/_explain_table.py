"""An explanation as tables, for people."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


def show(found: dict[str, Any], top: int) -> None:
    """Print it. `found`: what `observe.journal_explain.explained` makes."""
    console = Console(soft_wrap=False, highlight=False)
    where = found["endpoint"] or f"nowhere ({found['outcome']})"
    console.print(
        f"request {found['request_id']}" + (f" ({found['external_id']})" if found["external_id"] else ""),
        f"→ [bold]{where}[/] by {found['policy']}",
    )
    console.print(
        f"  {found['target_model'] or 'no model'}, {found['api']}{', streamed' if found['stream'] else ''}, "
        f"{found['prompt_tokens']:,} prompt tokens, priority {found['priority']}; "
        f"waited {found['waited_ms']:.1f} ms, of it {found['queued_ms']:.1f} ms queued"
    )
    explanation = found.get("explanation")
    if explanation is None:
        console.print(f"  no terms: {found.get('unexplained') or 'not recorded'}")
    else:
        _candidates(console, explanation, top, "")
    _prediction(console, found)
    instead = found.get("instead")
    if instead is not None:
        verdict = "the same endpoint" if instead["same"] else f"[bold]{instead['endpoint'] or 'nowhere'}[/]"
        console.print(f"\n{instead['policy']} on the same numbers: {verdict}")
        _candidates(console, instead, top, "")


def _candidates(console: Console, explanation: dict[str, Any], top: int, title: str) -> None:
    candidates = explanation["candidates"]
    names = list(candidates[0]["terms"]) if candidates else []
    costs = explanation["unit"] == "ms"
    sign = -1.0 if costs else 1.0
    table = Table(box=box.SIMPLE_HEAD, title=title or None, pad_edge=False)
    for name in ("endpoint", "cached", "queued", "running", "kv"):
        table.add_column(name, justify="left" if name == "endpoint" else "right")
    for name in names:
        table.add_column(name, justify="right")
    for name in (f"{'cost ms' if costs else 'total'}", "behind", "would tie with"):
        table.add_column(name, justify="left" if name.startswith("would") else "right")
    for one in candidates[:top]:
        table.add_row(
            ("* " if one["chosen"] else "  ") + one["endpoint"],
            f"{one['cached_tokens']:,}",
            f"{one['queued_tokens']:,.0f}",
            f"{one['running_requests']:,.0f}",
            f"{one['kv_usage']:.0%}",
            *(f"{sign * one['terms'].get(name, 0.0):,.1f}" for name in names),
            "-" if one["total"] is None else f"{sign * one['total']:,.1f}",
            "" if one["behind"] is None else f"{one['behind']:,.1f}",
            _tie(one),
            style="bold" if one["chosen"] else "dim" if one["removed_by"] else None,
        )
    console.print(table)
    if len(candidates) > top:
        console.print(f"  and {len(candidates) - top} more endpoints (--top)")
    for line in explanation["why"]:
        console.print(f"  {line}", soft_wrap=True)
    if not explanation["reproduced"]:
        console.print(
            "  note: this policy remembers or draws; asked again it rates otherwise. Totals are the recorded."
        )


def _tie(one: dict[str, Any]) -> str:
    if one["removed_by"]:
        return f"filtered out by {', '.join(one['removed_by'])}"
    ways = []
    if one["more_cached_tokens"]:
        ways.append(f"{one['more_cached_tokens']:,} more cached")
    if one["fewer_queued_tokens"]:
        ways.append(f"{one['fewer_queued_tokens']:,.0f} fewer queued")
    return " or ".join(ways) if ways or one["chosen"] else "nothing of these"


def _prediction(console: Console, found: dict[str, Any]) -> None:
    prediction, result = found.get("prediction"), found.get("result")
    if prediction is not None:
        ttft, tpot, cached = prediction["ttft_ms"], prediction["tpot_ms"], prediction["cached_tokens"]
        low, high = ttft["band"]
        came = "?" if ttft["actual"] is None else f"{ttft['actual']:,.1f}"
        verdict = {True: ", within the band", False: ", outside the band", None: ""}[ttft["within"]]
        console.print(f"  TTFT forecast {ttft['predicted']:,.1f} ms ({low:,.1f} to {high:,.1f}), came {came}{verdict}")
        actual = "?" if cached["actual"] is None else f"{cached['actual']:,}"
        console.print(f"  cached tokens forecast {cached['predicted']:,}, reported {actual}; ", end="")
        actual = "?" if tpot["actual"] is None else f"{tpot['actual']:,.1f}"
        console.print(f"time per token forecast {tpot['predicted']:,.1f} ms, came {actual}")
    if result is not None:
        console.print(
            f"  ended: {result['cause']}, status {result['status'] or '?'}, {result['duration_ms'] or 0:,.0f} ms"
        )
