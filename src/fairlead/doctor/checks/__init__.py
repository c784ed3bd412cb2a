"""All checks. Findings of equal harm are reported in this order."""

from fairlead.doctor.checks import agreement, exposure, gateway, kv_events, metrics, pool, scheduler
from fairlead.doctor.run import Check

CHECKS: tuple[Check, ...] = (
    *(gateway.headers, gateway.gateway, gateway.asking, scheduler.scheduler),
    *(
        pool.configuration,
        pool.endpoints,
        pool.models,
        pool.roles,
        pool.tls,
        metrics.metrics,
        metrics.freshness,
        agreement.tokens,
    ),
    *(
        kv_events.kv_events,
        kv_events.kv_dialled,
        kv_events.kv_unheard,
        kv_events.kv_tokens,
        agreement.kv_agreement,
        scheduler.hits,
        scheduler.scheduling,
    ),
    *(scheduler.balance, exposure.exposure, metrics.limits, metrics.clock),
)
