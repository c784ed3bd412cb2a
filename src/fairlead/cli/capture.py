"""`fairlead journal capture`: turns a journal into a workload that can be simulated, sent to servers, and published."""

from pathlib import Path
from typing import Annotated

import typer

from fairlead.cli.basics import WRONG_INPUT, echo_json
from fairlead.cli.options import examples, exits, needed_out
from fairlead.cli.replay import Journal, Run
from fairlead.config.problems import suggestion

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
  fairlead journal capture journal/ --out traffic.jsonl
  fairlead journal capture journal/ --out mooncake.jsonl --format mooncake
  fairlead sim run traffic.jsonl --policy round-robin
  fairlead bench localhost:8080 -w traffic.jsonl
""")
def capture(
    journal: Journal,
    old_out: Annotated[Path | None, typer.Argument(hidden=True)] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The workload to write. Needed.")] = None,
    format: Annotated[str, typer.Option(help="See `fairlead sim workload kinds`.")] = "native",
    run: Run = "",
    model: _Model = "",
    block_size: _BlockSize = 0,
    salt: _Salt = "",
    time_ratio: Annotated[
        float, typer.Option(metavar="N", min=0.001, help="Multiply times, if stubs ran faster than real servers.")
    ] = 1.0,
    refused: Annotated[bool, typer.Option("--refused", help="Keep requests that were refused.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="What was written, as JSON.")] = False,
) -> None:
    """Turn a journal into a workload: times, lengths, shared prefixes, sessions, limits and outcomes.

    A journal holds no text. Ids of blocks, sessions and tenants are hashed again with a salt, so that nobody can find a
    known prompt by its hash. Endpoints lose their names; models keep theirs.
    """
    import secrets

    from fairlead.cli.options import busy
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
            raise ValueError(f"{journal} holds no request{f' for {model}' if model else ''} that could be repeated")
        write_output(target, FORMATS[format].write(made.workload))
    records = made.workload.records
    if as_json:
        figures = {
            "file": str(target),
            "requests": len(records),
            "duration_s": made.workload.duration_s,
            "block_size": size,
            "estimated": {"prompts": made.estimated_prompts, "answers": made.estimated_answers},
            "left_out": {"refused": made.refused, "without_prompt": made.without_prompt},
        }
        echo_json(figures)
        return
    typer.echo(f"{target}: {len(records):,} requests over {made.workload.duration_s:,.0f} s, blocks of {size} tokens")
    typer.echo(
        f"  estimated: {made.estimated_prompts:,} prompt lengths, {made.estimated_answers:,} answer lengths "
        "(the others were reported)"
    )
    if made.refused or made.without_prompt:
        typer.echo(f"  left out: {made.refused:,} refused, {made.without_prompt:,} without a prompt")
