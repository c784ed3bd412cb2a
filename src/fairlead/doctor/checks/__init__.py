"""All checks. Findings of equal harm are told in this order."""

from fairlead.doctor.checks.agreement import KV_AGREEMENT, TOKENS
from fairlead.doctor.checks.gateway import ASKING, GATEWAY, HEADERS
from fairlead.doctor.checks.kv_events import KV_DIALLED, KV_EVENTS
from fairlead.doctor.checks.metrics import CLOCK, FRESHNESS, LIMITS, METRICS
from fairlead.doctor.checks.pool import ENDPOINTS, MODELS, ROLES, TLS
from fairlead.doctor.checks.scheduler import BALANCE, HITS, SCHEDULER, SCHEDULING
from fairlead.doctor.run import Check

CHECKS: tuple[Check, ...] = (
    *(HEADERS, GATEWAY, ASKING, SCHEDULER, ENDPOINTS, MODELS, ROLES, TLS, METRICS, FRESHNESS, TOKENS),
    *(KV_EVENTS, KV_DIALLED, KV_AGREEMENT, HITS, SCHEDULING, BALANCE, LIMITS, CLOCK),
)
NAMES = tuple(check.name for check in CHECKS)
