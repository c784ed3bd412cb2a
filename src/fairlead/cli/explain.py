"""An explanation as tables, for people."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from fairlead.cli.options import FAILED, WRONG_INPUT, Policy, Set, change, echo_json, examples, exits, with_token


def show(explained: dict[str, Any], top: int) -> None:
    """Print it. `explained`: what `server.observe.decisions.explained` makes."""
    console = Console(soft_wrap=False, highlight=False)
    where = explained["endpoint"] or f"nowhere ({explained['outcome']})"
    console.print(
        f"request {explained['request_id']}" + (f" ({explained['external_id']})" if explained["external_id"] else ""),
        f"→ [bold]{where}[/] by {explained['policy']}",
    )
    console.print(
        f"  {explained['target_model'] or 'no model'}, {explained['api']}"
        f"{', streamed' if explained['stream'] else ''}, "
        f"{explained['prompt_tokens']:,} prompt tokens, priority {explained['priority']}; "
        f"waited {explained['waited_ms']:.1f} ms, of it {explained['queued_ms']:.1f} ms queued"
    )
    explanation = explained.get("explanation")
    if explanation is None:
        console.print(f"  no terms: {explained.get('unexplained') or 'not recorded'}")
        for line in (explained.get("waiting") or {"why": []})["why"]:
            console.print(f"  {line}", soft_wrap=True)
    else:
        _candidates(console, explanation, top, "")
    _prediction(console, explained)
    instead = explained.get("instead")
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
    for candidate in candidates[:top]:
        table.add_row(
            ("* " if candidate["chosen"] else "  ") + candidate["endpoint"],
            f"{candidate['cached_tokens']:,}",
            f"{candidate['queued_tokens']:,.0f}",
            f"{candidate['running_requests']:,.0f}",
            f"{candidate['kv_usage']:.0%}",
            *(f"{sign * candidate['terms'].get(name, 0.0):,.1f}" for name in names),
            "-" if candidate["total"] is None else f"{sign * candidate['total']:,.1f}",
            "" if candidate["behind"] is None else f"{candidate['behind']:,.1f}",
            _tie(candidate),
            style="bold" if candidate["chosen"] else "dim" if candidate["removed_by"] else None,
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


def _tie(candidate: dict[str, Any]) -> str:
    if candidate["removed_by"]:
        return f"filtered out by {', '.join(candidate['removed_by'])}"
    ways = []
    if candidate["more_cached_tokens"]:
        ways.append(f"{candidate['more_cached_tokens']:,} more cached")
    if candidate["fewer_queued_tokens"]:
        ways.append(f"{candidate['fewer_queued_tokens']:,.0f} fewer queued")
    return " or ".join(ways) if ways or candidate["chosen"] else "nothing of these"


def _prediction(console: Console, explained: dict[str, Any]) -> None:
    prediction, result = explained.get("prediction"), explained.get("result")
    if prediction is not None:
        ttft, tpot, cached = prediction["ttft_ms"], prediction["tpot_ms"], prediction["cached_tokens"]
        low, high = ttft["band"]
        came = "?" if ttft["actual"] is None else f"{ttft['actual']:,.1f}"
        verdict = {True: ", within the band", False: ", outside the band", None: ""}[ttft["within"]]
        queued = f" after {explained['queued_ms']:,.1f} ms in the queue" if explained["queued_ms"] else ""
        span = f"{ttft['predicted']:,.1f} ms ({low:,.1f} to {high:,.1f})"
        console.print(f"  TTFT forecast {span}{queued}, came {came}{verdict}")
        actual = "?" if cached["actual"] is None else f"{cached['actual']:,}"
        console.print(f"  cached tokens forecast {cached['predicted']:,}, reported {actual}; ", end="")
        actual = "?" if tpot["actual"] is None else f"{tpot['actual']:,.1f}"
        console.print(f"time per token forecast {tpot['predicted']:,.1f} ms, came {actual}")
    if result is not None:
        console.print(
            f"  ended: {result['cause']}, status {result['status'] or '?'}, {result['duration_ms'] or 0:,.0f} ms"
        )


# `fairlead explain`: why a request went where it went.


@examples("""
\b
Examples:
  fairlead explain 94 journal/
  fairlead explain 3f2a9c01.000000000000005e journal/    (the response header's id)
  fairlead explain 94 http://localhost:9090
  fairlead explain 94 journal/ --policy round-robin
  fairlead explain 94 journal/ --set interference=0
""")
def explain(
    request: Annotated[
        str, typer.Argument(metavar="ID", help="A decision id, our number of a request, or a client's x-request-id.")
    ],
    source: Annotated[
        str, typer.Argument(metavar="JOURNAL|URL", help="Directory of a journal, or an admin port.")
    ] = "http://localhost:9090",
    policy: Policy = "",
    setting: Set = None,
    run: Annotated[str, typer.Option("--run", help="Of which process; default: the newest that knows it.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="All of it as JSON.")] = False,
    top: Annotated[int, typer.Option(min=1, help="Endpoints to show.")] = 12,
) -> None:
    """Why this endpoint, why not the others, what it would have taken, and how good the forecast was.

    Terms are those of the policy: milliseconds of the cost model, or weighted scores; they add up to the total. With
    --policy or --set another policy is asked on the very same numbers (a journal is needed).
    """
    from fairlead.core.errors import FairleadError

    with exits(FAILED, FairleadError), exits(WRONG_INPUT, ValueError, OSError):
        if source.startswith(("http://", "https://")):
            if policy or setting:
                raise ValueError(
                    "another policy needs a journal: the admin port tells what was decided, not the numbers"
                )
            explained_decision = _fetch(source, request)
        else:
            explained_decision = _search(Path(source), request, run, policy, setting)
    if as_json:
        echo_json(explained_decision)
        return

    show(explained_decision, top)


def _fetch(url: str, request: str) -> dict[str, Any]:
    """Raises `ValueError`, `OSError`, or `EngineError` where nothing answers."""
    import urllib.error
    from urllib.parse import quote
    from urllib.request import urlopen

    import msgspec

    from fairlead.core.errors import EngineError

    try:
        page = f"{url.rstrip('/')}/debug/decisions/{quote(request, safe='')}"
        with urlopen(with_token(page), timeout=10.0) as answer:
            answered: dict[str, Any] = msgspec.json.decode(answer.read())
            return answered
    except urllib.error.HTTPError as error:
        raise ValueError(error.read(500).decode(errors="replace").strip() or str(error)) from None
    except urllib.error.URLError as error:
        raise EngineError(
            url, f"does not answer ({error.reason}); is `fairlead serve` running, and is this its admin port?"
        ) from None


def _search(path: Path, request: str, run: str, policy: str, settings: list[str] | None) -> dict[str, Any]:
    from fairlead.cli.options import busy
    from fairlead.compat.recorded import restore
    from fairlead.config.registry import build_policy
    from fairlead.core.explain import again
    from fairlead.core.explain import explain as why
    from fairlead.lab.simulator.journal import search
    from fairlead.server.observe.decisions import explained, plain

    apply = change(policy, settings)
    with busy(f"searching {path}"):
        recorded = search(path, request, run)
    config = restore(recorded.scheduling)
    made = explained(recorded.decision, recorded.outcome, lambda: build_policy(config))
    made["decision_id"] = f"{recorded.run}.{recorded.decision.request.id:016x}"
    if apply is not None:
        trace, asked = recorded.decision.trace, apply(config)
        if trace is None or trace.snapshot is None:
            raise ValueError("the numbers of this decision are not in the journal; nothing else can be asked")
        endpoint, answer = again(build_policy(asked), recorded.decision.request, trace)
        answer.snapshot, answer.held, answer.loading = trace.snapshot, trace.held, trace.loading
        instead = why(lambda: build_policy(asked), recorded.decision.request, answer, endpoint)
        made["instead"] = {"same": endpoint == recorded.decision.endpoint, **plain(instead)}
    return made
