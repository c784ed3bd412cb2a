"""`fairlead compare --against JOURNAL`: two runs side by side, and conditions under which the newer one fails."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairlead.cli._options import FAILED, WRONG_INPUT, complain
from fairlead.cli._policy import change

if TYPE_CHECKING:
    from fairlead.sim.journal import Run

Against = Annotated[
    Path | None,
    typer.Option(
        help="A journal: simulate its traffic under its policy and under --policy, side by side.", show_default=False
    ),
]
Other = Annotated[
    Path | None, typer.Option("--journal", help="With --against: what this one measured instead.", show_default=False)
]
FailIf = Annotated[
    list[str] | None,
    typer.Option(help="With --against: exit with 1 if e.g. 'ttft_p95 > +5%'; repeat.", metavar="CONDITION"),
]


def gate(
    against: Path,
    journal: Path | None,
    policies: Sequence[str],
    fail_if: Sequence[str],
    *,
    load: str = "1",
    servers: int = 0,
    preset: str = "",
    head: int = 0,
) -> None:
    """Print both and exit with 1 when a condition is broken, 2 on wrong usage."""
    from fairlead.cli._progress import busy
    from fairlead.model.errors import FairleadError
    from fairlead.sim.gate import FIGURES, condition

    try:
        conditions = [condition(text) for text in fail_if]
        with busy(f"simulating {against}" if journal is None else "reading journals"):
            before, after, names = _figures(against, journal, policies, float(load), servers, preset, head)
    except (ValueError, OSError, FairleadError) as error:
        complain(error)
        raise typer.Exit(WRONG_INPUT) from None
    typer.echo(f"{'':12} {names[0][-20:]:>20} {names[1][-20:]:>20}  change")
    for name in FIGURES:
        old, new = before.get(name), after.get(name)
        if old is not None or new is not None:
            shown = "" if not old or new is None else f"{new / old - 1.0:+.1%}"
            typer.echo(f"{name:12} {_number(old):>20} {_number(new):>20}  {shown}")
    broken = [said for one in conditions if (said := one.broken(before, after))]
    for said in broken:
        complain(said)
    if broken:
        raise typer.Exit(FAILED)
    if conditions:
        typer.echo(f"passed: {', '.join(one.text for one in conditions)}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3f}"


def _figures(
    against: Path, journal: Path | None, policies: Sequence[str], load: float, servers: int, preset: str, head: int
) -> tuple[dict[str, float], dict[str, float], tuple[str, str]]:
    from fairlead.sim.gate import of_journal
    from fairlead.sim.journal import one_run

    base = one_run(against)
    if journal is not None:
        other = one_run(journal)
        return of_journal(base), of_journal(other), (base.id, other.id)
    if len(policies) != 1:
        raise ValueError("--against needs one --policy to simulate, or a --journal to measure")
    before = _simulated(base, "", load, servers, preset, head)
    return before, _simulated(base, policies[0], load, servers, preset, head), ("recorded policy", policies[0])


def _simulated(run: "Run", policy: str, load: float, servers: int, preset: str, head: int) -> dict[str, float]:
    """The journal's traffic on as many servers as it had."""
    from fairlead.config.flow import build_desk
    from fairlead.config.recorded import restore
    from fairlead.config.registry import build_policy
    from fairlead.sim.capture import capture
    from fairlead.sim.gate import of_jobs
    from fairlead.sim.scenarios import cut
    from fairlead.sim.simulation import Simulation
    from fairlead.sim.world import Scenario, replicas

    other = change(policy, None)
    config = restore(run.head.scheduling)
    config = other(config) if other is not None else config
    workload = capture(run, key=b"").workload
    workload = cut(workload, head) if head else workload
    made = build_policy(config)
    count = servers or _servers(run)
    fleet = replicas(count, preset, block_size=64) if preset else replicas(count, block_size=64)
    simulation = Simulation(
        Scenario(name=run.id, workload=workload, replicas=fleet, speedup=load), made, desk=build_desk(config, made)
    )
    simulation.run()
    return of_jobs(simulation.jobs)


def _servers(run: "Run") -> int:
    from fairlead.model.events import EndpointUp

    names = {endpoint.id for _, head in run.segments for endpoint in head.endpoints}
    names |= {body.endpoint.id for kind, _, body in run.items() if kind == EndpointUp.__name__}
    return max(len(names), 1)
