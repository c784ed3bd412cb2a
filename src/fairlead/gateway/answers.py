"""Answers to the gateway, encoded: picks, refusals, the list of models. Repeated parts are encoded once."""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import ceil, inf, log2
from typing import Any
from urllib.parse import unquote

from msgspec.json import encode

from fairlead.apis.errors import content_type, error_body, grpc_status
from fairlead.core.apis import MODELS, api_of
from fairlead.core.headers import (
    DESTINATION,
    DROPPED_REASON,
    FALLBACK,
    HEDGE_AFTER,
    OWN_NAMESPACE,
    PREFILLER,
    RETRY_ON,
    REWRITTEN,
    TEST_SERVED,
)
from fairlead.core.instructions import Reject
from fairlead.core.models import MODEL_NOT_FOUND, Catalogue, Listed, ModelCard
from fairlead.gateway import ext_proc
from fairlead.gateway.ext_proc import CONTINUE, LEASE_KEY, BodyMode, Kind, Modes, rewrite_request
from fairlead.gateway.protobuf import field, nested_struct, string_struct
from fairlead.gateway.traceparent import HEADER as TRACEPARENT

#: Beginnings of the reasons for dropping a valid request. Other reasons say what is wrong with the request.
_DROPPED = ("rejected", "evicted")

_ONE_MODEL = "/v1/models/"
_JSON = {"content-type": "application/json"}

#: Limit of cached templates; more than any pool needs.
_CACHE = 16_384
_NOTHING: Mapping[str, bytes] = {}


#: The names that endpoints serve → the entry of each in the list of models. The argument: list them even if all
#: endpoints serve the same names.
Served = Callable[[bool], Mapping[str, ModelCard]]


def no_names(alike: bool) -> Mapping[str, ModelCard]:
    return {}


