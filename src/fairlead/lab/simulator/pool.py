"""The endpoints of a recorded run, and servers like them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct, structs

from fairlead.core.endpoint import PREFILL_ONLY, ROLE_LABEL, Endpoint
from fairlead.core.events import EndpointDown, EndpointUp
from fairlead.lab.simulator.world import Replica
from fairlead.server.journal.records import Segment


class Pool(Struct):
    """The endpoints of a run by id: those at the time of the last record, and those of the moment with the most."""

    last: dict[str, Endpoint] = {}
    most: dict[str, Endpoint] = {}

    def begin(self, head: Segment) -> None:
        """Take the first segment's head of a run."""
        self.last = {endpoint.id: endpoint for endpoint in head.endpoints}
        self._count()

    def take(self, kind: str, body: Any) -> None:
        """Take a record of the run."""
        if kind == EndpointUp.__name__:
            self.last[body.endpoint.id] = body.endpoint
            self._count()
        elif kind == EndpointDown.__name__:
            self.last.pop(body.endpoint_id, None)

    def _count(self) -> None:
        if len(self.last) >= len(self.most):
            self.most = dict(self.last)


def mixed(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    """The endpoints in an order in which the first ones, however many, have about the roles of all."""
    listed = list(endpoints)
    sizes, seen, places = Counter(map(_role, listed)), Counter[str](), []
    for endpoint in listed:
        role = _role(endpoint)
        places.append(((seen[role] + 0.5) / sizes[role], role in PREFILL_ONLY))
        seen[role] += 1
    return [listed[i] for i in sorted(range(len(listed)), key=places.__getitem__)]


def _role(endpoint: Endpoint) -> str:
    return endpoint.labels.get(ROLE_LABEL, "")


def like(servers: Sequence[Replica], endpoints: Sequence[Endpoint]) -> tuple[Replica, ...]:
    """The servers with the labels of the endpoints, which are repeated in turn; without endpoints as they are."""
    if not endpoints:
        return tuple(servers)
    return tuple(
        structs.replace(server, labels=endpoints[i % len(endpoints)].labels) for i, server in enumerate(servers)
    )
