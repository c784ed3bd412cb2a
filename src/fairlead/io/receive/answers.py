"""Encoded answers, with what repeats encoded once."""

import re
from collections.abc import Callable, Mapping

from fairlead.model.endpoint import Endpoint
from fairlead.model.instructions import Reject
from fairlead.parse.errors import content_type, error_body, grpc_status
from fairlead.route.headers import (
    DESTINATION,
    DROPPED_REASON,
    OWN_NAMESPACE,
    PREFILLER,
    REWRITTEN,
    SECOND,
    TEST_SERVED,
)
from fairlead.wire import ext_proc
from fairlead.wire.access_log import LEASE_KEY
from fairlead.wire.ext_proc import CONTINUE, BodyMode, Kind, Modes
from fairlead.wire.ext_proc_bodies import rewrite_request
from fairlead.wire.protobuf import field, nested_struct, string_struct
from fairlead.wire.traceparent import HEADER as TRACEPARENT

#: Reasons that say that a good request was dropped; others say what is wrong with it.
_DROPPED = ("rejected", "evicted")
_NUMBER = re.compile("[0-9a-f]{16}")

#: Templates kept; more than any pool needs.
_CACHE = 16_384
_NOTHING: Mapping[str, bytes] = {}


class Answers:
    """Pick answers. `instance` makes lease ids of this process differ from those of another behind the same gateway.

    Lease ids have a fixed width, so an answer is constant per endpoint but for the id in its middle.
    """

    def __init__(self, instance: str) -> None:
        self._instance = instance
        #: The header `traceparent` that a request leaves with, by its number; empty = the client's, if there is one.
        self.traceparent: Callable[[int], str] | None = None
        self._templates: dict[tuple[Kind, str, frozenset[str], str], tuple[bytes, bytes]] = {}
        self._seconds: dict[str, bytes] = {"": b""}

    def lease(self, request_id: int) -> str:
        return f"{self._instance}.{request_id:016x}"

    def request_id(self, lease: str) -> int | None:
        """The request of a lease that this process gave out; `None` for any other string."""
        instance, _, number = lease.partition(".")
        if instance != self._instance or _NUMBER.fullmatch(number) is None:
            return None
        return int(number, 16)

    def pick(
        self,
        kind: Kind,
        endpoint: Endpoint,
        request_id: int,
        spoofed: frozenset[str],
        prefill: str = "",
        second: str = "",
    ) -> bytes:
        """Answer to a message of `kind`: the destination in header and metadata (never different), the lease in
        metadata, the address of who computes the prompt if that is another one, that of who gets the request if the
        first cannot be reached, and the client's control headers (`spoofed`) out."""
        end = self._second(second)
        trace = self.traceparent(request_id) if self.traceparent is not None else ""
        if trace:
            address, lease = endpoint.address.encode(), self.lease(request_id).encode()
            return ext_proc.answer(kind, *_parts(address, lease, spoofed, prefill, trace=trace), reroute=True) + end
        key = kind, endpoint.address, spoofed, prefill
        template = self._templates.get(key)
        if template is None:
            if len(self._templates) > _CACHE:
                self._templates.clear()
            template = self._templates[key] = self._template(kind, endpoint.address.encode(), spoofed, prefill)
        return self.lease(request_id).encode().join(template) + end

    def _second(self, address: str) -> bytes:
        """More metadata, behind that of the answer. The two are one message: protobuf merges what is there twice, and
        of two namespaces each stays. So a pool needs a template for each endpoint, not for each two."""
        found = self._seconds.get(address)
        if found is None:
            if len(self._seconds) > _CACHE:
                self._seconds = {"": b""}
            entries = string_struct({SECOND: address.encode()})
            found = self._seconds[address] = field(8, nested_struct(OWN_NAMESPACE, entries))
        return found

    def _template(self, kind: Kind, address: bytes, spoofed: frozenset[str], prefill: str) -> tuple[bytes, bytes]:
        lease = self.lease(0).encode()
        mutation, metadata = _parts(address, lease, spoofed, prefill)
        before, _, after = ext_proc.answer(kind, mutation, metadata, reroute=True).rpartition(lease)
        return before, after

    def pick_with_body(
        self,
        modes: Modes,
        endpoint: Endpoint,
        request_id: int,
        removed: frozenset[str],
        body: bytes,
        trailers: bool,
        mapped: bool,
        prefill: str = "",
        second: str = "",
    ) -> list[bytes]:
        """All answers to a request that leaves with another body. `mapped`: its response is going to change as well."""
        more: dict[str, bytes] = {}
        if mapped:
            # A compressed response could not be read.
            removed |= {"accept-encoding"}
            more[REWRITTEN] = b"1"
        lease = self.lease(request_id).encode()
        trace = self.traceparent(request_id) if self.traceparent is not None else ""
        mutation, metadata = _parts(endpoint.address.encode(), lease, removed, prefill, more, trace)
        return rewrite_request(modes, body, mutation, metadata + self._second(second), trailers)


def _parts(
    address: bytes,
    lease: bytes,
    removed: frozenset[str],
    prefill: str,
    more: Mapping[str, bytes] = _NOTHING,
    trace: str = "",
) -> tuple[bytes, bytes]:
    """HeaderMutation and metadata of a pick."""
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
    """Answers to the body messages (`chunks` of them, together `body`) and trailers that came before the pick."""
    messages: list[bytes] = []
    if mode is BodyMode.FULL_DUPLEX and chunks:
        messages = ext_proc.streamed_body(Kind.REQUEST_BODY, body, end_of_stream=not trailers)
    elif mode is BodyMode.STREAMED:
        messages = [CONTINUE[Kind.REQUEST_BODY]] * chunks
    if trailers:
        messages.append(CONTINUE[Kind.REQUEST_TRAILERS])
    return messages


def refusal(reject: Reject) -> bytes:
    """ImmediateResponse for a request that was not scheduled."""
    headers = {"content-type": content_type(reject.api)}
    if reject.reason.startswith(_DROPPED):
        headers[DROPPED_REASON] = reject.reason
    if reject.retry_after_s >= 0:
        headers["retry-after"] = str(max(1, round(reject.retry_after_s)))
    body = error_body(reject.api, reject.status, reject.message, param=reject.param, code=reject.reason)
    grpc = grpc_status(reject.api, reject.status)
    return ext_proc.immediate(reject.status, headers, body, details=f"fairlead.{reject.reason}", grpc_status=grpc)


def client_error(api: str, status: int, message: str, param: str | None, code: str | None) -> bytes:
    """ImmediateResponse for a request that could not be understood."""
    body = error_body(api, status, message, param=param, code=code)
    headers, grpc = {"content-type": content_type(api)}, grpc_status(api, status)
    return ext_proc.immediate(status, headers, body, details="fairlead.bad-request", grpc_status=grpc)


def client_is_told(served: str) -> bytes:
    """Answer to response headers: let the client know who served."""
    mutation = ext_proc.set_header(TEST_SERVED, served.encode("latin-1", "replace"))
    return ext_proc.answer(Kind.RESPONSE_HEADERS, mutation)
