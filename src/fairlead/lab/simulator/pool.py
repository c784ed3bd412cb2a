"""The endpoints of a recorded run, and servers like them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct, structs

from fairlead.core.endpoint import Endpoint
from fairlead.core.events import AdaptersListed, EndpointDown, EndpointUp, MetricsSampled
from fairlead.lab.simulator.world import ADAPTER_SLOTS, Replica
from fairlead.server.journal.records import Segment


class Pool(Struct):
    """The endpoints of a run by id: those at the time of the last record, and those of the moment with the most."""

    last: dict[str, Endpoint] = {}
    most: dict[str, Endpoint] = {}
    #: The names of all adapters; and by endpoint how many of them one batch may have, where it is reported.
    adapters: set[str] = set()
    slots: dict[str, int] = {}

    def begin(self, head: Segment) -> None:
        """Take the first segment's head of a run."""
        self.last = {endpoint.id: endpoint for endpoint in head.endpoints}
        self.adapters.update(*(listed.adapters or () for listed in head.listed), *(e.promised for e in head.endpoints))
        self._count()

    def take(self, kind: str, body: Any) -> None:
        """Take a record of the run."""
        if kind == EndpointUp.__name__:
            self.last[body.endpoint.id] = body.endpoint
            self.adapters |= body.endpoint.promised
            self._count()
        elif kind == EndpointDown.__name__:
            self.last.pop(body.endpoint_id, None)
        elif kind == AdaptersListed.__name__:
            self.adapters |= body.adapters or set()
        elif kind == MetricsSampled.__name__ and body.sample.adapters is not None:
            self.adapters |= body.sample.adapters | body.sample.waiting_adapters
            if body.sample.max_adapters:
                self.slots[body.endpoint_id] = body.sample.max_adapters

    def _count(self) -> None:
        if len(self.last) >= len(self.most):
            self.most = dict(self.last)

    def like(self, servers: Sequence[Replica], endpoints: Sequence[Endpoint]) -> tuple[Replica, ...]:
        """The servers with the labels and adapter slots of these endpoints, which are repeated in turn; without
        endpoints as they are. Those that report no slots, as before their first adapter, have as many as others."""
        if not endpoints:
            return tuple(servers)
        usual = max(self.slots.values(), default=ADAPTER_SLOTS) if self.adapters else 0
        made = []
        for i, server in enumerate(servers):
            endpoint = endpoints[i % len(endpoints)]
            engine = structs.replace(server.engine, max_loras=self.slots.get(endpoint.id, usual))
            made.append(structs.replace(server, labels=endpoint.labels, engine=engine))
        return tuple(made)


def mixed(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    """The endpoints in an order in which the first ones, however many, have about the roles of all."""
    listed = list(endpoints)
    sizes, seen, places = Counter(endpoint.role for endpoint in listed), Counter[str](), []
    for endpoint in listed:
        role = endpoint.role
        places.append(((seen[role] + 0.5) / sizes[role], endpoint.only_prefills))
        seen[role] += 1
    return [listed[i] for i in sorted(range(len(listed)), key=places.__getitem__)]
