"""`fairlead journal`: runs a journal's events through the scheduler again, or turns it into a workload that can be
simulated, sent to servers, and published."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairlead.cli.basics import FAILED, WRONG_INPUT, echo_json
from fairlead.cli.options import Policy, Set, busy, change, examples, exits, needed_out
from fairlead.config.problems import suggestion

if TYPE_CHECKING:
    from fairlead.lab.simulator.capture import Captured
    from fairlead.lab.simulator.replay import Compared, Replayed


_Journal = Annotated[Path, typer.Argument(metavar="JOURNAL", help="Directory of a journal, or one segment.")]
_Run = Annotated[
    str, typer.Option("--run", metavar="ID", help="Which run of the scheduler.", show_default="the last one")
]
#: Tokens per block id, for formats with a fixed block size.
_SIZES = {"mooncake": 512, "bailian": 16}
_Model = Annotated[
    str, typer.Option(metavar="NAME", help="Only requests that were sent for this model.", show_default="all")
]
_BlockSize = Annotated[
    int, typer.Option(metavar="TOKENS", min=0, max=65536, help="Per block id.", show_default="64, or the format's")
]
_Salt = Annotated[
    str,
    typer.Option(envvar="FAIRLEAD_SALT", help="Same salt, same ids [env: FAIRLEAD_SALT].", show_default="random"),
]


@examples("""
\b
Examples:
  fairlead journal replay journal/
  fairlead journal replay journal/ --set interference=0.5
  fairlead journal replay journal/ --policy round-robin --changes 50
  fairlead journal replay journal/ --policy my_policy.py

Exit codes: 0 as recorded (or compared), 1 the decisions differ although nothing is missing, or a plugin failed, 2 wrong
usage or no journal.
""")
def replay(
    journal: _Journal,
    policy: Policy = "",
    setting: Set = None,
    run: _Run = "",
    changes: Annotated[int, typer.Option(metavar="N", min=0, max=1000, help="Changed decisions to show.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON.")] = False,
) -> None:
    """Run a journal's events through the scheduler again and check that it decides the same.

    With --policy or --set it shows which decisions change and why. First tokens and ends stay where they were recorded;
    use `fairlead sim run` to see what another policy would have made of the traffic.
    """
    from fairlead.lab.simulator import replay as player
    from fairlead.lab.simulator.journal import one_run

    with exits(WRONG_INPUT, OSError, ValueError):
        apply, registry = change(policy, setting)
        compared = result = None
        with busy(f"replaying {journal}"):
            there = one_run(journal, run)
            if apply is not None:
                compared = player.compare(there, apply, registry)
            else:
                result = player.replay(there)
    if compared is not None:
        _show_change(compared, changes, as_json)
        if compared.failed:
            raise typer.Exit(FAILED)
    if result is None:
        return
    _show(result, as_json)
    if result.exact and not result.identical:
        raise typer.Exit(FAILED)


def _show(result: "Replayed", as_json: bool) -> None:
    if as_json:
        echo_json(
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
    elif result.both:
        typer.echo(f"  {result.same:,} of {result.both:,} on the same endpoint, {result.unlike:,} with other numbers")
        for number, before, after in result.different[:10]:
            typer.echo(f"    request {number}: recorded {before or 'refused'}, replayed {after or 'refused'}")
    for note in result.notes:
        typer.echo(f"  note: {note}")


def _show_change(result: "Compared", changes: int, as_json: bool) -> None:
    from msgspec import to_builtins

    if as_json:
        echo_json(
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
    for changed in result.changed[:changes]:
        gain = "" if changed.gain is None else f", rated {changed.gain:+,.1f} against it"
        was = "" if changed.cost is None else f"{-changed.cost:+,.1f}"
        cost = was and (f" (was {was})" if gain else f", was rated {was} against it")
        typer.echo(
            f"    request {changed.request_id}: {changed.before or 'refused'} -> {changed.after or 'refused'}"
            f"{gain}{cost}, {changed.reason}"
        )
    if total > changes:
        typer.echo(f"    and {total - changes:,} more; `fairlead explain ID JOURNAL` says more of one")
    hits = result.hit_tokens
    typer.echo(f"  all the way: believed cached tokens {hits[0]:,} -> {hits[1]:,}")
    for name in sorted(result.spread[0] | result.spread[1]):
        typer.echo(f"    {name or 'refused':24} {result.spread[0][name]:8,} -> {result.spread[1][name]:8,} requests")
    for note in result.notes:
        typer.echo(f"  note: {note}")


@examples("""
\b
Examples:
  fairlead journal capture journal/ --out traffic.jsonl
  fairlead journal capture journal/ --out mooncake.jsonl --format mooncake
  fairlead sim run traffic.jsonl --policy round-robin
  fairlead bench localhost:8080 -w traffic.jsonl
