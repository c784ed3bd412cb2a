"""All checks. Findings of equal harm are told in this order."""

from fairlead.doctor.checks import (
    asking,
    balance,
    clock,
    endpoints,
    freshness,
    gateway,
    headers,
    hits,
    kv_agreement,
    kv_dialled,
    kv_events,
    limits,
    metrics,
    models,
    roles,
    scheduler,
    scheduling,
    tls,
    tokens,
)
from fairlead.doctor.run import Check

CHECKS: tuple[Check, ...] = (
    headers.CHECK,
    gateway.CHECK,
    asking.CHECK,
    scheduler.CHECK,
    endpoints.CHECK,
    models.CHECK,
    roles.CHECK,
    tls.CHECK,
    metrics.CHECK,
    freshness.CHECK,
    tokens.CHECK,
    kv_events.CHECK,
    kv_dialled.CHECK,
    kv_agreement.CHECK,
    hits.CHECK,
    scheduling.CHECK,
    balance.CHECK,
    limits.CHECK,
    clock.CHECK,
)
NAMES = tuple(check.name for check in CHECKS)
