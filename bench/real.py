"""Real vLLM servers behind Fairlead: policies in turns on the same pool, the same traffic for each.

    python bench/real.py --install                        # once: vLLM and a small model, 3 GB, some minutes
    python bench/real.py --rate 5 --seed 1                # two servers; default, round robin, least requests in turns
    python bench/real.py --policy default+events --fault kill --requests 300
    python bench/real.py --pinned --policy default,default+interference=1     # each server on a core of its own
    python bench/real.py --everything --simulate          # rates, seeds, faults, adapters: about an hour
    python bench/real.py --report                         # the table of all runs that are kept
    python bench/real.py --install --engine transformers --program /usr/bin/python3 --size 8b --servers 4 --rate 4,8

The last has four servers on one GPU, whose engine is the continuous batching of transformers, before vLLM is there.
FAIRLEAD_REAL_HOME (or --home) names the folder with `venv` and `model`; default: ~/.cache/fairlead/real.
Runs are kept as JSON lines in OUT/runs.jsonl, their journals under OUT/journals; what has been run with the same
sources is not run again (--fresh does). A run whose load generator was more than 20 ms late (p99) is marked as
invalid. Policies: any name, with `+events` for KV events, `+warm` for a scheduler that had traffic before, `+at-once`
for one without flow control, `+interference=1` for a parameter of its own, and at the end `@REVISION` for the sources
of another revision: `default,default@v0.1` compares two in turns on the same servers.

JSON: {"rows": [one object per run], "summary": {"runs", "invalid", "ratios": {"A / B": {"ttft_ms": [mean, low, high],
"e2e_ms": …}}}, "simulated": [with --simulate: {"key", "problem", "ttft_ms": [real, simulated], "e2e_ms": …}]}.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

from msgspec import structs

from _gateway import checked_out
from _output import tell
from _real_install import install
from _real_pool import CACHE_TOKENS, ENGINES, Home, Pool
from _real_run import Case, in_front, measure
from _real_simulated import simulated, tuned
from _real_table import lines, simulation_lines, summary

HERE = Path(__file__).parents[1]
FAULTS = ("none", "kill", "hang", "freeze")


def cases(options: argparse.Namespace) -> list[Case]:
    """Policies in turns, beginning with another one each time."""
    if options.everything:
        return everything(options.requests)
    given = product(options.fault, options.rate, options.seed)
    made = in_turns(options.policy, given, options.requests, options.adapters)
    given_to_all = {"engine": options.engine, "size": options.size, "pinned": options.pinned}
    return [structs.replace(case, **given_to_all) for case in made]


def everything(requests: int) -> list[Case]:
    """All that the page of benchmarks shows: about an hour. One server alone, and adapters, bear less."""
    plain, seeds = ["default", "default+events", "round-robin", "least-requests"], (1, 2, 3)
    return [
        *in_turns(plain, product(["none"], (2.5, 5.0, 8.0), seeds), requests),
        *in_turns(["default+warm", "round-robin+warm"], product(["none"], [5.0], seeds), requests),
        *in_turns(["default", "default+events"], product(FAULTS[1:], [2.5], [1]), 100),
        *in_turns(plain, product(["none"], [1.5], seeds), 60, adapters=True),
    ]


def in_turns(
    policies: list[str], given: Iterable[tuple[str, float, int]], requests: int, adapters: bool = False
) -> list[Case]:
    """`given`: faults, rates, seeds."""
    made: list[Case] = []
    for number, (fault, rate, seed) in enumerate(given):
        turn = number % len(policies)
        order = policies[turn:] + policies[:turn]
        made += (Case(policy, rate, seed, requests, fault, adapters) for policy in order)
    return made


def fingerprint() -> str:
    """Of the sources of Fairlead: runs of other ones are not compared."""
    digest = hashlib.sha256()
    for path in sorted((HERE / "src" / "fairlead").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:10]


def kept(out: Path, sources: str) -> list[dict[str, Any]]:
    """The runs of these sources; of equal ones the last. A line that was cut off is left out."""
    found: dict[str, dict[str, Any]] = {}
    path = out / "runs.jsonl"
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row["sources"] == sources:
            found[row["key"]] = row
    return list(found.values())


def run_all(wanted: Sequence[Case], home: Home, options: argparse.Namespace, sources: str) -> None:
    """Runs what is missing; each row is written as soon as it is there."""
    for adapters in (False, True):
        some = [case for case in wanted if case.adapters == adapters]
        if some:
            _run_with(some, adapters, home, options, sources)


def _run_with(wanted: Sequence[Case], adapters: bool, home: Home, options: argparse.Namespace, sources: str) -> None:
    folder = options.out / "journals" / sources
    with ExitStack() as stack:
        revisions = sorted({case.policy.partition("@")[2] for case in wanted} - {""})
        places = {revision: str(stack.enter_context(checked_out(revision)) / "src") for revision in revisions}
        # A copy: who goes on working on the sources does not change what is measured.
        places[""] = stack.enter_context(tempfile.TemporaryDirectory(prefix="fairlead-real-"))
        shutil.copytree(HERE / "src", places[""], dirs_exist_ok=True)
        _say(f"starting {options.servers} servers (their output: {options.out}/server-e*.log)")
        pool = stack.enter_context(Pool(home, options.out, options.servers, options.nice, adapters, options.pinned))
        if options.simulate and not adapters:
            tuned(pool.servers, options.out / "preset.yaml", _say)
        for number, case in enumerate(wanted, 1):
            _say(f"{number}/{len(wanted)} {case.key}")
            source = places[case.policy.partition("@")[2]]
            row = measure(case, pool, home, folder / case.key, source) | {"sources": sources}
            with (options.out / "runs.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            _say(_brief(row))


def _brief(row: dict[str, Any]) -> str:
    def mean(name: str) -> str:
        return f"{row[name]['mean']:,.0f}" if row[name] else "-"

    forecast = row["forecast"]
    inside = f"{forecast['inside']:.0%} in band" if forecast else "no forecasts"
    late = "" if row["valid"] else ", INVALID: the load generator was late"
    return (
        f"    TTFT {mean('ttft_ms')} ms, E2E {mean('e2e_ms')} ms, {row['shares']}, {inside}, {row['failed']} failed,"
        f" others took {row['others_share']:.0%} of the CPU{late}"
    )


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _list(kind: type) -> Any:
    def parse(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",") if part]

    return parse


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    add("--home", type=Path, default=Path(os.environ.get("FAIRLEAD_REAL_HOME") or cache / "fairlead" / "real"))
    add("--engine", choices=ENGINES, default=ENGINES[0])
    add("--program", default="", help="a vllm, or for transformers a python that has it, instead of the home's own")
    add("--size", choices=CACHE_TOKENS, default="28m", help="parameters of the model; 8b wants a GPU")
    add("--out", type=Path, default=HERE / "out" / "real")
    add("--everything", action="store_true", help="instead of the slice that the next options select: about an hour")
    add("--policy", type=_list(str), default=["default", "round-robin", "least-requests"])
    add("--rate", type=_list(float), default=[2.5, 5.0, 8.0])
    add("--seed", type=_list(int), default=[1, 2, 3])
    add("--requests", type=int, default=90)
    add("--fault", type=_list(str), default=["none"], help=f"to server 0, after a quarter: {', '.join(FAULTS)}")
    add("--adapters", action="store_true", help="servers with two LoRA adapters, which requests ask for")
    add("--servers", type=int, default=2)
    add("--nice", type=int, default=5, help="of the servers")
    add("--pinned", action="store_true", help="each server on a core of its own, as on a GPU of its own")
    add("--install", action="store_true", help="first install what is missing in the home")
    add("--tokeniser", default="", help="with --install: a folder with tokenizer.json, instead of one trained here")
    add("--simulate", action="store_true", help="the same traffic in the simulator, with a preset tuned from a server")
    add("--fresh", action="store_true", help="run again what is kept")
    add("--report", action="store_true", help="only the table of what is kept")
    add("--json", action="store_true")
    options = parser.parse_args()
    unknown = set(options.fault) - set(FAULTS)
    if options.engine != "vllm" and (
        options.everything or options.adapters or "hang" in options.fault or "+events" in "".join(options.policy)
    ):
        parser.error("only vLLM has adapters, KV events, and an engine that can hang alone")
    if unknown or options.requests < 1 or options.servers < 1 or not min(options.rate, default=0) > 0:
        parser.error(f"--fault takes {', '.join(FAULTS)}; requests, servers and rates must be above 0")
    return options


def main() -> None:
    options = _arguments()
    home, sources = Home(options.home, options.engine, options.size, options.program), fingerprint()
    options.out.mkdir(parents=True, exist_ok=True)
    there = {} if options.fresh else {row["key"] for row in kept(options.out, sources) if row["valid"]}
    interrupted = False
    wanted = [case for case in cases(options) if case.key not in there]
    if wanted and not options.report:
        with in_front():
            try:
                if options.install:
                    install(home, options.tokeniser, _say)
                if missing := home.missing():
                    raise SystemExit(missing)
                run_all(wanted, home, options, sources)
            except KeyboardInterrupt:
                interrupted = True
                _say("interrupted; what has been measured is kept")
    rows = kept(options.out, sources)
    if not options.report:
        keys = {case.key for case in cases(options)}
        rows = [row for row in rows if row["key"] in keys]
    found = {"rows": rows, "summary": summary(rows)}
    preset = options.out / "preset.yaml"
    if options.simulate and preset.is_file():
        found["simulated"] = simulated(rows, options.out / "journals" / sources, preset, options.servers)
    tell(found, options.json, show)
    sys.exit(130 if interrupted else 0)


def show(found: dict[str, Any]) -> None:
    print("\n".join([*lines(found["rows"]), *simulation_lines(found.get("simulated", []))]))


if __name__ == "__main__":
    main()
