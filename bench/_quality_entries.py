"""What `quality.py` simulates: which entries meet in which scenarios. An entry has a key of the tables and a
configuration.

`entries()` are the policies by name. Whoever compares one more configuration adds it to `EXTRA`.
"""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from fairlead.lab.simulator.build import ScenarioSpec
from fairlead.lab.simulator.grid import Cell
from fairlead.lab.simulator.run import AT_ONCE, known_policies
from fairlead.lab.simulator.scenarios import ADVERSARIAL, APART, HELD_OUT, PUBLISHED, QUALITY, SITUATIONS

#: Further configurations that take part like a policy: key → text. Settings of rules that their makers publish besides
#: their defaults (see the rules' files): Dynamo's scale of 2 and its preset for agents; llm-d's filter with the
#: throughput of these servers (8,192 tokens in a step of 423 ms) and the penalty of its example, and for pools that
#: answers bind.
EXTRA: dict[str, str] = {
    "dynamo, scale 2": "policy: {type: dynamo-linear, parameters: {prefillLoadScale: 2}}\n",
    "dynamo, agentic": "policy: {type: dynamo-linear, parameters: "
    "{overlapCredit: 2, prefillLoadScale: 4, activeRequestWeight: 64}}\n",
    "sticky, 5 s": "policy: {type: sticky-until-saturated, parameters: "
    "{maxTTFTPenaltyMs: 5000, explorationProbability: 0.01, peakPrefillThroughput: 19350}}\n",
    "sticky, requests": "policy: {type: sticky-until-saturated, parameters: {load: requests}}\n",
}
#: The best of the others, with a queue in front of the servers as the default has.
LATE_TOO = ("weights-322", "dynamo, agentic")
FLOW = "flowControl: {ttl: 590s, limits: {band: {requests: null, bytes: null}}}\n"
#: What the default is, under other names.
SAME = ("cost-model", "prefill-decode")
#: Long scenarios are cut to their first so many requests: what comes after ranks the rules alike, and costs minutes.
HEADS = {
    **dict.fromkeys(("conversation-1x", "conversation-1.5x", "conversation-2x", "unlike-hardware"), 4500),
    "apart-chat": 2000,
    "apart-conversation-1x": 3000,
    "apart-agents": 2000,
    "headline-steady-16": 4750,
    "headline-70b-20": 7000,
}
#: Added to the name of a scenario whose scheduler begins with the truth: the column beside the main one, in which
#: nothing is known of engines, tokens and answers. Of these policies only.
KNOWN, KNOWN_OF = ", truth known", ("default", AT_ONCE)
#: Requests that the smaller version of a scenario keeps; 0 = all.
QUICK = {"shared-prefix-10": 600, "shared-prefix-14": 900, "shared-prefix-20": 900, "agents": 1200}
QUICK_OTHERS = {
    **dict.fromkeys(QUALITY, 2500),
    **dict.fromkeys(ADVERSARIAL, 600),
    **dict.fromkeys(PUBLISHED, 1400),
    **dict.fromkeys((*SITUATIONS, *HELD_OUT), 800),
}
#: Sizes of the pools' prefill part, of 8 servers.
PREFILL_SERVERS = (2, 3)
PAIRS = "policy: prefill-decode\n"
PAIRS_ALWAYS = "policy: {type: prefill-decode, parameters: {always: true}}\n"
#: The scenarios that may be looked at while something is tuned, and those that may not (docs/workloads.md).
SETS = {
    "development": (*QUALITY, *ADVERSARIAL, *PUBLISHED, *SITUATIONS, *APART),
    "held_out": (*HELD_OUT,),
}


def entries() -> dict[str, str]:
    """Key → text of a configuration; `default` comes first."""
    known = known_policies()
    rules = {name: text for name, text in known.items() if name not in SAME} | EXTRA
    late = {f"{name}+flow": rules[name] + FLOW for name in LATE_TOO}
    return rules | late


def names(chosen: str = "all") -> list[str]:
    """Of the scenarios of a set, or of all."""
    return [name for key, scenarios in SETS.items() if chosen in (key, "all") for name in scenarios]


def cells(
    scenarios: Sequence[str], texts: Mapping[str, str], traces: str, quick: bool, seeds: int, head: int = 0
) -> list[Cell]:
    """Cells of a scenario follow each other."""
    found = []
    for name in scenarios:
        requests = head or (_quick(name) if quick else HEADS.get(name, 0))
        spec = ScenarioSpec(name=name, source=name, traces=traces, head=requests, unknowing=True)
        taking_part = [(replace(spec, prefill=prefill), key, text) for prefill, key, text in _taking_part(name, texts)]
        if name not in APART:
            known = replace(spec, name=name + KNOWN, unknowing=False)
            taking_part += [(known, key, texts[key]) for key in KNOWN_OF if key in texts]
        found += [
            Cell(scenario=spec, policy=key, text=text, seed=seed)
            for spec, key, text in taking_part
            for seed in range(seeds)
        ]
    return found


def _taking_part(name: str, texts: Mapping[str, str]) -> list[tuple[int, str, str]]:
    """(prefill servers, key, text)."""
    if name not in APART:
        return [(0, key, text) for key, text in texts.items()]
    found = [(0, "default", texts.get("default", "policy: default\n"))]
    for size in PREFILL_SERVERS:
        found.append((size, f"prefill-decode, {size} prefill", PAIRS))
        found.append((size, f"always a pair, {size} prefill", PAIRS_ALWAYS))
    found.append((PREFILL_SERVERS[0], f"never a pair, {PREFILL_SERVERS[0]} prefill", "policy: default\n"))
    return found


def _quick(name: str) -> int:
    return QUICK.get(name) or QUICK_OTHERS.get(name, 1200)
