"""The rows of a snapshot, read where the metrics page reads them."""

from math import isfinite

from fairlead.model.decision import DecisionRecord, OutcomeRecord
from fairlead.model.endpoint import MODEL_LABEL, ROLE_LABEL
from fairlead.observe import snapshot_shape as shape
from fairlead.observe.recent import Recent
from fairlead.observe.status import EndpointStatus
from fairlead.observe.watch import Watch


def endpoints(watch: Watch, recent: Recent, now: float) -> list[shape.EndpointRow]:
    table = watch.fleet.table
    rows = zip(table.slots(), watch.endpoints(), strict=True)
    return [_endpoint(watch, slot, status, recent, now) for (slot, _), status in rows]


def _endpoint(watch: Watch, slot: int, status: EndpointStatus, recent: Recent, now: float) -> shape.EndpointRow:
    table, sums = watch.fleet.table, recent.endpoint(status.id)
    source, trust = _knowledge(watch, slot)
    most = max(sums.predicted_hit, sums.reported_hit)
    if trust is None and most > 0.0:
        trust = max(1.0 - sums.hit_error / most, 0.0)
    return shape.EndpointRow(
        id=status.id,
        address=status.address,
        model=status.labels.get(MODEL_LABEL, ""),
        role=status.labels.get(ROLE_LABEL, ""),
        fresh=status.fresh,
        age_s=_rounded(status.age_s, 2),
        waiting=status.waiting,
        running=status.running,
        kv=_rounded(status.kv_usage if status.fresh else float(table.kv[slot]), 4),
        queue=float(table.queue[slot]),
        active=float(table.active[slot]),
        leases=status.leases,
        avoided_s=_left(float(table.ejected_until[slot]) - now),
        sent=int(sums.routed),
        hit_rate=_share(sums.hit_tokens, sums.prompt_tokens),
        predicted_ms=_share(sums.predicted_ms, sums.judged),
        actual_ms=_share(sums.actual_ms, sums.judged),
        judged=int(sums.judged),
        inside=_share(sums.inside, sums.judged),
        failed=int(sums.failed),
        source=source,
        trust=_rounded(trust, 4),
    )


def _knowledge(watch: Watch, slot: int) -> tuple[str, float | None]:
    exact = watch.fleet.exact
    if exact is None:
        return "learned", None
    source, judged = exact.source(slot), exact.check.judged(slot)
    compared = judged.equal + judged.close + judged.off
    return source, exact.check.trust(slot).level if compared else None


def traffic(watch: Watch, recent: Recent, now: float) -> list[shape.TrafficRow]:
    """By model and band, tenants added up; the busiest first."""
    families = watch.metrics.families
    sums: dict[tuple[str, str, str], list[float]] = {}
    families_of = ((families.requests, 0), (families.errors, 1), (families.running, 2))
    for family, column in families_of:
        for (model, target, _, priority, *_), child in family.children.items():
            sums.setdefault((model, target, priority), [0.0] * 3)[column] += child.value
    rates: dict[tuple[str, str, str], list[float]] = {}
    for (model, target, band), row in recent.traffic.sums.items():
        rates[model, target, str(band)] = row
    rows = []
    for key, (requests, errors, running) in sums.items():
        model, target, priority = key
        asked, refused = rates.get(key, (0.0, 0.0))
        looked_up, hit = families.lookups.children.get(key[:2]), families.hits.children.get(key[:2])
        rows.append(
            shape.TrafficRow(
                model=model,
                target="" if target == model else target,
                priority=priority,
                requests=int(requests),
                errors=int(errors),
                running=int(running),
                per_s=recent.per_second(asked, now),
                refused_per_s=recent.per_second(refused, now),
                hit_rate=_share(hit.value, looked_up.value) if looked_up and hit else None,
            )
        )
    return sorted(rows, key=lambda row: (-(row.per_s or 0.0), -row.requests, row.model))


def queues(watch: Watch, now: float) -> shape.Queues | None:
    desk, saturation = watch.queue.desk, watch.queue.saturation()
    if desk is None or saturation is None:
        return None
    queues = desk.flow.queues
    return shape.Queues(
        waiting=len(queues),
        saturation=saturation,
        delay_s=desk.drain_s(),
        wanted_endpoints=desk.wanted(watch.fleet.table.count, now),
        bands=[
            shape.BandRow(
                priority=band.priority,
                waiting=band.count,
                bytes=band.bytes,
                flows=sum(1 for flow in band.flows.values() if len(flow)),
                oldest_s=_left(now - band.oldest()),
                delay_s=desk.drain_s(band.priority),
                used=band.count / band.limit.requests if isfinite(band.limit.requests) else 0.0,
            )
            for band in queues.bands()
        ],
    )


def decision(wall: float, decision: DecisionRecord, outcome: OutcomeRecord | None) -> shape.DecisionRow:
    request, forecast = decision.request, decision.forecast
    return shape.DecisionRow(
        id=request.id,
        at=decision.at + wall,
        model=request.model,
        priority=request.priority,
        endpoint=decision.endpoint,
        outcome=decision.outcome,
        status=decision.status,
        stream=request.stream,
        prompt_tokens=request.prompt_tokens,
        hit_tokens=decision.hit_tokens,
        queued_ms=round(decision.queued_ms, 1),
        predicted_ms=None if forecast is None else round(forecast.ttft_ms, 1),
        ttft_ms=outcome.ttft_ms if outcome is not None and request.stream and outcome.ttft_ms >= 0 else None,
        duration_ms=outcome.duration_ms if outcome is not None and outcome.duration_ms >= 0 else None,
        ended=outcome.status if outcome is not None else 0,
        cause=outcome.cause if outcome is not None else "",
    )


def shadows(watch: Watch) -> list[shape.ShadowRow]:
    shadows = watch.shadows
    cut = shadows.cut()
    totals = shadows.totals()
    rows = []
    for name in dict.fromkeys([*totals, *cut]):
        found = totals.get(name, {})
        agree, differ, refuse, error = (int(found.get(v, 0)) for v in ("agree", "differ", "refuse", "error"))
        chosen = agree + differ
        rows.append(
            shape.ShadowRow(
                name=name,
                agree=agree,
                differ=differ,
                refuse=refuse,
                error=error,
                regret_ms=_share(found.get("regret_ms", 0.0), chosen),
                primary_regret_ms=_share(shadows.primary_regret_ms, shadows.judged),
                cut=cut.get(name, ""),
            )
        )
    return rows


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole > 0.0 else None


def _left(seconds: float) -> float:
    """At least 0; 0 where there is none."""
    return round(max(seconds, 0.0), 2) if isfinite(seconds) else 0.0


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
