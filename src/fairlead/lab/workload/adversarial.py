"""Workloads that break routers: small and seeded, each made for one known weakness.

`paced_prefix`    one client after another with the same beginning and no load in between: rules that only look at load
                  spread them over all servers, and each server computes the beginning again.
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

from msgspec import structs

from fairlead.lab.workload.arrivals import poisson, ramp, times
from fairlead.lab.workload.conversation import SharedPrefix, shared_prefix
from fairlead.lab.workload.record import Record, Workload, arranged

BLOCK = 64


class _Blocks:
    """Creates block ids: shared beginnings by name, and new ids."""

    def __init__(self) -> None:
        self._next = 0
        self._shared: dict[str, tuple[int, ...]] = {}

    def fresh(self, tokens: int) -> tuple[int, ...]:
        first, self._next = self._next, self._next + -(-tokens // BLOCK)
        return tuple(range(first, self._next))

    def shared(self, name: str, tokens: int) -> tuple[int, ...]:
        if name not in self._shared:
            self._shared[name] = self.fresh(tokens)
        return self._shared[name]


def _record(index: int, arrival_s: float, ids: tuple[int, ...], output: int) -> Record:
    return Record(
        id=str(index),
        arrival_us=int(arrival_s * 1e6),
        in_tokens=len(ids) * BLOCK,
        out_tokens=output,
        max_tokens=output,
        block_size=BLOCK,
        hash_ids=ids,
    )


def paced_prefix(count: int = 120, gap_s: float = 1.0, seed: int = 0) -> Workload:
    """Requests that each start `gap_s` after the end of the one before, all with the same first 6,400 tokens."""
    blocks = _Blocks()
    records: list[Record] = []
    for index in range(count):
        record = _record(index, index * (gap_s + 1.0), blocks.shared("system", 6400) + blocks.fresh(640), 40)
        before = str(index - 1) if index else ""
        records.append(structs.replace(record, parent=before, think_ms=gap_s * 1e3 if index else 0.0))
    return arranged("paced-prefix", records, "think")


def cold_bursts(bursts: int = 24, size: int = 16, every_s: float = 5.0, seed: int = 0) -> Workload:
    """Every `every_s` seconds, `size` requests within 100 ms that share 8,000 tokens not used before."""
    rng = Random(f"cold-bursts/{seed}")
    blocks = _Blocks()
    records: list[Record] = []
    for burst in range(bursts):
        for _ in range(size):
            arrival_s = burst * every_s + rng.random() * 0.1
            records.append(_record(len(records), arrival_s, blocks.shared(str(burst), 8000) + blocks.fresh(256), 150))
    return arranged("cold-bursts", records)


def viral_prompt(rate: float = 30.0, seconds: float = 90.0, share: float = 0.8, seed: int = 0) -> Workload:
    """`share` of all requests have the same first 6,400 tokens; the others share nothing."""
    rng = Random(f"viral-prompt/{seed}")
    blocks = _Blocks()
    records: list[Record] = []
    for arrival_s in times(poisson(rate), rng, seconds=seconds):
        viral = rng.random() < share
        ids = blocks.shared("viral", 6400) + blocks.fresh(640) if viral else blocks.fresh(3200)
        records.append(_record(len(records), arrival_s, ids, 250))
    return arranged("viral-prompt", records)


def long_and_short(rate: float = 12.0, seconds: float = 120.0, share: float = 0.06, seed: int = 0) -> Workload:
    """`share` of the prompts have 48,000 tokens, the others 512."""
    rng = Random(f"long-and-short/{seed}")
    blocks = _Blocks()
    records: list[Record] = []
    for arrival_s in times(poisson(rate), rng, seconds=seconds):
        long = rng.random() < share
        records.append(_record(len(records), arrival_s, blocks.fresh(48_000 if long else 512), 200))
    return arranged("long-and-short", records)


def cancel_storm(rate: float = 12.0, seconds: float = 90.0, at_s: float = 45.0, seed: int = 0) -> Workload:
    """The shared-prefix workload. At `at_s`, half of the clients that arrived in the minute before leave."""
    rng = Random(f"cancel-storm/{seed}")
    plain = shared_prefix(SharedPrefix(groups=40), rate=rate, seconds=seconds, seed=seed)
    records: list[Record] = []
    for record in plain.records:
        left = at_s * 1e3 - record.arrival_us * 1e-3
        if 0 < left < 60e3 and rng.random() < 0.5:
            record = structs.replace(record, cancel_after_ms=round(left + 100 * rng.random(), 3))
        records.append(record)
    return arranged("cancel-storm", records)


def overload(first: float = 6.0, last: float = 30.0, seconds: float = 60.0, seed: int = 0) -> Workload:
    """The rate rises to about twice what 8 servers can serve. Half of the requests may be shed (priority -1)."""
    rng = Random(f"overload/{seed}")
    plain = shared_prefix(
        SharedPrefix(groups=60, output_tokens=400),
        arrivals=ramp(first, last, seconds * 0.6),
        seconds=seconds,
        seed=seed,
    )
    records = [
        structs.replace(record, priority=-1 if rng.random() < 0.5 else 0, slo_ttft_ms=5000.0)
        for record in plain.records
    ]
    return arranged("overload", records)


def hot_prefix(rate: float = 42.0, seconds: float = 60.0, share: float = 0.4, seed: int = 0) -> Workload:
    """`share` of the requests begin with the same 6,400 tokens, the others with one of 60 beginnings of 3,200."""
    rng = Random(f"hot-prefix/{seed}")
    blocks = _Blocks()
    records: list[Record] = []
    for arrival_s in times(poisson(rate), rng, seconds=seconds):
        hot = rng.random() < share
        ids = blocks.shared("hot", 6400) if hot else blocks.shared(f"group {rng.randrange(60)}", 3200)
        records.append(_record(len(records), arrival_s, ids + blocks.fresh(rng.randint(100, 2000)), 250))
    return arranged("hot-prefix", records)


def same_prompts(
    rate: float = 12.0, every_s: float = 4.0, size: int = 24, seconds: float = 90.0, seed: int = 0
) -> Workload:
    """Single requests of 2,000 tokens, and about every `every_s` seconds a burst: `size` times the same 4,800 tokens
    within 50 ms. One of four bursts repeats the prompt of an earlier burst."""
    rng = Random(f"same-prompts/{seed}")
    blocks = _Blocks()
    records = [
        _record(index, arrival_s, blocks.fresh(2000), 200)
        for index, arrival_s in enumerate(times(poisson(rate), rng, seconds=seconds))
    ]
    for burst, begin_s in enumerate(times(poisson(1.0 / every_s), rng, seconds=seconds)):
        prompt = blocks.shared(f"burst {rng.randrange(burst) if burst and rng.random() < 0.25 else burst}", 4800)
        for _ in range(size):
            records.append(_record(len(records), begin_s + rng.random() * 0.05, prompt, rng.randint(50, 350)))
    return arranged("same-prompts", records)


def rare_giants(rate: float = 12.0, seconds: float = 90.0, share: float = 0.02, seed: int = 0) -> Workload:
    """`share` of the prompts have 100,000 tokens; the others have 500 to 4,500 after one of ten beginnings of 1,000."""
    rng = Random(f"rare-giants/{seed}")
    blocks = _Blocks()
    records: list[Record] = []
    for arrival_s in times(poisson(rate), rng, seconds=seconds):
        if rng.random() < share:
            ids = blocks.fresh(100_000)
        else:
            ids = blocks.shared(f"group {rng.randrange(10)}", 1000) + blocks.fresh(rng.randint(500, 4500))
        records.append(_record(len(records), arrival_s, ids, 250))
    return arranged("rare-giants", records)


def one_hog(
    rate: float = 1.2,
    hog: float = 40.0,
    begin_s: float = 25.0,
    for_s: float = 30.0,
    seconds: float = 90.0,
    seed: int = 0,
) -> Workload:
    """Ten tenants with `rate` requests per second each and their own system prompts of 2,000 tokens. From `begin_s`, an
    eleventh tenant sends `hog` requests per second for `for_s` seconds, each with 4,000 tokens shared with no other."""
    rng = Random(f"one-hog/{seed}")
    blocks = _Blocks()
    records: list[Record] = []
    for arrival_s in times(poisson(10 * rate), rng, seconds=seconds):
        tenant = f"tenant {rng.randrange(10)}"
        record = _record(len(records), arrival_s, blocks.shared(tenant, 2000) + blocks.fresh(1000), 200)
        records.append(structs.replace(record, tenant=tenant))
    for arrival_s in times(poisson(hog), rng, seconds=for_s):
        record = _record(len(records), begin_s + arrival_s, blocks.fresh(4000), 300)
        records.append(structs.replace(record, tenant="hog"))
    return arranged("one-hog", records)


def adapters(count: int = 6, rate: float = 15.0, seconds: float = 90.0, base: float = 0.0, seed: int = 0) -> Workload:
    """Chat with one of `count` adapters; the n-th is chosen in proportion to 1/n. A share `base` uses no adapter."""
    rng = Random(f"adapters/{seed}")
    blocks = _Blocks()
    names = [f"adapter-{number}" for number in range(count)]
    weights = [1.0 / (number + 1) for number in range(count)]
    records: list[Record] = []
    for arrival_s in times(poisson(rate), rng, seconds=seconds):
        lora = "" if rng.random() < base else rng.choices(names, weights)[0]
        ids = blocks.shared(f"{lora} {rng.randrange(3)}", 1500) + blocks.fresh(rng.randint(200, 2200))
        records.append(structs.replace(_record(len(records), arrival_s, ids, 200), lora=lora))
    return arranged("adapters", records)
