"""Workloads that break routers: small and seeded, each made for one known weakness.

`paced_prefix`    one request after another with the same beginning and no load in between: policies that only look at
                  load spread them over all servers, and each server computes the beginning again.
`cold_bursts`     many requests with one new beginning within 100 ms: a router that learns a prefix only after it
                  was computed sends each of them to another server.
`viral_prompt`    most requests have the same beginning: affinity without a price for load overloads one server.
`long_and_short`  a few prompts are a hundred times as long as the others: counting requests is not enough.
`cancel_storm`    half of the clients give up at the same moment: their leases must end with them.
`overload`        more requests than can be served, half of them sheddable.
`hot_prefix`      two of five requests have the same beginning, the others one of sixty.
`same_prompts`    a client sends the same prompt many times at the same moment, repeatedly.
`rare_giants`     one prompt of fifty has 100,000 tokens.
`one_hog`         ten tenants send a little, and one sends far more than its share for a while.
`adapters`        a few adapters with many requests, and many with few.
"""

from random import Random
from typing import Any

from msgspec import structs

from fairlead.lab.workload.arrivals import poisson, ramp, times
from fairlead.lab.workload.conversation import SharedPrefix, shared_prefix
from fairlead.lab.workload.record import Dispatch, Record, Workload, arranged

BLOCK = 64


