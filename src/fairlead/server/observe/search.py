"""Search over the decisions that are still held, by what people know of a request."""

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from fairlead.core.records import DecisionRecord, OutcomeRecord
from fairlead.server.observe.decisions import request_number
from fairlead.server.observe.snapshot_shape import DecisionRow

#: How many decisions one search returns at most.
MAX_FOUND = 100

Recorded = tuple[DecisionRecord, OutcomeRecord | None]
#: `answered`: status below 400. `failed`: status of 400 or more, or the endpoint was lost. `cancelled`: the client
#: left, or the request expired.
Outcome = Literal["", "running", "answered", "failed", "cancelled", "refused"]


class Search(Struct, frozen=True, forbid_unknown_fields=True):
    """Criteria of a search. All that are given must match; empty = any. Case is ignored."""

    #: Our request number, the decision id, or a part of the client's x-request-id.
    id: str = ""
    #: A part of the model's name, as requested or as sent.
    model: str = ""
    #: A part of the fairness id.
    tenant: str = ""
    #: The whole endpoint id.
    endpoint: str = ""
    outcome: Outcome = ""

    def among(self, records: Iterable[Recorded]) -> list[Recorded]:
        """The matching records, in the same order."""
        number, client_id = request_number(self.id), self.id.lower()
        model, tenant = self.model.lower(), self.tenant.lower()
        return [
            (decision, outcome)
            for decision, outcome in records
            for request in (decision.request,)
            if (not client_id or request.id == number or client_id in request.external_id.lower())
            and (not model or model in request.model.lower() or model in request.target_model.lower())
            and (not tenant or tenant in request.fairness_id.lower())
            and (not self.endpoint or self.endpoint == decision.endpoint)
            and (not self.outcome or self.outcome == outcome_of(decision, outcome))
        ]


class SearchResult(Struct, frozen=True):
    """The newest matching decisions, newest first; how many match, and how many were searched."""

    decisions: list[DecisionRow]
    matches: int
    searched: int


def outcome_of(decision: DecisionRecord, outcome: OutcomeRecord | None) -> Outcome:
    """The outcome in one word, for searching."""
    if not decision.endpoint:
        return "refused"
    if outcome is None:
        return "running"
    if outcome.status >= 400 or outcome.failed:
        return "failed"
    return "answered" if outcome.cause == "natural" else "cancelled"
