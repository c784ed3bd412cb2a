"""An InferencePool and its pods → endpoints that come, change and go.

Rules
* The pool says which pods and which ports. Another selector lists anew and compares; pods that both select stay up.
  Other ports are applied to the pods that are known.
* A pool that is gone takes its endpoints with it. One that cannot be read changes nothing.
* A pod that was replaced by one of the same name is another endpoint: down, then up.
* `EndpointUp` only for what is new or changed, `EndpointDown` only for what is gone, whatever is listed how often.
"""

import asyncio
from collections.abc import Callable
from random import Random

from fairlead.io.kube.client import KubeClient, Resource
from fairlead.io.kube.reflector import Reflector
from fairlead.model.endpoint import Endpoint
from fairlead.model.events import EndpointDown, EndpointUp
from fairlead.wire.kube_pods import Pod, endpoints_of, read_pod
from fairlead.wire.kube_pool import VERSIONS, Pool, read_pool, selector_text

Feed = Callable[[EndpointUp | EndpointDown], object]
Told = Callable[[str, str], object]


class PoolEndpoints:
    """Follows one pool. `told(resource, trouble)` when contact to it is lost or (empty) back; `changed()` after the
    pool or its pods were listed, came or went. `await run()` never returns."""

    def __init__(
        self,
        client: KubeClient,
        pool: Pool,
        group: str,
        feed: Feed,
        rng: Random,
        *,
        told: Told = lambda resource, trouble: None,
        report: Callable[[str], object] = lambda problem: None,
        changed: Callable[[], object] = lambda: None,
    ) -> None:
        """`pool`: where it has a selector it is used as it stands, and no object is looked for; else its name is."""
        #: The pool as it is; `None` = there is none.
        self.pool: Pool | None = pool if pool.selector else None
        self._wanted = pool
        self._client = client
        self._feed = feed
        self._rng = rng
        self._told = told
        self._report = report
        self._changed = changed
        #: The pods of the present pool were listed once.
        self._listed = False
        self._by_pod: dict[str, tuple[str, dict[str, Endpoint]]] = {}
        self._pods: Reflector[Pod] | None = None
        self._pods_task: asyncio.Task[None] | None = None
        self._pools: Reflector[Pool] | None = None
        if not pool.selector:
            self._pools = Reflector(
                client,
                Resource(group, VERSIONS[group], "inferencepools", pool.namespace),
                read_pool,
                self._pool_changed,
                rng,
                query={"fieldSelector": f"metadata.name={pool.name}"},
                synced=changed,
                told=lambda trouble: told("inferencepools", trouble),
                report=report,
            )

    @property
    def reflectors(self) -> dict[str, Reflector[Pod] | Reflector[Pool]]:
        """By resource, those that run."""
        found: dict[str, Reflector[Pod] | Reflector[Pool]] = {}
        if self._pools is not None:
            found["inferencepools"] = self._pools
        if self._pods is not None:
            found["pods"] = self._pods
        return found

    @property
    def missing(self) -> str:
        """What keeps us from knowing the endpoints; empty = nothing."""
        if self._pools is not None and not self._pools.ready.is_set():
            return "the InferencePool was not read yet"
        if self.pool is None:
            return f"there is no InferencePool {self._wanted.namespace}/{self._wanted.name}"
        if not self._listed:
            return "the pods were not listed yet"
        return ""

    @property
    def endpoints(self) -> list[Endpoint]:
        """What is up."""
        return [endpoint for _, found in self._by_pod.values() for endpoint in found.values()]

    async def run(self) -> None:
        try:
            if self._pools is None:
                self._follow_pods(self._wanted)
                await asyncio.Event().wait()
            else:
                await self._pools.run()
        finally:
            await self._stop()

    async def _stop(self) -> None:
        task, self._pods_task = self._pods_task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # ---- the pool ----

    def _pool_changed(self, key: str, pool: Pool | None) -> None:
        old, self.pool = self.pool, pool
        if pool is None:
            self._unfollow()
            self._listed = False
            for pod in list(self._by_pod):
                self._pod_changed(pod, None)
        elif old is None or old.selector != pool.selector:
            self._follow_pods(pool)
        if pool is not None and old is not None and old.ports != pool.ports and self._pods is not None:
            for pod, found in self._pods.items.items():
                self._pod_changed(pod, found)
        self._changed()

    def _unfollow(self) -> None:
        if self._pods_task is not None:
            self._pods_task.cancel()
        self._pods_task = self._pods = None

    def _follow_pods(self, pool: Pool) -> None:
        known = self._pods.items if self._pods is not None else {}
        self._unfollow()
        self._pods = Reflector(
            self._client,
            Resource("", "v1", "pods", pool.namespace),
            read_pod,
            self._pod_changed,
            self._rng,
            query={"labelSelector": selector_text(pool.selector)},
            synced=self._pods_listed,
            told=lambda trouble: self._told("pods", trouble),
            report=self._report,
            items=known,
        )
        self._pods_task = asyncio.create_task(self._pods.run(), name="pods")

    # ---- pods ----

    def _pods_listed(self) -> None:
        self._listed = True
        self._changed()

    def _pod_changed(self, key: str, pod: Pod | None) -> None:
        ports = self.pool.ports if self.pool is not None else ()
        wanted = {one.id: one for one in endpoints_of(pod, ports)} if pod is not None else {}
        uid, known = self._by_pod.get(key, ("", {}))
        replaced = pod is not None and uid != pod.uid
        for endpoint_id in [one for one in known if one not in wanted or replaced]:
            del known[endpoint_id]
            self._emit(EndpointDown(endpoint_id))
        for endpoint in wanted.values():
            if known.get(endpoint.id) != endpoint:
                self._emit(EndpointUp(endpoint))
        if wanted and pod is not None:
            self._by_pod[key] = (pod.uid, wanted)
        else:
            self._by_pod.pop(key, None)

    def _emit(self, event: EndpointUp | EndpointDown) -> None:
        try:
            self._feed(event)
        except Exception as error:  # following goes on after a broken consumer
            context = {"message": f"the consumer of {event!r} raised", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)