class _Draft:
    """A workload in the making, and block ids for it: shared beginnings by name, and new ids."""

    def __init__(self, name: str, seed: int) -> None:
        self.rng = Random(f"{name}/{seed}")
        self.records: list[Record] = []
        self._name = name
        self._next = 0
        self._shared: dict[str, tuple[int, ...]] = {}

    def fresh(self, tokens: int) -> tuple[int, ...]:
        first, self._next = self._next, self._next + -(-tokens // BLOCK)
        return tuple(range(first, self._next))

    def shared(self, name: str, tokens: int) -> tuple[int, ...]:
        if name not in self._shared:
            self._shared[name] = self.fresh(tokens)
        return self._shared[name]

    def arrivals(self, rate: float, seconds: float) -> list[float]:
        return times(poisson(rate), self.rng, seconds=seconds)

    def add(self, arrival_s: float, ids: tuple[int, ...], output: int, **fields: Any) -> None:
        self.records.append(
            Record(
                id=str(len(self.records)),
                arrival_us=int(arrival_s * 1e6),
                in_tokens=len(ids) * BLOCK,
                out_tokens=output,
                max_tokens=output,
                block_size=BLOCK,
                hash_ids=ids,
                **fields,
            )
        )

    def workload(self, dispatch: Dispatch = "timestamp") -> Workload:
        return arranged(self._name, self.records, dispatch)


def paced_prefix(seed: int = 0) -> Workload:
    """120 requests that each start a second after the end of the previous one, all with the same first 6,400 tokens."""
    draft = _Draft("paced-prefix", seed)
    for index in range(120):
        after = {"parent": str(index - 1), "think_ms": 1e3} if index else {}
        draft.add(index * 2.0, draft.shared("system", 6400) + draft.fresh(640), 40, **after)
    return draft.workload("think")


def cold_bursts(seed: int = 0) -> Workload:
    """Every 5 seconds, 16 requests within 100 ms that share 8,000 tokens not used before."""
    draft = _Draft("cold-bursts", seed)
    for burst in range(24):
        for _ in range(16):
            arrival_s = burst * 5.0 + draft.rng.random() * 0.1
            draft.add(arrival_s, draft.shared(str(burst), 8000) + draft.fresh(256), 150)
    return draft.workload()


def viral_prompt(seed: int = 0) -> Workload:
    """80 % of all requests have the same first 6,400 tokens; the others share nothing."""
    draft = _Draft("viral-prompt", seed)
    for arrival_s in draft.arrivals(30.0, 90.0):
        viral = draft.rng.random() < 0.8
        draft.add(arrival_s, draft.shared("viral", 6400) + draft.fresh(640) if viral else draft.fresh(3200), 250)
    return draft.workload()


def long_and_short(seed: int = 0) -> Workload:
    """6 % of the prompts have 48,000 tokens, the others 512."""
    draft = _Draft("long-and-short", seed)
    for arrival_s in draft.arrivals(12.0, 120.0):
        draft.add(arrival_s, draft.fresh(48_000 if draft.rng.random() < 0.06 else 512), 200)
    return draft.workload()


def cancel_storm(seed: int = 0) -> Workload:
    """The shared-prefix workload. After 45 s, half of the clients that arrived in the minute before leave."""
    rng = Random(f"cancel-storm/{seed}")
    plain = shared_prefix(SharedPrefix(groups=40), rate=12.0, seconds=90.0, seed=seed)
    records: list[Record] = []
    for record in plain.records:
        left = 45e3 - record.arrival_us * 1e-3
        if 0 < left < 60e3 and rng.random() < 0.5:
            record = structs.replace(record, cancel_after_ms=round(left + 100 * rng.random(), 3))
        records.append(record)
    return arranged("cancel-storm", records)


def overload(seed: int = 0) -> Workload:
    """The rate rises to about twice what 8 servers can serve. Half of the requests may be shed (priority -1)."""
    rng = Random(f"overload/{seed}")
    spec = SharedPrefix(groups=60, output_tokens=400)
    plain = shared_prefix(spec, arrivals=ramp(6.0, 30.0, 36.0), seconds=60.0, seed=seed)
    records = [
        structs.replace(record, priority=-1 if rng.random() < 0.5 else 0, slo_ttft_ms=5000.0)
        for record in plain.records
    ]
    return arranged("overload", records)


def hot_prefix(seed: int = 0) -> Workload:
    """40 % of the requests begin with the same 6,400 tokens, the others with one of 60 beginnings of 3,200."""
    draft = _Draft("hot-prefix", seed)
    rng = draft.rng
    for arrival_s in draft.arrivals(42.0, 60.0):
        hot = rng.random() < 0.4
        ids = draft.shared("hot", 6400) if hot else draft.shared(f"group {rng.randrange(60)}", 3200)
        draft.add(arrival_s, ids + draft.fresh(rng.randint(100, 2000)), 250)
    return draft.workload()


def same_prompts(seed: int = 0) -> Workload:
    """Single requests of 2,000 tokens, and about every 4 seconds a burst: 24 times the same 4,800 tokens within 50 ms.
    One of four bursts repeats the prompt of an earlier burst."""
    draft = _Draft("same-prompts", seed)
    rng = draft.rng
    for arrival_s in draft.arrivals(12.0, 90.0):
        draft.add(arrival_s, draft.fresh(2000), 200)
    for burst, begin_s in enumerate(draft.arrivals(0.25, 90.0)):
        prompt = draft.shared(f"burst {rng.randrange(burst) if burst and rng.random() < 0.25 else burst}", 4800)
        for _ in range(24):
            draft.add(begin_s + rng.random() * 0.05, prompt, rng.randint(50, 350))
    return draft.workload()


def rare_giants(seed: int = 0) -> Workload:
    """2 % of the prompts have 100,000 tokens; the others have 500 to 4,500 after one of ten beginnings of 1,000."""
    draft = _Draft("rare-giants", seed)
    rng = draft.rng
    for arrival_s in draft.arrivals(12.0, 90.0):
        if rng.random() < 0.02:
            ids = draft.fresh(100_000)
        else:
            ids = draft.shared(f"group {rng.randrange(10)}", 1000) + draft.fresh(rng.randint(500, 4500))
        draft.add(arrival_s, ids, 250)
    return draft.workload()


def one_hog(seed: int = 0) -> Workload:
    """Ten tenants with 1.2 requests per second each and their own system prompts of 2,000 tokens. After 25 s, an
    eleventh tenant sends 40 requests per second for 30 s, each with 4,000 tokens shared with no other."""
    draft = _Draft("one-hog", seed)
    for arrival_s in draft.arrivals(12.0, 90.0):
        tenant = f"tenant {draft.rng.randrange(10)}"
        draft.add(arrival_s, draft.shared(tenant, 2000) + draft.fresh(1000), 200, tenant=tenant)
    for arrival_s in draft.arrivals(40.0, 30.0):
        draft.add(25.0 + arrival_s, draft.fresh(4000), 300, tenant="hog")
    return draft.workload()


def adapters(count: int = 6, rate: float = 15.0, seconds: float = 90.0, base: float = 0.0, seed: int = 0) -> Workload:
    """Chat with one of `count` adapters; the n-th is chosen in proportion to 1/n. A share `base` uses no adapter."""
    draft = _Draft("adapters", seed)
    rng = draft.rng
    names = [f"adapter-{number}" for number in range(count)]
    weights = [1.0 / (number + 1) for number in range(count)]
    for arrival_s in draft.arrivals(rate, seconds):
        lora = "" if rng.random() < base else rng.choices(names, weights)[0]
        ids = draft.shared(f"{lora} {rng.randrange(3)}", 1500) + draft.fresh(rng.randint(200, 2200))
        draft.add(arrival_s, ids, 200, lora=lora)
    return draft.workload()