""")
def capture(
    journal: _Journal,
    old_out: Annotated[Path | None, typer.Argument(hidden=True)] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The workload to write. Needed.")] = None,
    format: Annotated[str, typer.Option(help="See `fairlead sim workload kinds`.")] = "native",
    run: _Run = "",
    model: _Model = "",
    block_size: _BlockSize = 0,
    salt: _Salt = "",
    time_ratio: Annotated[
        float,
        typer.Option(metavar="N", min=0.001, max=1e6, help="Multiply times, if stubs ran faster than real servers."),
    ] = 1.0,
    refused: Annotated[bool, typer.Option("--refused", help="Keep requests that were refused.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="What was written, as JSON.")] = False,
) -> None:
    """Turn a journal into a workload: times, lengths, shared prefixes, sessions, limits and outcomes.

    A journal holds no text. Ids of blocks, sessions and tenants are hashed again with a salt, so that nobody can find a
    known prompt by its hash. Endpoints lose their names; models keep theirs.
    """
    import secrets

    from fairlead.lab.simulator.capture import capture as take
    from fairlead.lab.simulator.journal import one_run
    from fairlead.lab.workload.formats import FORMATS
    from fairlead.server.files import write_output

    with exits(WRONG_INPUT, OSError, ValueError):
        if format not in FORMATS:
            raise ValueError(f"unknown format {format!r}; {suggestion(format, FORMATS)}")
        target = needed_out(out, old_out)
        key = salt.encode() or secrets.token_bytes(32)
        size = block_size or _SIZES.get(format, 64)
        with busy(f"reading {journal}"):
            there = one_run(journal, run)
            made = take(there, model, key=key, block_size=size, stretch=time_ratio, name=target.stem, refused=refused)
        if not made.workload.records:
            raise ValueError(f"run {there.id} of {journal} holds no request of {model or 'any model'} to repeat")
        write_output(target, FORMATS[format].write(made.workload))
    if as_json:
        figures = {"file": str(target), **_figures(made, size), "notes": there.notes}
        echo_json(figures)
        return
    records = made.workload.records
    typer.echo(f"{target}: {len(records):,} requests over {made.workload.duration_s:,.0f} s, blocks of {size} tokens")
    typer.echo(
        f"  estimated: {made.estimated_prompts:,} prompt lengths, {made.estimated_answers:,} answer lengths "
        "(the others were reported)"
    )
    if made.refused or made.without_prompt:
        typer.echo(f"  left out: {made.refused:,} refused, {made.without_prompt:,} without a prompt")
    typer.echo("".join(f"  note: {note}\n" for note in there.notes), nl=False)


def _figures(made: "Captured", block_size: int) -> dict[str, object]:
    """What was captured, for `--json`."""
    return {
        "requests": len(made.workload.records),
        "duration_s": made.workload.duration_s,
        "block_size": block_size,
        "estimated": {"prompts": made.estimated_prompts, "answers": made.estimated_answers},
        "left_out": {"refused": made.refused, "without_prompt": made.without_prompt},
    }
