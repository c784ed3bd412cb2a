"""`fairlead explain`: why a request went to its endpoint, as tables for people or as JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fairlead.cli.basics import FAILED, WRONG_INPUT, echo_json
from fairlead.cli.options import Admin, Policy, Set, admin_url, change, examples, exits, fetched
from fairlead.core.text import plain

if TYPE_CHECKING:
    from fairlead.core.explain import Candidate


#: Width in characters for measuring how wide a table wants to be.
_WIDEST = 10_000


def show(explained: dict[str, Any], top: int) -> None:
    """Print an explanation. `explained`: the result of `server.observe.decisions.explained`."""
    console = Console(highlight=False, markup=False, emoji=False)
    explained = plain(explained)  # clients and model servers choose names, which may contain escape codes
    where = explained["endpoint"] or f"nowhere ({explained['outcome']})"
    name = f"request {explained['request_id']}" + (f" ({explained['external_id']})" if explained["external_id"] else "")
    first = f" (prompt: {prefill})" if (prefill := explained.get("prefill_endpoint")) else ""
    by = f" by {explained['policy']}" + (", answered by " if (answered := explained.get("answered_by")) else "")
    console.print(Text.assemble(name, " → ", (where, "bold"), first, by, (answered or "", "bold")))
    _say(
        console,
        f"{explained['target_model'] or 'no model'}, {explained['api']}{', streamed' if explained['stream'] else ''}, "
        f"{explained['prompt_tokens']:,} prompt tokens, priority {explained['priority']}; {_delay(explained)}",
    )
    explanation = explained.get("explanation")
    if explanation is None:
        _say(console, f"no costs to show: {explained.get('unexplained') or 'not recorded'}")
        _say(console, *(line for key in ("split", "waiting") for line in (explained.get(key) or {"why": []})["why"]))
    else:
        _candidates(console, explanation, top)
    _outcome(console, explained)
    instead = explained.get("instead")
    if instead is not None:
        verdict = "the same endpoint" if instead["same"] else instead["endpoint"] or "nowhere"
        console.print(Text.assemble(f"\n{instead['policy']} on the same numbers: ", (verdict, "bold")))
        _candidates(console, instead, top)


def _say(console: Console, *lines: str) -> None:
    """Print indented lines, wrapped between words."""
    for line in lines:
        console.print(Padding(line, (0, 0, 0, 2), expand=False))


def _delay(explained: dict[str, Any]) -> str:
    if explained["waited_ms"] < 0.05:
        return "decided at once"
    parts = {"queued": explained["queued_ms"], "asking another process": explained["asked_ms"]}
    spans = [f", {span:,.1f} ms {name}" for name, span in parts.items() if span]
    return f"decided after {explained['waited_ms']:,.1f} ms{''.join(spans)}"


def _candidates(console: Console, explanation: dict[str, Any], top: int) -> None:
    """Print the reasons, then the cost of each endpoint. Each term has a column if the terminal is wide enough;
    otherwise an endpoint's terms are listed below each other."""
    from msgspec import convert

    from fairlead.core.explain import Candidate, digits_of

    candidates = convert(explanation["candidates"], list[Candidate])
    unit = explanation["unit"]
    _say(console, *explanation["why"])
    digits = digits_of(candidates)
    table = _wide(candidates[:top], unit, digits)
    if console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum > console.width:
        table = _narrow(candidates[:top], unit, digits)
    console.print(table)
    if len(candidates) > top:
        _say(console, f"and {len(candidates) - top} more endpoints (--top)")
    if not explanation["reproduced"]:
        _say(
            console,
            "note: this policy has memory, uses chance or was changed since, so asked again it rates differently. "
            "Totals are as recorded.",
        )


