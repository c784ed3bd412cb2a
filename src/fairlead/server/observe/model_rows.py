"""What the dashboard shows for each model: its traffic now and in the last hour, its targets, its endpoints."""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable
from itertools import chain
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from fairlead.core.endpoint import STAGES
from fairlead.core.records import OutcomeRecord
from fairlead.core.table import ON_DEMAND, EndpointTable
from fairlead.server.observe.endpoint_history import POINTS, STEP
from fairlead.server.observe.instruments import OTHER
from fairlead.server.observe.recent import COVERED, MAX_LABEL, percentiles
from fairlead.server.observe.snapshot_shape import ModelRow, TargetRow, TrafficRow
from fairlead.server.observe.watch import Watch

#: The number of endpoints per base model, and per adapter that they list or have loaded.
Served = tuple[Counter[str], Counter[str]]
#: A point of the history has at most this many models: the busiest ones.
_MOST_MODELS = 64


class ModelPoint(Struct, frozen=True):
    """One moment of one model. `time`: seconds since 1970; the other fields cover the time since the previous point."""

    time: float
    per_s: float = 0.0
    errors_per_s: float = 0.0
    #: Times to first token of streamed answers; `None` = there were none.
    ttft_p50_ms: float | None = None
    ttft_p95_ms: float | None = None


class ModelHistory:
    """The last hour of each requested model. Call `keep` regularly; `of` returns the points of a model."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, dict[str, ModelPoint]]] = deque(maxlen=POINTS)
        self._last, self._before = -inf, dict[str, list[float]]()

    def keep(self, watch: Watch, now: float) -> None:
        """Add a point if it is due."""
        since = self._last
        if now < since + STEP:
            return
        counts: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        families = watch.metrics.families
        for column, family in enumerate((families.requests, families.errors)):
            for (model, *_), child in family.children.items():
                counts[model][column] += child.value
        first_tokens: dict[str, list[float]] = defaultdict(list)
        for end in watch.newest:
            if end.at > since and end.status < 400 and end.request.stream and end.ttft_ms >= 0.0:
                first_tokens[end.request.model].append(end.ttft_ms)
        points = {}
        for model, (requests, errors) in counts.items():
            asked, failed = self._before.get(model, (0.0, 0.0))
            # Counters of a model without requests are dropped and later begin again at 0, so differences may be
            # negative.
            rates = (max(requests - asked, 0.0) / (now - since), max(errors - failed, 0.0) / (now - since))
            if any(rates) or model in first_tokens:
                p50, p95 = percentiles(first_tokens[model], (0.5, 0.95))
                points[model] = ModelPoint(now, *rates, p50, p95)
        busiest = sorted(points, key=lambda model: -points[model].per_s)[:_MOST_MODELS]
        self._steps.append((now, {model: points[model] for model in busiest}))
        self._last, self._before = now, counts

    def of(self, model: str, wall: float) -> list[ModelPoint]:
        """The points of a model, oldest first. `wall`: seconds to add to the clock to get the time of day."""
        history = (points.get(model) or ModelPoint(time) for time, points in self._steps)
        return [replace(point, time=point.time + wall) for point in history]


def model_rows(watch: Watch, traffic: Iterable[TrafficRow], served: Served, now: float) -> list[ModelRow]:
    """One row per model: the busiest models first, then models that are served but not requested."""
    by_model: dict[str, list[TrafficRow]] = defaultdict(list)
    for row in traffic:
        by_model[row.model].append(row)
    sent_to = {row.target for rows in by_model.values() for row in rows}
    for name in chain(*served):
        if name not in sent_to:
            by_model.setdefault(name, [])
    # With many ends, the newest of them reach back less far.
    newest = watch.newest
    span = min(COVERED, now - newest[0].at) if len(newest) == newest.maxlen else COVERED
    ends: dict[str, list[OutcomeRecord]] = defaultdict(list)
    for record in newest:
        if record.at > now - COVERED:
            ends[record.request.model[:MAX_LABEL]].append(record)
    for name in ends.keys() - by_model.keys():
        ends[OTHER] += ends[name]
    return [_row(model, rows, ends[model], span, served, watch) for model, rows in by_model.items()]


def _row(
    model: str, rows: list[TrafficRow], ends: list[OutcomeRecord], span: float, served: Served, watch: Watch
) -> ModelRow:
    """`ends`: those of the last `span` seconds."""
    bases, adapters = served
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
    refused = span * sum(row.refused_per_s or 0.0 for row in rows)
    failed = refused + sum(end.status >= 400 or end.failed for end in ends)
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
        error_rate=failed / (refused + len(ends)) if rates and refused + len(ends) else None,
        ttft_p50_ms=p50,
        ttft_p95_ms=p95,
        hit_rate=hit / looked_up if looked_up else None,
    )


def models_out(table: EndpointTable, out: Collection[str], any_role: bool = False) -> set[str]:
    """Return the models and adapters, of endpoints and of definitions, that no endpoint can answer which is not `out`
    (ids). `any_role`: endpoints that only prefill answer too."""
    bases, answered, usable, any_adapter = set[str](), set[str](), set[int](), False
    lists: list[Collection[str]] = []
    for slot, endpoint in table.slots():
        own = {*table.base_names(slot, endpoint)}
        bases |= own
        if endpoint.id not in out and (any_role or endpoint.role in STAGES["decode"]):
            if not own:
                return set()  # it may serve any
            usable.add(slot)
            answered |= own | endpoint.promised
            any_adapter = any_adapter or table.listed[slot] is None
        else:
            lists.append(table.listed[slot] or ())
    # Thousands of endpoints may list thousands of adapters each, the same ones or others. Only those in the lists of
    # endpoints that cannot answer may be out; where these lists are longer than that of all names, it is read.
    listed = set[str]().union(*lists) if sum(map(len, lists)) < len(table.listed_names) else table.listed_names
    any_adapter = any_adapter or ON_DEMAND in answered or not usable.isdisjoint(table.listing(ON_DEMAND))
    names = bases if any_adapter else bases.union(listed, table.targets if bases else ())
    return {name for name in names if usable.isdisjoint(table.listing(name))} - answered - {""}


def served_models(table: EndpointTable) -> Served:
    """The models that endpoints serve. The result stays valid while `table.version` is the same."""
    bases: Counter[str] = Counter()
    adapters = Counter({name: len(table.listing(name)) for name in table.listed_names})
    for slot, endpoint in table.slots():
        bases.update(table.base_names(slot, endpoint))
        adapters.update(name for name in table.adapters[slot] or () if slot not in table.listing(name))
    bases.pop("", None)
    adapters.pop("", None)  # an empty name means that the engine loads further adapters on demand
    return bases, adapters