class Answers:
    """Pick answers. `instance` distinguishes lease ids of this process from those of others behind the same gateway.

    Lease ids have a fixed width, so the answers for an endpoint differ only in the id in their middle.
    """

    def __init__(self, instance: str, retry: str = "hedge") -> None:
        """`retry`: the value of `gateway.retry` in the configuration."""
        self._instance = instance
        self._repeats, self._hedges = retry != "connect", retry == "hedge"
        self._own_lease = re.compile(rf"{re.escape(instance)}\.([0-9a-f]{{16}})").fullmatch
        self._prefix = instance.encode()
        self._templates: dict[tuple[Kind, str, frozenset[str], str], tuple[bytes, bytes]] = {}
        self._fallbacks: dict[tuple[Kind, str, bytes], bytes] = {}

    def lease(self, request_id: int) -> str:
        return f"{self._instance}.{request_id:016x}"

    def request_id(self, lease: str) -> int | None:
        """The request of a lease that this process gave out; `None` for any other string."""
        match = self._own_lease(lease)
        return None if match is None else int(match[1], 16)

    def pick(
        self,
        kind: Kind,
        destination: str,
        request_id: int,
        spoofed: frozenset[str],
        prefill: str = "",
        fallback: str = "",
        trace: str = "",
        retry: bytes = b"",
    ) -> bytes:
        """The answer to a message of `kind` that carries the pick.

        `destination`: an address, or several with commas; the same in header and metadata. `spoofed`: control headers
        from the client, which are removed. `prefill`: address of the endpoint that computes the prompt; empty = the
        destination. `fallback`: address of the fallback endpoint, empty = none; `retry`: the `retry_headers` for it.
        `trace`: the header `traceparent`, empty = not traced. The lease id is in the metadata."""
        end = self._fallbacks.get((kind, fallback, retry)) or self._fallback(kind, fallback, retry) if fallback else b""
        lease = b"%b.%016x" % (self._prefix, request_id)
        if trace:
            return (
                ext_proc.answer(kind, *_parts(destination.encode(), lease, spoofed, prefill, trace=trace), reroute=True)
                + end
            )
        template = self._templates.get((kind, destination, spoofed, prefill))
        if template is None:
            if len(self._templates) > _CACHE:
                self._templates.clear()
            template = self._template(kind, destination.encode(), spoofed, prefill)
            self._templates[kind, destination, spoofed, prefill] = template
        return lease.join(template) + end

    def retry_headers(self, repeatable: bool, hedge_after_ms: float) -> bytes:
        """HeaderMutation of a pick with a fallback endpoint; see `Route`. Empty = no retry after the request was sent.
        Times are rounded up by at most a fifth, so that few different times need few templates."""
        if not (repeatable and self._repeats):
            return b""
        return _retry_headers(ceil(4.0 * log2(hedge_after_ms)) if self._hedges and hedge_after_ms > 1.0 else 0)

    def _fallback(self, kind: Kind, address: str, retry: bytes) -> bytes:
        """Metadata and headers of the fallback endpoint, appended to the answer. Both parts form one message: protobuf
        merges a field that occurs twice, and keeps both metadata namespaces. So a pool needs one template per endpoint,
        not one per pair of endpoints."""
        if len(self._fallbacks) > _CACHE:
            self._fallbacks.clear()
        end = field(8, nested_struct(OWN_NAMESPACE, string_struct({FALLBACK: address.encode()})))
        if retry:
            end = ext_proc.answer(kind, retry) + end
        self._fallbacks[kind, address, retry] = end
        return end

    def _template(self, kind: Kind, address: bytes, spoofed: frozenset[str], prefill: str) -> tuple[bytes, bytes]:
        lease = self.lease(0).encode()
        mutation, metadata = _parts(address, lease, spoofed, prefill)
        before, _, after = ext_proc.answer(kind, mutation, metadata, reroute=True).rpartition(lease)
        return before, after

    def pick_with_body(
        self,
        modes: Modes,
        destination: str,
        request_id: int,
        removed: frozenset[str],
        body: bytes,
        trailers: bool,
        mapped: bool,
        prefill: str = "",
        fallback: str = "",
        trace: str = "",
        retry: bytes = b"",
    ) -> list[bytes]:
        """All answers to a request that is sent with another body. `mapped`: its response will be changed as well."""
        more: dict[str, bytes] = {}
        if mapped:
            # The session could not read a compressed response.
            removed |= {"accept-encoding"}
            more[REWRITTEN] = b"1"
        lease = self.lease(request_id).encode()
        mutation, metadata = _parts(destination.encode(), lease, removed, prefill, more, trace)
        if fallback:
            mutation += retry
            metadata += self._fallback(Kind.REQUEST_BODY, fallback, b"")
        return rewrite_request(modes, body, mutation, metadata, trailers)


@lru_cache(maxsize=256)
def _retry_headers(steps: int) -> bytes:
    """`steps`: four times the binary logarithm of the hedging delay in milliseconds; 0 = no hedging."""
    hedge = ext_proc.set_header(HEDGE_AFTER, b"%d" % ceil(2.0 ** (steps / 4))) if steps else b""
    return ext_proc.set_header(RETRY_ON, b"reset,5xx") + hedge


def _parts(
    address: bytes,
    lease: bytes,
    removed: frozenset[str],
    prefill: str,
    more: Mapping[str, bytes] = _NOTHING,
    trace: str = "",
) -> tuple[bytes, bytes]:
    """HeaderMutation and metadata of a pick. `more`: further metadata."""
    mutation = ext_proc.set_header(DESTINATION, address)
    removed -= {DESTINATION}
    if prefill:
        mutation += ext_proc.set_header(PREFILLER, prefill.encode())
        removed -= {PREFILLER}
    if trace:
        mutation += ext_proc.set_header(TRACEPARENT, trace.encode())
    mutation += ext_proc.remove_headers(sorted(removed))
    return mutation, ext_proc.lb_metadata({DESTINATION: address, **more, LEASE_KEY: lease})


