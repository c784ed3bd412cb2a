"""Clients of a `Driver` in tests: what each request was answered, and that it was answered once."""

from fairlead.core.instructions import Reject, Route
from fairlead.core.request import Request


class Clients:
    """By request id: the endpoint (its id), the fallback endpoint (its address), or the refusal."""

    def __init__(self) -> None:
        self.routed: dict[int, str] = {}
        self.fallbacks: dict[int, str] = {}
        self.rejected: dict[int, Reject] = {}

    def of(self, request: Request) -> "Client":
        """Who waits for the answer: the `client` of its `RequestArrived`."""
        return Client(request.id, self)


class Client:
    def __init__(self, number: int, clients: Clients) -> None:
        self._number = number
        self._clients = clients

    def route(self, route: Route) -> None:
        self._once()
        self._clients.routed[self._number] = route.endpoint.id
        self._clients.fallbacks[self._number] = route.fallback

    def reject(self, reject: Reject) -> None:
        self._once()
        self._clients.rejected[self._number] = reject

    def hold(self, seconds: float) -> None:
        """Nobody counts how long it takes."""

    def connected(self) -> bool:
        return True

    def fail(self) -> None:
        raise AssertionError(f"request {self._number} could not be answered")

    def _once(self) -> None:
        answered = self._number in self._clients.routed or self._number in self._clients.rejected
        assert not answered, f"request {self._number} is answered a second time"
