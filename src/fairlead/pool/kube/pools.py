"""Follow all InferencePools of a namespace, or of every namespace, and the endpoints of the served pools.

All pools share one watch of pools and one of pods. The pods of each pool are selected here, by the rules of
`pool.kube.pods`. A pod that several pools select is an endpoint of each of them.
"""

import asyncio
from collections.abc import Callable, Mapping

from fairlead.pool.aio import Turns, call_consumer
from fairlead.pool.kube.client import KubeClient, Resource
from fairlead.pool.kube.objects import VERSIONS, Pool, read_pool, selector_text
from fairlead.pool.kube.pods import Feed, OnTrouble, Pod, PodEndpoints, read_pod
from fairlead.pool.kube.reflector import Reflector


class Pools:
    """Calls `changed(key, pool)` for each new, changed or (`None`) removed pool. A pool that was made again under its
    name counts as removed, then new. `await run()` never returns."""

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        group: str,
        changed: Callable[[str, Pool | None], object],
        *,
        pool_labels: Mapping[str, str],
        pod_labels: Mapping[str, str],
        on_trouble: OnTrouble,
        report: Callable[[str], object],
        synced: Callable[[], object],
    ) -> None:
        """`namespace`: empty = all. Only pools and pods with these labels are seen."""
        self._changed = changed
        self._synced = synced
        self._served: dict[str, PodEndpoints] = {}
        #: One for all pools: what changes in many at once delays nothing else either.
        self._turns = Turns()
        #: The uids of the pools that were reported.
        self._uids: dict[str, str] = {}
        #: Pools for which events of known pods were not sent yet.
        self._unsent: set[str] = set()
        self.pools = Reflector(
            client,
            Resource(group, VERSIONS[group], "inferencepools", namespace),
            read_pool,
            self._pools_changed,
            query=_labelled(pool_labels),
            synced=synced,
            on_trouble=lambda trouble: on_trouble("inferencepools", trouble),
            report=report,
        )
        self.pods = Reflector(
            client,
            Resource("", "v1", "pods", namespace),
            read_pod,
            self._pods_changed,
            query=_labelled(pod_labels),
            synced=self._pods_listed,
            on_trouble=lambda trouble: on_trouble("pods", trouble),
            report=report,
        )

    @property
    def missing(self) -> str:
        """What was not listed yet, in words; empty = nothing is missing."""
        if not self.pools.ready.is_set():
            return "the InferencePools were not read yet"
        if not self.pods.ready.is_set():
            return "the pods were not listed yet"
        return f"endpoints of the pool {min(self._unsent)} are not known yet" if self._unsent else ""

    @property
    def refused(self) -> bool:
        """Whether the API server does not allow (403) reading the pools or the pods."""
        return self.pools.forbidden or self.pods.forbidden

    def lacks(self, key: str) -> bool:
        """Whether it is known that there is no such pool."""
        return self.pools.complete and key not in self.pools.items

    async def run(self) -> None:
        try:
            await asyncio.gather(self.pools.run(), self.pods.run())
        finally:
            for key in list(self._served):
                self.leave(key)

    def follow(self, key: str, feed: Feed) -> None:
        """Report the endpoints of this pool from now on."""
        self.leave(key)
        self._served[key] = PodEndpoints(feed, self._turns)
        self._match(key, self.pools.items[key])
        self._tell(key)

    def leave(self, key: str) -> None:
        """Stop reporting this pool's endpoints. Events that were not sent yet are dropped."""
        endpoints = self._served.pop(key, None)
        self._unsent.discard(key)
        if endpoints is not None:
            endpoints.close()

    def _pods_listed(self) -> None:
        self._synced()
        for key in list(self._served):
            self._tell(key)

    def _tell(self, key: str) -> None:
        """Call `synced` once the pool's events so far were sent."""

        def tell() -> None:
            self._unsent.discard(key)
            call_consumer(self._synced, "the follower of pools")

        self._unsent.add(key)
        self._served[key].make(tell)

    def _pools_changed(self, pools: Mapping[str, Pool | None]) -> None:
        for key, pool in pools.items():
            uid = self._uids.pop(key, None)
            if uid is not None and (pool is None or pool.uid != uid):
                self.leave(key)
                self._report(key, None)
            if pool is not None:
                self._uids[key] = pool.uid
                if key in self._served:
                    self._match(key, pool)
                self._report(key, pool)

    def _report(self, key: str, pool: Pool | None) -> None:
        call_consumer(lambda: self._changed(key, pool), "the follower of pools")

    def _match(self, key: str, pool: Pool) -> None:
        endpoints = self._served[key]
        _take(endpoints, pool, {**dict.fromkeys(endpoints.pods), **self.pods.items})

    def _pods_changed(self, pods: Mapping[str, Pod | None]) -> None:
        for key, endpoints in self._served.items():
            if (pool := self.pools.items.get(key)) is not None:
                _take(endpoints, pool, pods)


def _take(endpoints: PodEndpoints, pool: Pool, pods: Mapping[str, Pod | None]) -> None:
    """Take note of pods of any namespace by key; `None` = it is gone."""
    selector, prefix = pool.selector.items(), f"{pool.namespace}/"
    selected = {
        key: pod if pod is not None and selector <= pod.own_labels.items() else None
        for key, pod in pods.items()
        if key.startswith(prefix)
    }
    endpoints.take(selected, pool.ports)


def _labelled(labels: Mapping[str, str]) -> dict[str, str]:
    return {"labelSelector": selector_text(labels)} if labels else {}
