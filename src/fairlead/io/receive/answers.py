"""Encoded answers, with what repeats encoded once."""

import re

from fairlead.model.endpoint import Endpoint
from fairlead.model.instructions import Reject
from fairlead.parse.errors import error_body
from fairlead.route.headers import DESTINATION, DROPPED_REASON
from fairlead.wire import ext_proc
from fairlead.wire.access_log import LEASE_KEY
from fairlead.wire.ext_proc import Kind

_NUMBER = re.compile("[0-9a-f]{16}")

#: Templates kept; more than any pool needs.
_CACHE = 16_384


class Answers:
    """Pick answers. `instance` makes lease ids of this process differ from those of another behind the same gateway.

    Lease ids have a fixed width, so an answer is constant per endpoint but for the id in its middle.
    """

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._templates: dict[tuple[Kind, str, frozenset[str]], tuple[bytes, bytes]] = {}

    def lease(self, request_id: int) -> str:
        return f"{self._instance}.{request_id:016x}"

    def request_id(self, lease: str) -> int | None:
        """The request of a lease that this process gave out; `None` for any other string."""
        instance, _, number = lease.partition(".")
        if instance != self._instance or _NUMBER.fullmatch(number) is None:
            return None
        return int(number, 16)

    def pick(self, kind: Kind, endpoint: Endpoint, request_id: int, spoofed: frozenset[str]) -> bytes:
        """Answer to a message of `kind`: the destination in header and metadata (never different), the lease in
        metadata, and the client's control headers (`spoofed`) out."""
        key = kind, endpoint.address, spoofed
        template = self._templates.get(key)
        if template is None:
            if len(self._templates) > _CACHE:
                self._templates.clear()
            template = self._templates[key] = self._template(kind, endpoint.address.encode(), spoofed)
        return self.lease(request_id).encode().join(template)

    def _template(self, kind: Kind, address: bytes, spoofed: frozenset[str]) -> tuple[bytes, bytes]:
        mutation = ext_proc.set_header(DESTINATION, address)
        mutation += ext_proc.remove_headers(sorted(spoofed - {DESTINATION}))
        lease = self.lease(0).encode()
        metadata = ext_proc.lb_metadata({DESTINATION: address, LEASE_KEY: lease})
        before, _, after = ext_proc.answer(kind, mutation, metadata, reroute=True).rpartition(lease)
        return before, after


def refusal(reject: Reject) -> bytes:
    """ImmediateResponse for a request that was not scheduled."""
    headers = {"content-type": "application/json", DROPPED_REASON: reject.reason}
    if reject.retry_after_s >= 0:
        headers["retry-after"] = str(max(1, round(reject.retry_after_s)))
    body = error_body(reject.api, reject.status, reject.message, code=reject.reason)
    return ext_proc.immediate(reject.status, headers, body, details=f"fairlead.{reject.reason}")


def client_error(api: str, status: int, message: str, param: str | None, code: str | None) -> bytes:
    """ImmediateResponse for a request that could not be understood."""
    body = error_body(api, status, message, param=param, code=code)
    return ext_proc.immediate(status, {"content-type": "application/json"}, body, details="fairlead.bad-request")
