"""`fairlead capture`: a journal becomes a workload that can be simulated, sent, and given away."""

from pathlib import Path
from typing import Annotated

import typer

from fairlead.cli.options import WRONG_INPUT, echo_json, examples, exits
from fairlead.cli.replay import Journal, Run
from fairlead.config.problems import suggestion

#: Tokens per block id that a format demands.
_SIZES = {"mooncake": 512, "bailian": 16}


@examples("""
\b
Examples:
  fairlead capture journal/ traffic.jsonl
  fairlead capture journal/ traffic.mooncake.jsonl --format mooncake
  fairlead simulate traffic.jsonl --policy round-robin
  fairlead bench localhost:8080 -w traffic.jsonl
""")
def capture(
    journal: Journal,
    out: Annotated[Path, typer.Argument(metavar="FILE", help="The workload.")],
    format: Annotated[str, typer.Option(help="native (everything) or any of `fairlead workload kinds`.")] = "native",
    run: Run = "",
    block_size: Annotated[
        int, typer.Option(min=0, max=65536, help="Tokens per block id; default: 64, or what the format demands.")
    ] = 0,
    salt: Annotated[
        str,
        typer.Option(envvar="FAIRLEAD_SALT", help="Same salt, same ids: captures fit together. Default: a new one."),
    ] = "",
    time_ratio: Annotated[
        float, typer.Option(min=0.001, help="Of stubs that ran faster than real servers: times are multiplied by it.")
    ] = 1.0,
    refused: Annotated[bool, typer.Option(help="Keep requests that were refused.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="What was written, as JSON.")] = False,
) -> None:
    """Make a workload of a journal: times, lengths, which prompts begin alike, sessions, limits, outcomes.

    No text is in a journal. Ids of blocks, sessions and tenants are hashed again under a salt, so that nobody can tell
    a known prompt by its hash; endpoints lose their names. Names of models stay.
    """
    import secrets

    from fairlead.cli.options import busy
    from fairlead.lab.simulator.capture import capture as take
    from fairlead.lab.simulator.journal import JournalError, one_run
    from fairlead.lab.workload.formats import FORMATS

    with exits(WRONG_INPUT, JournalError, OSError, ValueError):
        if format not in FORMATS:
            raise ValueError(f"unknown format {format!r}; {suggestion(format, FORMATS)}")
        key = salt.encode() or secrets.token_bytes(32)
        size = block_size or _SIZES.get(format, 64)
        with busy(f"reading {journal}"):
            there = one_run(journal, run)
            made = take(there, key=key, block_size=size, stretch=time_ratio, name=out.stem, refused=refused)
        if not made.workload.records:
            raise ValueError(f"{journal} holds no request that could be repeated")
        out.write_bytes(FORMATS[format].write(made.workload))
    records = made.workload.records
    if as_json:
        figures = {
            "file": str(out),
            "requests": len(records),
            "duration_s": made.workload.duration_s,
            "block_size": size,
            "estimated": {"prompts": made.estimated_prompts, "answers": made.estimated_answers},
            "left_out": {"refused": made.refused, "without_prompt": made.without_prompt},
        }
        echo_json(figures)
        return
    typer.echo(f"{out}: {len(records):,} requests over {made.workload.duration_s:,.0f} s, blocks of {size} tokens")
    typer.echo(
        f"  estimated: {made.estimated_prompts:,} prompt lengths, {made.estimated_answers:,} answer lengths "
        "(the others were reported)"
    )
    if made.refused or made.without_prompt:
        typer.echo(f"  left out: {made.refused:,} refused, {made.without_prompt:,} without a prompt")
