"""What the dashboard says of each model that clients name: its traffic, its targets, and where adapters are."""

from collections import Counter, defaultdict
from collections.abc import Iterable

from fairlead.core.endpoint import MODEL_LABEL
from fairlead.core.records import OutcomeRecord
from fairlead.core.table import EndpointTable
from fairlead.server.observe.recent import SHORT, percentiles
from fairlead.server.observe.snapshot_shape import ModelRow, TargetRow, TrafficRow
from fairlead.server.observe.watch import Watch

#: Endpoints per base model, and per adapter that they list or have loaded.
Served = tuple[Counter[str], Counter[str]]


def model_rows(watch: Watch, traffic: Iterable[TrafficRow], served: Served, now: float) -> list[ModelRow]:
    """The busiest first, then those that are served and not asked for."""
    by_model: dict[str, list[TrafficRow]] = defaultdict(list)
    for row in traffic:
        by_model[row.model].append(row)
    ends: dict[str, list[OutcomeRecord]] = defaultdict(list)
    for record in watch.newest:
        if record.at > now - SHORT:
            ends[record.request.model].append(record)
    bases, adapters = served
    sent_to = {row.target for rows in by_model.values() for row in rows}
    for name in (*bases, *adapters):
        if name not in sent_to:
            by_model.setdefault(name, [])
    return [_row(model, rows, ends[model], bases, adapters, watch) for model, rows in by_model.items()]


def _row(
    model: str,
    rows: list[TrafficRow],
    ends: list[OutcomeRecord],
    bases: Counter[str],
    adapters: Counter[str],
    watch: Watch,
) -> ModelRow:
    by_target: Counter[str] = Counter()
    for row in rows:
        by_target[row.target or model] += row.requests
    by_target = by_target or Counter({model: 0})
    families = watch.metrics.families
    looked_up, hit = (
        sum(family.children[model, target].value for target in by_target if (model, target) in family.children)
        for family in (families.lookups, families.hits)
    )
    requests, rates = by_target.total(), [row.per_s for row in rows if row.per_s is not None]
    ttft = [end.ttft_ms for end in ends if end.status < 400 and end.request.stream and end.ttft_ms >= 0.0]
    p50, p95 = percentiles(ttft, (0.5, 0.95))
    return ModelRow(
        model=model,
        targets=[
            TargetRow(name, count / requests if requests else None, bases[name] + adapters[name], name in adapters)
            for name, count in by_target.items()
        ],
        requests=requests,
        errors=sum(row.errors for row in rows),
        running=sum(row.running for row in rows),
        per_s=sum(rates) if rates else None,
        error_rate=sum(end.status >= 400 or end.failed for end in ends) / len(ends) if ends else None,
        ttft_p50_ms=p50,
        ttft_p95_ms=p95,
        hit_rate=hit / looked_up if looked_up else None,
    )


def served_models(table: EndpointTable) -> Served:
    """The same while `table.version` is."""
    bases: Counter[str] = Counter()
    lists: Counter[frozenset[str]] = Counter()
    for slot, endpoint in table.slots():
        bases[endpoint.labels.get(MODEL_LABEL, "")] += 1
        lists[(table.adapters[slot] or frozenset()) | (table.listed[slot] or frozenset())] += 1
    adapters: Counter[str] = Counter()
    for names, count in lists.items():
        for name in names:
            adapters[name] += count
    bases.pop("", None)
    adapters.pop("", None)  # stands for "loads others on demand"
    return bases, adapters
