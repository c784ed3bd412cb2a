"""`fairlead replay`: a journal's events through the scheduler again."""

from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairlead.cli._options import FAILED, WRONG_INPUT, complain
from fairlead.cli._policy import Policy, Set, change

if TYPE_CHECKING:
    from fairlead.sim.replay import Replayed
    from fairlead.sim.replay_change import Compared

_EXAMPLES = """
\b
Examples:
  fairlead replay journal/
  fairlead replay journal/ --set interference=0.5
  fairlead replay journal/ --policy round-robin --changes 50
\b
Exit codes: 0 as recorded (or compared), 1 the decisions differ from the recorded
ones although nothing is missing, 2 wrong usage or no journal.
"""

Journal = Annotated[Path, typer.Argument(metavar="JOURNAL", help="Directory of a journal, or one segment.")]
Run = Annotated[str, typer.Option("--run", help="Of which process; default: the last one in the journal.")]


def replay(
    journal: Journal,
    policy: Policy = "",
    setting: Set = None,
    run: Run = "",
    changes: Annotated[int, typer.Option(min=0, max=1000, help="Changed decisions to show.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON.")] = False,
) -> None:
    """Feed a journal's events through the scheduler again, and see that it decides the same.

    With --policy or --set: which decisions would be others, and why. What happened stays what happened (first tokens
    and ends come when they came); what another policy would have made of it, `fairlead simulate` says.
    """
    from fairlead.cli._progress import busy
    from fairlead.sim import replay as same
    from fairlead.sim import replay_change
    from fairlead.sim.journal import JournalError, one_run

    try:
        other = change(policy, setting)
        compared = result = None
        with busy(f"replaying {journal}"):
            there = one_run(journal, run)
            if other is not None:
                compared = replay_change.compare(there, other)
            else:
                result = same.replay(there)
    except (JournalError, OSError, ValueError) as error:
        complain(error)
        raise typer.Exit(WRONG_INPUT) from None
    if compared is not None:
        _show_change(compared, changes, as_json)
    if result is None:
        return
    _show(result, as_json)
    if result.exact and not result.identical:
        raise typer.Exit(FAILED)


replay.__doc__ = f"{cleandoc(replay.__doc__ or '')}\n{_EXAMPLES}"


def _show(result: "Replayed", as_json: bool) -> None:
    if as_json:
        _json(
            {
                "run": result.run,
                "events": result.events,
                "recorded": {"decisions": result.recorded.decisions, "hash": result.recorded.hash},
                "replayed": {"decisions": result.replayed.decisions, "hash": result.replayed.hash},
                "identical": result.identical,
                "exact": result.exact,
                "same": result.same,
                "both": result.both,
                "different": result.different,
                "notes": result.notes,
            }
        )
        return
    recorded, replayed = result.recorded, result.replayed
    typer.echo(f"run {result.run}: {result.events:,} events")
    typer.echo(f"  recorded  {recorded.decisions:,} decisions, {recorded.refused:,} refused, hash {recorded.hash}")
    typer.echo(f"  replayed  {replayed.decisions:,} decisions, {replayed.refused:,} refused, hash {replayed.hash}")
    if result.identical:
        typer.echo("  identical: every decision, every predicted hit, every forecast")
    else:
        typer.echo(f"  {result.same:,} of {result.both:,} on the same endpoint, {result.unlike:,} with other numbers")
        for number, before, after in result.different[:10]:
            typer.echo(f"    request {number}: recorded {before or 'refused'}, replayed {after or 'refused'}")
    for note in result.notes:
        typer.echo(f"  note: {note}")


def _show_change(result: "Compared", changes: int, as_json: bool) -> None:
    from msgspec import to_builtins

    if as_json:
        _json(
            {
                "run": result.run,
                "policy": result.policy,
                "decisions": result.decisions,
                "changed": sum(result.reasons.values()),
                "share": result.share,
                "reasons": dict(result.reasons),
                "changes": to_builtins(result.changed[:changes]),
                "hash": {"before": result.before.hash, "after": result.after.hash},
                "hit_tokens": {"before": result.hit_tokens[0], "after": result.hit_tokens[1]},
                "spread": {"before": dict(result.spread[0]), "after": dict(result.spread[1])},
                "exact": result.exact,
                "notes": result.notes,
            }
        )
        return
    total = sum(result.reasons.values())
    why = ", ".join(f"{count:,} by {reason}" for reason, count in result.reasons.most_common())
    typer.echo(f"run {result.run}, asked of {result.policy}:")
    typer.echo(
        f"  one at a time: {total:,} of {result.decisions:,} decisions change ({result.share:.1%}) {why}".rstrip()
    )
    for one in result.changed[:changes]:
        gain = "" if one.gain is None else f", rated {one.gain:+,.1f} against it"
        cost = "" if one.cost is None else f" (was {-one.cost:+,.1f})"
        typer.echo(
            f"    request {one.request_id}: {one.before or 'refused'} -> {one.after or 'refused'}{gain}{cost}, "
            f"{one.reason}"
        )
    if total > changes:
        typer.echo(f"    and {total - changes:,} more; `fairlead explain ID JOURNAL` says more of one")
    hits = result.hit_tokens
    typer.echo(f"  all the way: believed cached tokens {hits[0]:,} -> {hits[1]:,}")
    for name in sorted(result.spread[0] | result.spread[1]):
        typer.echo(f"    {name or 'refused':24} {result.spread[0][name]:8,} -> {result.spread[1][name]:8,} requests")
    for note in result.notes:
        typer.echo(f"  note: {note}")


def _json(value: object) -> None:
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value)))
