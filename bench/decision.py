"""What one decision costs: the default policy over 8, 100 and 1,000 endpoints, and a profile beside plain dicts.

    python bench/decision.py            a table
    python bench/decision.py --json     one JSON object, microseconds

Measured is `Policy.choose` for one request of 7,200 tokens whose beginning a few endpoints hold: filters, prefix
match, costs or scores, pick and trace. Hashing the prompt is parsing and not in it; charging the lease and inserting
the prefix are reported apart. Before each decision of the default policy `CHANGED` endpoints have changed: at 1,000
requests per second one other request begins, one gets its first token, one ends, and one endpoint is scraped.
`endpoints_N_us` is what `fairlead serve` does by default; `profile` is a chain of six filters and six scorers. The dict
implementation keeps one dict per endpoint and one dict of scores per scorer, does the same as that profile, and must
come to the same totals: the run fails otherwise. Every figure is the median over batches
in which the subjects take turns, so a noisy neighbour hits all of them alike; `_min` keys hold the best batch.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from math import inf
from random import Random
from statistics import median
from typing import Any

from _output import tell
from fairlead.compat.load import load
from fairlead.config.plugins import build_policy
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.fleet import Fleet
from fairlead.core.ledger import Lease
from fairlead.core.policy import Context
from fairlead.core.prefix import ChainHasher
from fairlead.core.profile import Profile
from fairlead.core.request import PrefixChain, Request
from fairlead.plugins.filters.ability import ModelCompatibility, Role, RoleParams, Subset
from fairlead.plugins.filters.availability import Health, HealthParams
from fairlead.plugins.filters.load import MemoryPressure, MemoryPressureParams, QueueDepth, QueueDepthParams
from fairlead.plugins.params import NoParams
from fairlead.plugins.pickers import MaxScore, MaxScoreParams
from fairlead.plugins.scorers.load import (
    InflightTokens,
    InflightTokensParams,
    KvUtilization,
    LoadAware,
    LoadAwareParams,
)
from fairlead.plugins.scorers.lora import LoraAware
from fairlead.plugins.scorers.prefix import PrefixAware, PrefixAwareParams
from fairlead.plugins.scorers.session_affinity import SessionAffinity

SIZES = (8, 100, 1000)
#: For the default policy over the most endpoints.
TARGET_US = 100.0
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
TOKENS = 7_200
CHANGED = 4
BYTES = 30_240
NOW = 1_000.0


def full_profile() -> Profile:
    none = NoParams()
    return Profile(
        "full",
        filters=[
            Role(RoleParams()),
            Subset(none),
            ModelCompatibility(none),
            Health(HealthParams()),
            QueueDepth(QueueDepthParams(max_queue_length=200)),
            MemoryPressure(MemoryPressureParams()),
        ],
        scorers=[
            (PrefixAware(PrefixAwareParams()), 100.0),
            (LoadAware(LoadAwareParams(queue_weight_factor=0.7, active_requests_weight=0.3)), 50.0),
            (KvUtilization(none), 50.0),
            (InflightTokens(InflightTokensParams()), 100.0),
            (LoraAware(none), 100.0),
            (SessionAffinity(none), 20.0),
        ],
        picker=MaxScore(MaxScoreParams()),
    )


def prompts(rng: Random) -> Iterator[PrefixChain]:
    """Chains of prompts that share a system prompt of a third of their length."""
    hasher = ChainHasher()
    shared = rng.randbytes(BYTES // 3)
    while True:
        yield hasher.chain(b"bench", shared + rng.randbytes(BYTES - len(shared)))


def request_for(number: int, chain: PrefixChain) -> Request:
    return Request(
        id=number,
        arrived=NOW,
        api="chat",
        model=MODEL,
        prompt_bytes=BYTES,
        prompt_tokens=TOKENS,
        prefix=chain,
        session=f"session-{number % 64}",
    )


def warm_fleet(size: int, rng: Random) -> tuple[Fleet, list[Request]]:
    """A fleet under load, and requests whose beginning one to four endpoints hold."""
    fleet = Fleet()
    chains = prompts(rng)
    for number in range(size):
        fleet.up(Endpoint(f"default/vllm-{number}", f"10.0.{number // 250}.{number % 250 + 1}:8000"))
    for number in range(size):
        sample = Sample(
            waiting=float(rng.randrange(8)),
            running=float(rng.randrange(4, 60)),
            kv_usage=0.2 + 0.6 * rng.random(),
            adapters=frozenset(),
            block_size=16,
            num_blocks=27_000,
        )
        fleet.sampled(f"default/vllm-{number}", NOW - 0.1, NOW - 0.095, sample)
    requests = [request_for(number, next(chains)) for number in range(64)]
    for request in requests:
        chain = request.prefix
        for depth in (len(chain.hashes), 50, 40, 30)[: rng.randrange(1, 5)]:
            slot = rng.randrange(size)
            fleet.prefix.insert(slot, PrefixChain(chain.hashes[:depth], chain.ends[:depth]))
    for number in range(min(size, 200)):
        fleet.charge(request_for(10_000 + number, next(chains)), rng.randrange(size), NOW - 0.05, 0, 150.0)
    return fleet, requests


class DictRouter:
    """The same rules the usual way: a dict per endpoint, a dict of scores per scorer."""

    def __init__(self, fleet: Fleet) -> None:
        table = fleet.table
        self.endpoints: list[dict[str, Any]] = [
            {
                "slot": slot,
                "id": endpoint.id,
                "address": endpoint.address,
                "labels": dict(endpoint.labels),
                "queue": float(table.queue[slot]),
                "active": float(table.active[slot]),
                "kv": float(table.kv[slot]),
                "pending_tokens": float(table.pending_tokens[slot]),
                "failures": float(table.failures[slot]),
                "ejected_until": float(table.ejected_until[slot]),
                "sampled_at": float(table.sampled_at[slot]),
                "adapters": table.adapters[slot] or frozenset(),
                "max_adapters": float(table.max_adapters[slot]),
                "blocks": set(),
            }
            for slot, endpoint in table.slots()
        ]
        self.homes: dict[str, int] = {}

    def learn(self, slot: int, chain: PrefixChain) -> None:
        self.endpoints[slot]["blocks"].update(chain.hashes)

    def choose(self, request: Request, now: float, rng: Random) -> tuple[int, dict[int, float]]:
        left = self._load(self._able(request), now)
        scores = [(weight, rate(request, left)) for rate, weight in self._scorers()]
        totals: dict[int, float] = {}
        for e in left:
            slot = e["slot"]
            total = sum(weight * column[slot] for weight, column in scores)
            if e["kv"] > 0.85:
                total *= 1 - 0.5 * min((e["kv"] - 0.85) / 0.1, 1.0)
            totals[slot] = total
        best = max(totals.values())
        ties = [slot for slot, total in totals.items() if total >= best - abs(best) * 0.005]
        return (ties[0] if len(ties) == 1 else ties[int(rng.random() * len(ties))]), totals

    def _able(self, request: Request) -> list[dict[str, Any]]:
        roles = ("", "decode", "prefill-decode", "both", "encode-prefill-decode")
        left = [e for e in self.endpoints if e["labels"].get("llm-d.ai/role", "") in roles]
        if request.subset is not None:
            left = [e for e in left if e["address"] in request.subset]
        return [
            e
            for e in left
            if e["labels"].get("model-id", request.model) == request.model or request.model in e["adapters"]
        ]

    def _load(self, able: list[dict[str, Any]], now: float) -> list[dict[str, Any]]:
        well = [e for e in able if e["failures"] < 3 and e["ejected_until"] <= now] or able
        left = [e for e in well if e["queue"] < 200]
        return [e for e in left if e["kv"] < 0.95 or e["sampled_at"] < now - 5] or well

    def _scorers(self) -> list[tuple[Callable[[Request, list[dict[str, Any]]], dict[int, float]], float]]:
        return [
            (self._prefix, 100.0),
            (self._by_load, 50.0),
            (self._kv, 50.0),
            (self._tokens, 100.0),
            (self._lora, 100.0),
            (self._session, 20.0),
        ]

    def _prefix(self, request: Request, left: list[dict[str, Any]]) -> dict[int, float]:
        self._shares: dict[int, float] = {}
        for e in left:
            matched, blocks = 0, e["blocks"]
            for block, end in zip(request.prefix.hashes, request.prefix.ends, strict=True):
                if block not in blocks:
                    break
                matched = end
            self._shares[e["slot"]] = matched / request.prompt_bytes
        return self._shares

    def _by_load(self, request: Request, left: list[dict[str, Any]]) -> dict[int, float]:
        return {e["slot"]: max(1 - (0.7 * e["queue"] + 0.3 * e["active"]) / 50, 0.0) for e in left}

    def _kv(self, request: Request, left: list[dict[str, Any]]) -> dict[int, float]:
        return {e["slot"]: 1 - e["kv"] for e in left}

    def _tokens(self, request: Request, left: list[dict[str, Any]]) -> dict[int, float]:
        shares, tokens = self._shares, request.prompt_tokens
        return {
            e["slot"]: max(1 - (e["pending_tokens"] + tokens * (1 - shares[e["slot"]])) / 65_536, 0.0) for e in left
        }

    def _lora(self, request: Request, left: list[dict[str, Any]]) -> dict[int, float]:
        if not any(e["max_adapters"] for e in left):
            return {e["slot"]: 0.0 for e in left}
        return {
            e["slot"]: 1.0 if request.model in e["adapters"] else 0.5 if len(e["adapters"]) < e["max_adapters"] else 0.0
            for e in left
        }

    def _session(self, request: Request, left: list[dict[str, Any]]) -> dict[int, float]:
        home = self.homes.get(request.session, -1)
        return {e["slot"]: 1.0 if e["slot"] == home else 0.0 for e in left}


def twin(fleet: Fleet, requests: list[Request]) -> DictRouter:
    """A `DictRouter` that knows what the fleet knows."""
    router = DictRouter(fleet)
    affinity = SessionAffinity(NoParams())
    profile = Profile("homes", [], [(affinity, 1.0)], MaxScore(MaxScoreParams()))
    for request in requests:
        column = fleet.prefix.match(request.prefix, len(fleet.table))
        for slot, matched in enumerate(column if column is not None else ()):
            if matched:
                depth = request.prefix.ends.index(int(matched)) + 1
                router.learn(slot, PrefixChain(request.prefix.hashes[:depth], request.prefix.ends[:depth]))
        router.homes[request.session] = profile.choose(request, fleet, Context(NOW, Random(0))).slot
    return router


def check(profile: Profile, fleet: Fleet, router: DictRouter, requests: list[Request]) -> None:
    """Both must come to the same totals for every request."""
    for request in requests:
        trace = profile.choose(request, fleet, Context(NOW, Random(0))).trace
        assert trace is not None
        _, totals = router.choose(request, NOW, Random(0))
        ours = {slot: float(total) for slot, total in enumerate(trace.total) if total > -inf}
        if ours.keys() != totals.keys() or any(abs(ours[slot] - totals[slot]) > 1e-6 for slot in ours):
            raise SystemExit("the two implementations disagree")


def timed(work: Callable[[Request], object], requests: list[Request]) -> float:
    """Microseconds per request of one batch."""
    start = time.perf_counter()
    for request in requests:
        work(request)
    return (time.perf_counter() - start) / len(requests) * 1e6


def measure(size: int, repeats: int) -> dict[str, list[float]]:
    """Batch means in microseconds per subject."""
    rng = Random(size)
    fleet, requests = warm_fleet(size, rng)
    policy = build_policy(load("endpoints: []", need_endpoints=False))
    profile = full_profile()
    router = twin(fleet, requests)
    check(profile, fleet, router, requests)
    traced, bare = Context(NOW, rng), Context(NOW, rng, trace=False)
    chains, stale = prompts(rng), fleet.table.stale
    changes = cycle([[rng.randrange(size) for _ in range(CHANGED)] for _ in range(97)])
    subjects: dict[str, Callable[[Request], object]] = {
        "": lambda request: (stale.update(next(changes)), policy.choose(request, fleet, traced)),
        "untraced": lambda request: (stale.update(next(changes)), policy.choose(request, fleet, bare)),
        "profile": lambda request: profile.choose(request, fleet, traced),
        "dict": lambda request: router.choose(request, NOW, rng),
    }
    results: dict[str, list[float]] = {name: [] for name in (*subjects, "charge_insert", "release")}
    other, _ = warm_fleet(size, rng)  # inserting would push the warm prefixes out of the first one

    charged: dict[int, Lease] = {}

    def charge(request: Request) -> None:
        charged[request.id] = other.charge(request, request.id % size, NOW, 0, 150.0)

    for turn in range(repeats):
        for name, work in subjects.items():
            results[name].append(timed(work, requests[:8] if name == "dict" else requests))
        fresh = [request_for(100_000 + turn * 32 + i, next(chains)) for i in range(32)]
        results["charge_insert"].append(timed(charge, fresh))
        results["release"].append(timed(lambda request: other.ledger.release(charged.pop(request.id)), fresh))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--repeats", type=int, default=40, help="batches per subject and size")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    for size in SIZES:
        for name, batches in measure(size, options.repeats).items():
            key = f"endpoints_{size}_{name}_us" if name else f"endpoints_{size}_us"
            figures[key] = round(median(batches), 2)
            figures[key.replace("_us", "_min_us")] = round(min(batches), 2)
    tell(figures, options.json, show)


def show(figures: dict[str, float]) -> None:
    print("microseconds per decision, median (best batch)")
    labels = {
        "": "default policy, with trace",
        "untraced": "default policy, without trace",
        "profile": "6 filters and 6 scorers",
        "dict": "dict per endpoint, same rules",
        "charge_insert": "charge + insert of 74 new blocks",
        "release": "release",
    }
    print(f"{'':34}" + "".join(f"{size:>18,} ep" for size in SIZES))
    for name, label in labels.items():
        keys = [f"endpoints_{size}_{name}_us" if name else f"endpoints_{size}_us" for size in SIZES]
        cells = (f"{figures[key]:>12.1f} ({figures[key.replace('_us', '_min_us')]:.1f})" for key in keys)
        print(f"{label:34}" + "".join(f"{cell:>21}" for cell in cells))
    reached = "reached" if figures["endpoints_1000_us"] <= TARGET_US else "missed"
    print(f"default policy, with trace, 1,000 endpoints: target <= {TARGET_US:g} us, {reached}")


if __name__ == "__main__":
    main()