def rest_of_request(mode: BodyMode, body: bytes, chunks: int, trailers: bool) -> list[bytes]:
    """Answers to the body messages (`chunks` of them, `body` in total) and trailers that came before the pick."""
    messages: list[bytes] = []
    if mode is BodyMode.FULL_DUPLEX and chunks:
        messages = ext_proc.streamed_body(Kind.REQUEST_BODY, body, end_of_stream=not trailers)
    elif mode is BodyMode.STREAMED:
        messages = [CONTINUE[Kind.REQUEST_BODY]] * chunks
    if trailers:
        messages.append(CONTINUE[Kind.REQUEST_TRAILERS])
    return messages


def refusal(reject: Reject, lease: str) -> bytes:
    """ImmediateResponse for a request that was not scheduled, or was evicted. `lease`: the id of its decision."""
    headers = {"content-type": content_type(reject.api)}
    if reject.reason.startswith(_DROPPED):
        headers[DROPPED_REASON] = reject.reason
    if reject.retry_after_s >= 0:
        headers["retry-after"] = str(max(1, round(reject.retry_after_s)))
    body = error_body(reject.api, reject.status, reject.message, param=reject.param, code=reject.reason)
    grpc = grpc_status(reject.api, reject.status)
    return ext_proc.immediate(reject.status, headers, body, f"fairlead.{reject.reason}", grpc, _decision(lease))


def client_error(api: str, status: int, message: str, param: str | None, code: str | None, lease: str = "") -> bytes:
    """ImmediateResponse for a request that could not be read. `lease`: the id of its decision; empty = it has none."""
    body = error_body(api, status, message, param=param, code=code)
    headers, grpc = {"content-type": content_type(api)}, grpc_status(api, status)
    metadata = _decision(lease) if lease else b""
    return ext_proc.immediate(status, headers, body, "fairlead.bad-request", grpc, metadata)


def _decision(lease: str) -> bytes:
    """The metadata from which a gateway names the decision to the client (`journal.header`), as after a pick."""
    return ext_proc.lb_metadata({LEASE_KEY: lease.encode()})


def client_is_told(served: str) -> bytes:
    """Answer to response headers that tells the client which endpoint served."""
    mutation = ext_proc.set_header(TEST_SERVED, served.encode("latin-1", "replace"))
    return ext_proc.answer(Kind.RESPONSE_HEADERS, mutation)


def models_page(catalogue: Catalogue, headers: Mapping[str, str], served: Served = no_names) -> bytes | None:
    """ImmediateResponse to `GET /v1/models` or `GET /v1/models/NAME`: the names that clients may ask for, not the
    models behind them. `None` = the model servers answer the request.

    `served`: see `Served`. If endpoints serve different names, no endpoint can list all, so they are listed here.
    An unknown name is an error if only defined names are served. Otherwise some model server may know it.
    """
    if headers.get(":method") != "GET":
        return None
    path = headers.get(":path", "").partition("?")[0]
    _, one_model, wanted = path.rpartition(_ONE_MODEL)
    if not (one_model or api_of(path) == MODELS):
        return None
    names = served(bool(catalogue.known))
    listed = catalogue.offered(names) if names else catalogue.listed
    if not (one_model and wanted):
        if not (listed or catalogue.strict):
            return None
        body = encode({"object": "list", "data": [_shape(candidate, catalogue, names) for candidate in listed]})
    else:
        wanted = unquote(wanted)
        model = next((candidate for candidate in listed if candidate.name == wanted), None)
        if model is None:
            return (
                client_error(MODELS, 404, f"The model `{wanted}` does not exist.", "model", MODEL_NOT_FOUND)
                if catalogue.strict or catalogue.is_reserved(wanted)
                else None
            )
        body = encode(_shape(model, catalogue, names))
    return ext_proc.immediate(200, _JSON, body, details="fairlead.models")


def _shape(model: Listed, catalogue: Catalogue, served: Mapping[str, ModelCard]) -> Any:
    """The entry of a model. A defined name has the shortest known context of its targets."""
    if model.said is not None:
        return model.said
    shape = {"id": model.name, "object": "model", "created": model.created, "owned_by": "fairlead"}
    context = min((served[target].context for target in catalogue.targets(model.name) if target in served), default=inf)
    return {**shape, "max_model_len": int(context)} if context < inf else shape
