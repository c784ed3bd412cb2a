"""Records of the pipeline → records of the journal."""

from fairlead.model.decision import DecisionRecord, OutcomeRecord
from fairlead.wire.journal.records import Decided, Ended

_GOLDEN = 0x9E3779B97F4A7C15


def sampled(request_id: int, share: float) -> bool:
    """Whether a decision is among the share that is written with all its reasons: the same ones in every process."""
    return share >= 1.0 or (request_id * _GOLDEN & 0xFFFFFFFFFFFFFFFF) < share * 2.0**64


def decided(record: DecisionRecord) -> Decided:
    request = record.request
    return Decided(
        request.id,
        record.endpoint,
        record.outcome,
        record.status,
        record.prefill,
        record.hit_tokens,
        record.best_hit_tokens,
        record.overloaded,
        record.queued_ms,
        record.policy,
        record.address,
        record.forecast,
        request.target,
        request.rewritten_by,
        request.priority,
    )


def ended(record: OutcomeRecord) -> Ended:
    return Ended(
        record.request.id,
        record.endpoint,
        record.status,
        record.cause,
        record.ttft_ms,
        record.duration_ms,
        record.response_bytes,
        record.prompt_tokens,
        record.completion_tokens,
        record.cached_tokens,
    )
