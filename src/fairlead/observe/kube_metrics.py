"""What is known of the link to Kubernetes, as metrics."""

from collections.abc import Callable, Mapping

from msgspec import Struct

from fairlead.observe.exposition import Registry
from fairlead.observe.instruments import counters, gauges


class Followed(Struct, frozen=True, kw_only=True):
    """One resource that is listed and watched; counts since the start."""

    connected: bool
    objects: int
    lists: int
    watches: int
    failures: int
    events: int
    unreadable: int


class KubeMetrics:
    """Empty until there is a `source`."""

    def __init__(self, registry: Registry) -> None:
        #: By plural, what is followed.
        self.source: Callable[[], Mapping[str, Followed]] = dict
        self._connected = gauges("resource")
        self._objects = gauges("resource")
        self._counts = {name: counters("resource") for name in ("lists", "watches", "failures", "events", "unreadable")}
        self.leader = gauges("lease")
        self.status_writes = counters("pool")
        registry.before(self._refresh)
        registry.show("fairlead_kube_connected", "1 while the API server answers for this resource.", self._connected)
        registry.show("fairlead_kube_objects", "Objects that are known.", self._objects)
        helps = {
            "lists": "Whole lists that were read.",
            "watches": "Watches that were begun.",
            "failures": "Requests that found no answer or were refused.",
            "events": "Changes that were watched.",
            "unreadable": "Objects that could not be read.",
        }
        for name, family in self._counts.items():
            registry.show(f"fairlead_kube_{name}_total", helps[name], family)
        registry.show("fairlead_kube_leader", "1 while this replica leads.", self.leader)
        registry.show("fairlead_kube_status_writes_total", "Conditions that were written.", self.status_writes)

    def _refresh(self) -> None:
        for resource, followed in self.source().items():
            self._connected.child(resource).set(followed.connected)
            self._objects.child(resource).set(followed.objects)
            for name, family in self._counts.items():
                family.child(resource).value = getattr(followed, name)
