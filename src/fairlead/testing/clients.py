"""Clients of a `Driver` in tests: what each request was answered, and that it was answered once."""

from collections.abc import MutableMapping
from typing import Any

from fairlead.model.endpoint import Endpoint
from fairlead.model.instructions import Reject
from fairlead.model.request import Request


class Clients:
    """By request id: the endpoint (its id), the second choice (its address), or the refusal."""

    def __init__(self) -> None:
        self.routed: dict[int, str] = {}
        self.seconds: dict[int, str] = {}
        self.rejected: dict[int, Reject] = {}

    def wait(self, request: Request, waiting: MutableMapping[int, Any]) -> None:
        """For the answer; `waiting` is the driver's."""
        waiting[request.id] = _Client(request.id, self)


class _Client:
    def __init__(self, number: int, clients: Clients) -> None:
        self._number = number
        self._clients = clients

    def route(self, endpoint: Endpoint, target: str = "", shown: str = "", prefill: str = "", second: str = "") -> None:
        self._once()
        self._clients.routed[self._number] = endpoint.id
        self._clients.seconds[self._number] = second

    def reject(self, reject: Reject) -> None:
        self._once()
        self._clients.rejected[self._number] = reject

    def hold(self, seconds: float) -> None:
        """Nobody counts how long it takes."""

    def stay(self) -> None:
        """It does."""

    def _once(self) -> None:
        answered = self._number in self._clients.routed or self._number in self._clients.rejected
        assert not answered, f"request {self._number} is answered a second time"
