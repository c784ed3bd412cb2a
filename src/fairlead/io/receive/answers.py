"""Encoded answers, with what repeats encoded once."""

from collections.abc import Iterable

from fairlead.model.endpoint import Endpoint
from fairlead.model.instructions import Reject
from fairlead.parse.errors import error_body
from fairlead.route.headers import DESTINATION, DROPPED_REASON
from fairlead.wire import ext_proc
from fairlead.wire.access_log import LEASE_KEY

#: Endpoints whose encoded destination is kept; more than any pool has.
_CACHE = 16_384


class Answers:
    """`instance` makes lease ids of this process differ from those of another one behind the same gateway."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._destinations: dict[str, bytes] = {}

    def lease(self, request_id: int) -> str:
        return f"{self._instance}.{request_id}"

    def request_id(self, lease: str) -> int | None:
        """The request of a lease that this process gave out; `None` for any other string."""
        instance, _, number = lease.partition(".")
        return int(number) if instance == self._instance and number.isascii() and number.isdigit() else None

    def mutation(self, endpoint: Endpoint, spoofed: Iterable[str] = ()) -> bytes:
        """HeaderMutation: the destination in, the client's control headers out."""
        destination = self._destinations.get(endpoint.address)
        if destination is None:
            if len(self._destinations) > _CACHE:
                self._destinations.clear()
            destination = ext_proc.set_header(DESTINATION, endpoint.address.encode())
            self._destinations[endpoint.address] = destination
        return destination + ext_proc.remove_headers(name for name in spoofed if name != DESTINATION)

    def metadata(self, endpoint: Endpoint, request_id: int) -> bytes:
        """Dynamic metadata: the destination (never different from the header) and the lease."""
        return ext_proc.lb_metadata(
            {DESTINATION: endpoint.address.encode(), LEASE_KEY: self.lease(request_id).encode()}
        )


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
