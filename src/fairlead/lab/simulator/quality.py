"""Every policy on every scenario: which entries take part in which scenarios, and the regret of each.

An entry is a configuration and its key in the tables. `entries()` returns all of them. To compare a further
configuration, add it to `EXTRA`.

The scheduler does not begin with the truth. Its prior and its bytes per token are wrong by drawn factors from 0.5 to
1.5, requests do not announce the length of their answer, and servers are scraped once per second. The results also have
the default policy with the truth known, and at half the pace. A regret is the value divided by the best value of any
policy that took part.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from fairlead.config.problems import suggestion
from fairlead.lab.simulator.build import ScenarioSpec, is_generated
from fairlead.lab.simulator.drawn import drawn_names, drawn_scenario
from fairlead.lab.simulator.grid import (
    COMPARED,
    Cell,
    CellResult,
    for_json,
    judged,
    mean_figures,
    ratios_in_words,
    regret_text,
    regrets,
    served,
    version,
)
from fairlead.lab.simulator.run import AT_ONCE, known_policies
from fairlead.lab.simulator.scenarios import (
    ADVERSARIAL,
    APART,
    HELD_OUT,
    PUBLISHED,
    QUALITY,
    SITUATIONS,
)

#: Further configurations that take part like a policy: key → text. They are settings that the authors of a policy
#: publish in addition to its defaults (see the files of the policies): Dynamo's scale of 2 and its preset for agents;
#: llm-d's filter with the throughput of these servers (8,192 tokens in a step of 423 ms) and its example's penalty, and
#: its variant for pools that are limited by answers.
EXTRA: dict[str, str] = {
    "dynamo, scale 2": "policy: {type: dynamo-linear, parameters: {prefillLoadScale: 2}}\n",
    "dynamo, agentic": "policy: {type: dynamo-linear, parameters: "
    "{overlapCredit: 2, prefillLoadScale: 4, activeRequestWeight: 64}}\n",
    "sticky, 5 s": "policy: {type: sticky-until-saturated, parameters: "
    "{maxTTFTPenaltyMs: 5000, explorationProbability: 0.01, peakPrefillThroughput: 19350}}\n",
    "sticky, requests": "policy: {type: sticky-until-saturated, parameters: {load: requests}}\n",
}
#: The best policies apart from the default: they also take part with flow control (`FLOW`), which the default has.
LATE_TOO = ("weights-322", "dynamo, agentic")
FLOW = "flowControl: {ttl: 590s, limits: {band: {requests: null, bytes: null}}}\n"
#: Policies that are left out because they are the default under another name.
SAME = ("cost-model", "prefill-decode")
#: Long scenarios are cut to this many requests. Later requests do not change the ranking of the policies and cost
#: minutes.
HEADS = {
    **dict.fromkeys(("conversation-1x", "conversation-1.5x", "conversation-2x", "unlike-hardware"), 4500),
    "apart-chat": 2000,
    "apart-conversation-1x": 3000,
    "apart-agents": 2000,
    "headline-steady-16": 4750,
    "headline-70b-20": 7000,
}
#: Added to the name of a scenario whose scheduler begins with the truth about engines, tokens and answers; and the
#: policies that are simulated this way in addition to the main results, in which the scheduler does not know the truth.
KNOWN, KNOWN_OF = ", truth known", ("default",)
#: Added to the name of a scenario at half its pace, and the policies that are simulated this way. Below saturation,
#: holding requests back must cost nothing.
CALM, CALM_OF = ", half the pace", ("default", AT_ONCE)
#: The number of requests in the quick version of a scenario.
QUICK = {"shared-prefix-10": 600, "shared-prefix-14": 900, "shared-prefix-20": 900, "agents": 1200}
QUICK_OTHERS = {
    **dict.fromkeys(QUALITY, 2500),
    **dict.fromkeys(ADVERSARIAL, 600),
    **dict.fromkeys(PUBLISHED, 1400),
    **dict.fromkeys((*SITUATIONS, *HELD_OUT), 800),
}
#: How many of the 8 servers only prefill.
PREFILL_SERVERS = (2, 3)
PAIRS = "policy: prefill-decode\n"
PAIRS_ALWAYS = "policy: {type: prefill-decode, parameters: {always: true}}\n"
#: The scenarios that may be used for tuning, and those that may not (docs/workloads.md); `all` has the first two.
SETS = {
    "development": (*QUALITY, *ADVERSARIAL, *PUBLISHED, *SITUATIONS, *APART),
    "held_out": (*HELD_OUT,),
    "drawn": (*drawn_names("drawn-0"),),
}


def entries() -> dict[str, str]:
    """All entries: key → text of a configuration; `default` is first."""
    known = known_policies()
    rules = {name: text for name, text in known.items() if name not in SAME} | EXTRA
    late = {f"{name}+flow": rules[name] + FLOW for name in LATE_TOO}
    return rules | late


def names(chosen: str = "all") -> list[str]:
    """The names of the scenarios of a set. `all` = all sets except the drawn one."""
    return [*SETS[chosen]] if chosen != "all" else [*SETS["development"], *SETS["held_out"]]


def named(wanted: Sequence[str]) -> list[str]:
    """These names, with `drawn-SEED` replaced by all scenarios that are drawn from that seed. Raises `ValueError` for
    an unknown name."""
    known = names("all")
    for name in wanted:
        if name not in known and not drawn_names(name):
            raise ValueError(f"{name!r} is not a scenario of quality; {suggestion(name, [*known, 'drawn-SEED'])}")
    return [scenario for name in wanted for scenario in (drawn_names(name) or [name])]


def cells(
    scenarios: Sequence[str], texts: Mapping[str, str], traces: str, quick: bool, seeds: int, head: int = 0
) -> list[Cell]:
    """The cells to run; cells of one scenario are adjacent. `head`: use only this many requests; 0 = by `quick`."""
    wanted = []
    for name in scenarios:
        requests = head or (requests_of_quick(name) if quick else HEADS.get(name, 0))
        spec = ScenarioSpec(name=name, source=name, traces=traces, head=requests, unknowing=True)
        taking_part = [(replace(spec, prefill=prefill), key, text) for prefill, key, text in _taking_part(name, texts)]
        if name not in APART:
            known = replace(spec, name=name + KNOWN, unknowing=False)
            calm = replace(spec, name=name + CALM, speedup=0.5)
            taking_part += [(known, key, texts[key]) for key in KNOWN_OF if key in texts]
            taking_part += [(calm, key, texts[key]) for key in CALM_OF if key in texts]
        drawn = is_generated(name, traces)
        wanted += [
            Cell(scenario=replace(spec, seed=seed if drawn else 0), policy=key, text=text, seed=seed)
            for seed in range(seeds)
            for spec, key, text in taking_part
        ]
    return wanted


def _taking_part(name: str, texts: Mapping[str, str]) -> list[tuple[int, str, str]]:
    """(number of prefill servers, key, text) of each entry that takes part in this scenario."""
    if name not in APART:
        return [(0, key, text) for key, text in texts.items()]
    pools = [(0, "default", texts.get("default", "policy: default\n"))]
    for size in PREFILL_SERVERS:
        pools.append((size, f"prefill-decode, {size} prefill", PAIRS))
        pools.append((size, f"always a pair, {size} prefill", PAIRS_ALWAYS))
    pools.append((PREFILL_SERVERS[0], f"never a pair, {PREFILL_SERVERS[0]} prefill", "policy: default\n"))
    return pools


def requests_of_quick(name: str) -> int:
    return QUICK.get(name) or QUICK_OTHERS.get(name, 1200)


KEPT = (
    "ttft_mean_ms", "ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "e2e_mean_ms", "e2e_p99_ms", "tpot_p50_ms",
    "tpot_p99_ms", "output_tokens_per_s", "goodput", "prefix_hit_rate", "in_band", "done", "shed", "failed",
    "cancelled", "requests",
)  # fmt: skip
#: Further figures if there are several seeds.
SPREAD = ("seeds", "ttft_mean_ms_sd", "e2e_mean_ms_sd")
Summary = dict[str, dict[str, dict[str, float]]]
Regrets = Mapping[str, Mapping[str, float]]


class Comparison(Struct, frozen=True, kw_only=True):
    """Summaries are {scenario: {policy: {figure: mean over seeds}}}, in the order of the results."""

    scenarios: Summary = {}
    #: The scenarios in which the scheduler begins with the truth.
    known: Summary = {}
    #: The scenarios at half the pace.
    calm: Summary = {}
    #: The regrets of the policies, by set of scenarios.
    regrets: Mapping[str, Regrets] = {}


def summary_of(results: Sequence[CellResult]) -> Summary:
    """The results with all figures of `KEPT` and those of `SPREAD`."""
    means = mean_figures(results)
    return {
        scenario: {
            policy: {name: row[name] for name in (*KEPT, *SPREAD) if name in row} for policy, row in policies.items()
        }
        for scenario, policies in means.items()
    }


def comparison(results: Sequence[CellResult]) -> Comparison:
    summary = summary_of(results)
    known, calm = (
        {name.removesuffix(end): rows for name, rows in summary.items() if name.endswith(end)} for end in (KNOWN, CALM)
    )
    own = {name: rows for name, rows in summary.items() if not name.endswith((KNOWN, CALM))}
    sets = {name: judged([r for r in results if r.scenario in among]) for name in SETS if (among := of_set(name, own))}
    return Comparison(
        scenarios=own, known=known, calm=calm, regrets={name: rows for name, rows in sets.items() if rows}
    )


def of_set(chosen: str, scenarios: Iterable[str]) -> list[str]:
    """Those of the scenarios that are in a set and count for its regrets. Pools of prefill and decode servers do not,
    because other policies take part in them."""
    known = {*SETS[chosen]}
    return [n for n in scenarios if (drawn_names(n) if chosen == "drawn" else n in known and n not in APART)]


def regrets_of(chosen: str, summary: Summary) -> Regrets:
    """The regrets over the simulated scenarios of a set."""
    return regrets({name: summary[name] for name in of_set(chosen, summary)})


def judgement(regret: Regrets) -> dict[str, dict[str, dict[str, float]]]:
    """{policy: {ttft_mean, ttft_p99, e2e_mean, goodput: {geomean, worst, sd}}}, the form of `summary.json`; `sd` only
    of several seeds."""
    parts = {"geomean": "", "worst": "_worst", "sd": "_sd"}
    return {
        policy: {
            figure.removesuffix("_ms"): {p: row[figure + end] for p, end in parts.items() if figure + end in row}
            for figure in COMPARED
        }
        for policy, row in regret.items()
    }


def write_summary(out: Path, results: Sequence[CellResult]) -> Comparison:
    """Write `out/summary.json`, {set: {"policies": …, "code", "cpu_minutes"}}, in which a set that was not simulated
    keeps its last results, and `out/scenarios.json`, {"scenarios", "known", "calm": {scenario: {policy: figures}}}."""
    compared = comparison(results)
    minutes = round(sum(result.cpu_s for result in results) / 60, 1)
    path = out / "summary.json"
    sets: dict[str, Any] = msgspec.json.decode(path.read_bytes()) if path.is_file() else {}
    for name, regret in compared.regrets.items():
        sets[name] = {"policies": judgement(regret), "code": version(), "cpu_minutes": minutes}
    _write(path, {name: sets[name] for name in SETS if name in sets})
    parts = {"scenarios": compared.scenarios, "known": compared.known, "calm": compared.calm}
    _write(
        out / "scenarios.json",
        {
            part: {name: {policy: for_json(row) for policy, row in rows.items()} for name, rows in summary.items()}
            for part, summary in parts.items()
        },
    )
    return compared


def _write(path: Path, document: object) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def print_table(compared: Comparison) -> None:
    summary, judged = compared.scenarios, compared.regrets
    first: Regrets = next(iter(judged.values()), {})
    order = sorted(first, key=lambda policy: first[policy]["ttft_mean_ms"] * first[policy]["e2e_mean_ms"])
    order += [p for p in dict.fromkeys(p for row in summary.values() for p in row) if p not in first]
    console = Console(width=max(120, 30 + sum(max(len(policy), 13) + 3 for policy in order)))
    for title, figure in (("mean TTFT, ms", "ttft_mean_ms"), ("mean E2E, ms", "e2e_mean_ms")):
        console.print(_table(title, figure, summary, order))
    terminal = Console()
    for name, regret in judged.items():
        table = _regret_table(f"regret over the {name} set: {ratios_in_words(regret)}", regret, order)
        (terminal if terminal.is_terminal else console).print(table)
    for name in summary:
        if drawn := drawn_scenario(name):
            console.print(f"{name}: {drawn.words}", highlight=False, soft_wrap=True)


def _regret_table(title: str, regret: Regrets, order: Sequence[str]) -> Table:
    table = Table(title=title)
    table.add_column("policy", overflow="fold")
    for name in ("mean TTFT", "p99 TTFT", "mean E2E", "goodput", "shed", "failed"):
        table.add_column(name, justify="right", no_wrap=name in ("shed", "failed"))
    for policy in order:
        row = regret.get(policy)
        if row is not None:
            table.add_row(
                policy, *(regret_text(row, figure) for figure in COMPARED), f"{row['shed']:g}", f"{row['failed']:g}"
            )
    return table


def _table(title: str, figure: str, summary: Summary, order: Sequence[str]) -> Table:
    most = max((row.get("seeds", 1) for policies in summary.values() for row in policies.values()), default=1)
    seeds = f", means of {most} seeds ± standard deviation" if most > 1 else ""
    table = Table(title=f"{title}{seeds} (* = some were shed or failed)")
    table.add_column("scenario")
    for policy in order:
        table.add_column(policy, justify="right")
    for scenario, policies in summary.items():
        best = min((row[figure] for row in policies.values() if served(row)), default=0.0)
        cells = []
        for policy in order:
            row = policies.get(policy)
            if row is None or not served(row):
                cells.append("-" if row is None else "–*")
                continue
            spread = f" ±{row[f'{figure}_sd']:,.0f}" if f"{figure}_sd" in row else ""
            text = f"{row[figure]:,.0f}{spread}" + ("*" if row["shed"] or row["failed"] else "")
            cells.append(f"[bold]{text}[/bold]" if row[figure] == best else text)
        table.add_row(scenario, *cells)
    return table
