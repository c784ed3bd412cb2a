"""Describes the admin port as an OpenAPI document. The schemas of JSON answers come from the types that are encoded.
For answers that are plain dictionaries, this file declares the types.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, TypedDict

import msgspec

from fairlead import __version__
from fairlead.server.observe.fleet_gauges import EndpointStatus
from fairlead.server.observe.snapshot import EndpointPast, ModelPast, Search, SearchResult
from fairlead.server.observe.snapshot_shape import Beginning, Snapshot

PATH: Final = "/openapi.json"
Values = dict[str, Any]


class Endpoints(TypedDict):
    endpoints: list[EndpointStatus]


_Moment = TypedDict("_Moment", {"at": float})  # noqa: UP013 `at` is the name in the JSON


class Decision(_Moment):
    """One decision. Times are seconds of the scheduler's clock, or milliseconds in fields `*_ms`; null = unknown."""

    request_id: int
    external_id: str
    waited_ms: float
    queued_ms: float
    asked_ms: float
    model: str
    target_model: str
    rewritten_by: str | None
    api: str
    stream: bool
    priority: int
    fairness_id: str
    prompt_tokens: int
    policy: str
    outcome: str
    status: int | None
    endpoint: str | None
    address: str | None
    prefill_endpoint: str | None
    answered_by: str | None
    predicted_hit_tokens: int
    best_hit_tokens: int
    overloaded: bool
    forecast: Values | None
    waiting: Values | None
    split: Values | None
    trace: Values | None
    result: Values | None


class DecisionInFull(Decision):
    """A decision with its reasons: terms in milliseconds, and what each other endpoint would have cost."""

    decision_id: str | None
    session: str | None
    max_tokens: int | None
    prediction: Values | None
    explanation: Values | None
    unexplained: str | None


class Decisions(TypedDict):
    decisions: list[Decision]


class Knowledge(TypedDict, total=False):
    """What is known of prompts. `index` and `endpoints` exist only with KV events, `indexer` only with an indexer."""

    tokenisers: dict[str, Values]
    token_check: Values
    prompts_without_tokens: Values
    index: Values
    endpoints: dict[str, Values]
    indexer: Values


class Replicas(TypedDict):
    """The other schedulers of the pool, and counts of what was sent to them and received from them."""

    replica: str
    worker: int
    workers: int
    via: str
    connected: bool
    problem: str
    trouble: str
    lag_ms: float
    missing: list[str]
    sent: int
    sent_bytes: int
    received: int
    received_bytes: int
    dropped: int
    snapshots_sent: int
    snapshots_received: int
    gaps: int
    outages: int
    replicas: dict[str, Values]


class Segments(TypedDict):
    """Name and bytes of each segment of the journal, the oldest first."""

    segments: list[tuple[str, int]]


class DashboardSnapshot(TypedDict):
    about: Beginning
    now: Snapshot


_JSON: Final[Mapping[str, Any]] = {
    "/debug/endpoints": Endpoints,
    "/debug/decisions": Decisions,
    "/debug/decisions/{name}": DecisionInFull,
    "/debug/knowledge": Knowledge | None,
    "/debug/replicas": Replicas | None,
    "/debug/journal": Segments,
    "/dashboard/snapshot": DashboardSnapshot,
    "/dashboard/decisions": SearchResult,
    "/dashboard/endpoint": EndpointPast,
    "/dashboard/model": ModelPast,
    PATH: Values,
}
_QUERIES: Final[Mapping[str, Mapping[str, Values]]] = {
    "/debug/decisions": {"last": {"type": "integer", "minimum": 1}},
    "/dashboard/decisions": {key: {"type": "string"} for key in Search.__struct_fields__},
    "/dashboard/endpoint": {"id": {"type": "string"}},
    "/dashboard/model": {"name": {"type": "string"}},
}
#: Content types of answers that are neither JSON nor plain text.
_TYPES: Final[Mapping[str, str]] = {
    "/dashboard/stream": "text/event-stream",
    "/debug/journal/{name}": "application/octet-stream",
}
_REFUSALS: Final = {"401": "a token is needed (`admin.tokenFile`)", "403": "for another host, or from another origin"}


def document(pages: Mapping[str, str]) -> dict[str, Any]:
    """The document. `pages`: the paths of the port, each with a summary."""
    schemas, components = msgspec.json.schema_components(_JSON.values(), ref_template="#/components/schemas/{name}")
    answers = dict(zip(_JSON, schemas, strict=True))
    paths = {}
    for page, summary in pages.items():
        path = page.partition("?")[0]
        paths[path] = {"get": _operation(path, summary, answers.get(path))}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Fairlead's admin port", "version": __version__},
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(path: str, summary: str, schema: Any) -> dict[str, Any]:
    kind = "application/json" if schema else _TYPES.get(path, "text/plain")
    responses = {"200": {"description": summary, "content": {kind: {"schema": schema or {"type": "string"}}}}}
    refusals = dict(_REFUSALS)
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    for name, values in _QUERIES.get(path, {}).items():
        parameters.append({"name": name, "in": "query", "schema": values})
        refusals["400"] = "a wrong parameter"
    if path.startswith("/debug/"):
        said = "NAMESPACE/NAME, where one scheduler serves several pools"
        parameters.append({"name": "pool", "in": "query", "description": said, "schema": {"type": "string"}})
    if path.startswith("/debug/") or path == "/dashboard/endpoint":
        refusals["404"] = "there is none"
    if path == "/readyz" or path.startswith(("/debug/", "/dashboard/s")):
        refusals["503"] = "not ready: the reasons" if path == "/readyz" else "too many ask at once; try again"
    for status, said in refusals.items():
        responses[status] = {"description": said, "content": {"text/plain": {"schema": {"type": "string"}}}}
    return {"summary": summary, "parameters": parameters, "responses": responses}
