"""`fairlead sim quality`: simulates policies on every scenario, and shows how far each is from the best."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairlead.cli.basics import WRONG_INPUT, echo_json
from fairlead.cli.compare import Policies, end_with_errors, results_of, texts_of
from fairlead.cli.options import SEEDS, Processes, Traces, examples, exits, traces_of, workload_option

if TYPE_CHECKING:
    from fairlead.lab.simulator.grid import Cell


class Set(StrEnum):
    """Scenarios that may be used for tuning, scenarios that may not, and scenarios drawn at random."""

    DEVELOPMENT = "development"
    HELD_OUT = "held-out"
    DRAWN = "drawn"
    ALL = "all"


@examples("""
\b
Examples:
  fairlead sim quality -p default -p my_policy.py --quick
  fairlead sim quality -p default -p mine=mine.yaml -w agents -w hot-prefix
  fairlead sim quality --set held-out
  fairlead sim quality -p default -p mine=mine.yaml -w drawn-7
""")
def quality(
    policy: Policies = None,
    workload: Annotated[
        list[str] | None, workload_option("NAME", "Only this scenario; repeat.", show_default="the set")
    ] = None,
    chosen: Annotated[
        Set, typer.Option("--set", metavar="SET", help="development, held-out, all (these two), or drawn.")
    ] = Set.DEVELOPMENT,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer requests of each scenario.")] = False,
    seeds: Annotated[int, typer.Option(metavar="N", min=1, help=SEEDS)] = 1,
    traces: Traces = "",
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where results go.", file_okay=False)] = Path("out/quality"),
    processes: Processes = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do not resume an interrupted run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Regrets of each policy over each set as JSON.")] = False,
) -> None:
    """Simulate policies on every scenario and print how far each is from the best.

    The scheduler begins with a wrong prior and does not know answers' lengths. All policies on the development set take
    about 20 minutes on one core; an interrupted run resumes. The held-out set is for the last look, not for tuning. The
    drawn set is 24 pools, workloads, loads and faults at random; drawn-SEED draws others. With --policy, pools of
    prefill and decode servers (apart-…) are left out unless --workload names them.
    """
    from fairlead.lab.simulator.quality import judgement, print_table, write_summary

    with exits(WRONG_INPUT, ValueError, OSError):
        cells = _cells(policy or [], workload or [], chosen, quick, seeds, traces)
        results = results_of(cells, out, fresh, processes)
        compared = write_summary(out, results)
    if as_json:
        echo_json({name: judgement(regret) for name, regret in compared.regrets.items()})
    else:
        print_table(compared)
    typer.echo(f"written: {out / 'summary.json'}, {out / 'scenarios.json'}", err=True)
    end_with_errors(results)


def _cells(
    policies: list[str], scenarios: list[str], chosen: Set, quick: bool, seeds: int, traces: str
) -> "list[Cell]":
    from fairlead.lab.simulator.quality import CALM, KNOWN, cells, entries, named, names
    from fairlead.lab.simulator.scenarios import APART

    known = entries()
    texts = {name: known[name] for name in policies if name in known}
    texts = {**texts, **texts_of([name for name in policies if name not in known])} or known
    # What other policies than the given ones take part in, and what the tables do not show, is for the whole set.
    chosen_names = named(scenarios) or [
        name for name in names(chosen.replace("-", "_")) if not policies or name not in APART
    ]
    made = cells(chosen_names, texts, traces_of(traces, chosen_names), quick, seeds)
    return [cell for cell in made if not policies or not cell.scenario.name.endswith((KNOWN, CALM))]