def _table(unit: str, *further: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("endpoint", overflow="fold", min_width=12)
    for name in ("cost ms" if unit == "ms" else unit, "behind"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in further:
        table.add_column(name, justify="left" if name == further[-1] else "right", overflow="fold", min_width=len(name))
    return table


def _sign(unit: str) -> float:
    """Totals and terms are such that more is better; costs are shown as the policy gave them."""
    return 1.0 if unit == "points" else -1.0


def _row(table: Table, candidate: "Candidate", unit: str, digits: int, *further: str) -> None:
    table.add_row(
        Text(("* " if candidate.chosen else "  ") + candidate.endpoint),
        "–" if candidate.total is None else f"{_sign(unit) * candidate.total:z,.{digits}f}",
        "" if candidate.behind is None else f"{candidate.behind:z,.{digits}f}",
        *map(Text, further),
        style="bold" if candidate.chosen else "dim" if candidate.removed_by else None,
    )


def _wide(candidates: "Sequence[Candidate]", unit: str, digits: int) -> Table:
    names = list(candidates[0].terms) if candidates else []
    names = [] if names == ["cost"] else names  # the total says it
    table = _table(unit, *names, "cached", "queued", "running", "KV", "needed to tie")
    for candidate in candidates:
        shown = {name: _sign(unit) * value for name, value in candidate.terms.items()}
        terms = [f"{shown[name]:z,.{digits}f}" if name in shown else "–" for name in names]
        _row(table, candidate, unit, digits, *terms, *_state(candidate), _tie(candidate))
    return table


def _narrow(candidates: "Sequence[Candidate]", unit: str, digits: int) -> Table:
    table, least = _table(unit, "made up of"), 0.5 * 10**-digits
    for candidate in candidates:
        terms = sorted(candidate.terms.items(), key=lambda term: -abs(term[1]))
        shown = ((name, _sign(unit) * value) for name, value in terms if abs(value) >= least)
        parts = ", ".join(f"{name} {value:,.{digits}f}" for name, value in shown)
        cached, queued, running, kv = _state(candidate)
        tie = _tie(candidate)
        needed = f"\nto tie: {tie}" if tie and not candidate.removed_by else f"\n{tie}" if tie else ""
        _row(
            table,
            candidate,
            unit,
            digits,
            f"{parts}\n{cached} cached, {queued} queued, {running} running, KV {kv}{needed}",
        )
    return table


def _state(candidate: "Candidate") -> tuple[str, str, str, str]:
    """The columns (cached tokens, queued tokens, running requests, KV cache in use) of an endpoint."""
    return (
        f"{candidate.cached_tokens:,}",
        f"{candidate.queued_tokens:,.0f}",
        f"{candidate.running_requests:,.0f}",
        f"{candidate.kv_usage:.0%}",
    )


def _tie(candidate: "Candidate") -> str:
    from fairlead.core.explain import needed_to_tie

    if candidate.part:
        return candidate.part
    if candidate.removed_by:
        return f"filtered out by {', '.join(candidate.removed_by)}"
    if candidate.behind is None or candidate.behind <= 0.0:
        return ""
    return needed_to_tie(candidate) or "more cache or a shorter queue is not enough"


def _outcome(console: Console, explained: dict[str, Any]) -> None:
    prediction, result = explained.get("prediction"), explained.get("result")
    if answered := explained.get("answered_by"):
        _say(console, f"measured at {answered}: {explained['endpoint']} could not be reached, failed or was overdue")
    if prediction is not None:
        ttft, tpot, cached = prediction["ttft_ms"], prediction["tpot_ms"], prediction["cached_tokens"]
        low, high = ttft["band"]
        verdict = {True: ", within the band", False: ", outside the band", None: ""}[ttft["within"]]
        after = " from when it was sent" if explained["queued_ms"] or explained["asked_ms"] else ""
        span = f"{ttft['predicted']:,.1f} ms ({low:,.1f} to {high:,.1f}){after}"
        _say(
            console,
            f"TTFT forecast {span}; {_measured(ttft['actual'])}{verdict}",
            f"time per token forecast {tpot['predicted']:,.1f} ms; {_measured(tpot['actual'])}",
            f"cached tokens forecast {cached['predicted']:,}; "
            + ("not reported" if cached["actual"] is None else f"reported {cached['actual']:,}"),
        )
    if result is not None:
        _say(console, f"ended: {_end(explained, result)}")


def _end(explained: dict[str, Any], result: dict[str, Any]) -> str:
    cause, status, duration_ms = result["cause"], result["status"], result["duration_ms"]
    if cause == "evicted":  # recorded before the gateway reports how long it took
        duration_ms = (result["at"] - explained["at"]) * 1e3 + explained["waited_ms"]
        cause = "evicted for a more important request"
        if not status:
            return f"{cause} after {duration_ms:,.0f} ms; its answer had begun and was cut off"
    duration = "" if duration_ms is None else f" after {duration_ms:,.0f} ms"
    return f"{cause}, status {status or 'unknown'}{duration}"


def _measured(ms: float | None) -> str:
    return "not measured" if ms is None else f"measured {ms:,.1f} ms"


@examples("""
\b
Examples:
  fairlead explain last                     asks the scheduler on this host
  fairlead explain 94 --admin http://10.0.0.5:9090
  fairlead explain 3f2a9c01.000000000000005e journal/
  fairlead explain 94 journal/ --policy round-robin
  fairlead explain 94 journal/ --policy my_policy.py
  fairlead explain 94 journal/ --set interference=0
""")
def explain(
    request: Annotated[
        str, typer.Argument(metavar="ID", help="A decision's id or number, the client's x-request-id, or `last`.")
    ],
    journal: Annotated[str, typer.Argument(metavar="JOURNAL", help="Directory of a journal.", show_default=False)] = "",
    admin: Admin = "",
    policy: Policy = "",
    setting: Set = None,
    run: Annotated[
        str,
        typer.Option(
            "--run", metavar="ID", help="Which run of the scheduler.", show_default="the newest that knows it"
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    top: Annotated[int, typer.Option(metavar="N", min=1, help="Endpoints to show.")] = 12,
) -> None:
    """Show why a request went to its endpoint, what the others would have cost, and how good the forecast was.

    Terms are the policy's: costs (in ms, if it counts in them) or weighted scores. They add up to the total. --policy
    and --set ask another policy with the same numbers; they need a journal.
    """
    from fairlead.core.errors import FairleadError

    with exits(FAILED, FairleadError), exits(WRONG_INPUT, ValueError, OSError):
        is_url = journal.startswith(("http://", "https://"))
        if admin and journal:
            raise ValueError("give a journal or --admin, not both")
        if is_url or not journal:
            if policy or setting:
                raise ValueError("--policy and --set need a journal: the admin port does not keep the numbers")
            explained_decision = _fetch(admin_url(admin, journal), request)
        else:
            from fairlead.server.plugin_watch import watched

            with watched():
                explained_decision = _search(Path(journal), request, run, policy, setting)
    if as_json:
        echo_json(explained_decision)
        return

    show(explained_decision, top)


def _fetch(url: str, request: str) -> dict[str, Any]:
    """Get the explanation of a decision from the admin port at `url`. Raises `ValueError`, `OSError`, or `EngineError`
    if nothing answers."""
    from urllib.parse import quote

    import msgspec

    page = f"{url.rstrip('/')}/debug/decisions/{quote(request, safe='')}"
    answered: dict[str, Any] = msgspec.json.decode(fetched(page, url, "airlead"))
    return answered


def _search(path: Path, request: str, run: str, policy: str, settings: list[str] | None) -> dict[str, Any]:
    from fairlead.cli.options import busy
    from fairlead.compat.recorded import restore
    from fairlead.config.building import CANARY, canary_of
    from fairlead.config.plugins import build_policy
    from fairlead.core.errors import PLUGIN_FAILURES, ConfigError, PluginError, of_plugin
    from fairlead.core.explain import asked_again
    from fairlead.core.explain import explain as why
    from fairlead.lab.simulator.journal import search
    from fairlead.server.observe.decisions import explained, plain

    apply, registry = change(policy, settings)
    with busy(f"searching {path}"):
        recorded = search(path, request, run)
    config = restore(recorded.scheduling)
    if recorded.decision.policy.startswith(f"{CANARY}:"):  # else the canary's plugin need not be installed here
        config = canary_of(config).get(recorded.decision.policy, config)
    made = explained(recorded.decision, recorded.outcome, lambda: build_policy(config))
    made["decision_id"] = f"{recorded.run}.{recorded.decision.request.id:016x}"
    if apply is not None:
        trace, asked = recorded.decision.trace, apply(config)
        if trace is None or trace.snapshot is None:
            raise ValueError("the journal lacks the numbers of this decision, so no other policy can be asked")
        errors: list[PluginError] = []
        try:
            endpoint, answer = asked_again(
                build_policy(asked, errors.append, registry), recorded.decision.request, trace
            )
        except ConfigError:
            raise
        except PLUGIN_FAILURES as error:
            raise of_plugin(asked.policy.name, error) from error
        if errors:
            raise errors[0]
        answer.snapshot, answer.held, answer.loading = trace.snapshot, trace.held, trace.loading
        instead = why(lambda: build_policy(asked, None, registry), recorded.decision.request, answer, endpoint)
        made["instead"] = {"same": endpoint == recorded.decision.endpoint, **plain(instead)}
    return made
