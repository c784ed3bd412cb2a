"""Follow InferenceModels, InferenceObjectives and InferenceModelRewrites, and set the conditions of their status.

Rules
* Of each group of a kind the first installed version is followed. Of objects with one name that of the first group
  counts. A kind that is not installed defines nothing; it is looked for again every `REDISCOVER_S`.
* Definitions are reported all together, after every installed kind was listed, and only if they changed.
* If InferenceModels may not be listed, there are none: the reference's chart grants no right to them, and the older CRD
  may still be installed. The same is true of a kind's second group.
* An object that was accepted is told when its last pool is deleted. One that was not may be for another scheduler.
* While a kind cannot be reached, its known objects stay. If it is uninstalled, its objects are removed.
"""

import asyncio
from collections.abc import Callable, Mapping
from time import perf_counter

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from fairlead.core.models import ModelSet
from fairlead.pool.aio import cancelled
from fairlead.pool.kube.client import KubeClient, KubeError, Resource, Unreachable
from fairlead.pool.kube.objects import read_plain
from fairlead.pool.kube.reflector import Backoff, Reflector
from fairlead.pool.kube.status import Condition, DesiredCondition, StatusWriter, Target
from fairlead.pool.model_kinds import (
    KINDS,
    SERVED,
    ModelObject,
    conditions,
    model_set,
    read_model_object,
    without_pools,
)

REDISCOVER_S = 30.0
#: Changes within this many seconds are reported together, and within this many times what the last report took: each
#: condition that is written is a change, too, and a report of thousands of objects takes long.
_GATHER_S, _GATHER_TIMES, _LONGEST_GATHER_S = 0.01, 10.0, 5.0


class _Names(msgspec.Struct):
    name: str = ""


class _Discovered(msgspec.Struct):
    resources: list[_Names] | None = None


class _Followed(Struct, eq=False):
    """The receiver of a pool's definitions, and the definitions reported last; `None` = none reported yet."""

    feed: Callable[[ModelSet], object]
    models: ModelSet | None = None


class PoolModels:
    """Follows the definitions for pools of a namespace (empty = all). `await run()` never returns."""

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        writer: StatusWriter,
        *,
        on_trouble: Callable[[str, str], object] = lambda resource, trouble: None,
        report: Callable[[str], object] = lambda problem: None,
        absent: Callable[[str, str], bool] = lambda namespace, pool: False,
        pool_group: str = "",
        rediscover_s: float = REDISCOVER_S,
    ) -> None:
        """`absent(namespace, pool)`: whether it is known that there is no such pool of the API group `pool_group`."""
        self._reflectors: dict[str, Reflector[ModelObject]] = {}
        self._client = client
        self._pools: dict[tuple[str, str], _Followed] = {}
        self._namespace = namespace
        self._writer = writer
        self._on_trouble = on_trouble
        self._report = report
        self._absent, self._pool_group = absent, pool_group
        self._rediscover_s = rediscover_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        #: Seconds that the last report took.
        self._took = 0.0
        self._discovered = False

    @property
    def reflectors(self) -> Mapping[str, Reflector[ModelObject]]:
        """The reflectors by name, without those that may not list their kind and need not."""
        return {name: reflector for name, reflector in self._reflectors.items() if not _left_out(name, reflector)}

    @property
    def missing(self) -> str:
        """What is not known yet, in words; empty = nothing is missing."""
        complete = all(followed.models is not None for followed in self._pools.values())
        return "" if complete else "the definitions of models were not listed yet"

    @property
    def refused(self) -> bool:
        """Whether the API server does not allow (403) reading a kind that is needed."""
        return any(reflector.forbidden for reflector in self.reflectors.values())

    @property
    def _known(self) -> bool:
        return self._discovered and all(reflector.ready.is_set() for reflector in self.reflectors.values())

    def follow(self, namespace: str, pool: str, feed: Callable[[ModelSet], object]) -> None:
        """Call `feed(models)` for each change of the definitions for this pool."""
        self._pools[namespace, pool] = _Followed(feed)
        self.look_again()

    def leave(self, namespace: str, pool: str) -> None:
        self._pools.pop((namespace, pool), None)
        self.look_again()

    async def run(self) -> None:
        backoff = Backoff(self._client.rng)
        try:
            while True:
                try:
                    await self._discover()
                    backoff.reset()
                    pause = self._rediscover_s
                except (KubeError, Unreachable) as error:
                    self._on_trouble("discovery", str(error))
                    pause = backoff.pause(error.after if isinstance(error, Unreachable) else 0.0)
                await asyncio.sleep(pause)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for name in list(self._tasks):
                await self._unfollow(name)

    async def _discover(self) -> None:
        """Follow the kinds that are installed. Raises `KubeError` and `Unreachable`."""
        installed: dict[tuple[str, str], set[str]] = {}
        for served in SERVED.values():
            for group, version in served:
                if (group, version) not in installed:
                    installed[group, version] = await self._resources(group, version)
        self._on_trouble("discovery", "")
        wanted = self._wanted(installed)
        for name in dict.fromkeys((*wanted, *self._reflectors)):
            resource, followed = wanted.get(name), self._reflectors.get(name)
            if resource != (followed.resource if followed else None):
                await self._unfollow(name)
                self._on_trouble(name, "")
                if resource is not None:
                    self._follow(name, resource)
                self.look_again()
        self._discovered = True
        self.look_again()

    def _wanted(self, installed: Mapping[tuple[str, str], set[str]]) -> dict[str, Resource]:
        """What to follow, by name: of a kind's second group `plural.group`."""
        wanted: dict[str, Resource] = {}
        for plural, served in SERVED.items():
            groups: dict[str, str] = {}
            for group, version in served:
                if plural in installed[group, version]:
                    groups.setdefault(group, version)
            for group, version in groups.items():
                name = f"{plural}.{group}" if plural in wanted else plural
                wanted[name] = Resource(group, version, plural, self._namespace)
        return wanted

    async def _resources(self, group: str, version: str) -> set[str]:
        answer = await self._client.probe(f"/apis/{group}/{version}")
        if answer is None:
            return set()
        try:
            return {resource.name for resource in msgspec.json.decode(answer, type=_Discovered).resources or ()}
        except msgspec.DecodeError as error:
            raise Unreachable(f"what {group}/{version} serves cannot be read: {error}") from None

    def _follow(self, name: str, resource: Resource) -> None:
        kind = KINDS[resource.plural]
        version = f"{resource.group}/{resource.version}"

        def troubled(trouble: str) -> None:
            self._on_trouble(name, trouble)
            self.look_again()

        def read(raw: Raw) -> ModelObject:
            return read_model_object(read_plain(raw), kind, version, len(raw))

        reflector = Reflector(
            self._client,
            resource,
            read,
            lambda changes: self.look_again(),
            synced=self.look_again,
            on_trouble=troubled,
            report=self._report,
        )
        self._reflectors[name] = reflector
        self._tasks[name] = asyncio.create_task(reflector.run(), name=name)

    async def _unfollow(self, name: str) -> None:
        self._reflectors.pop(name, None)
        await cancelled(self._tasks.pop(name, None))

    def look_again(self) -> None:
        """Look at all definitions soon, because they or the pools changed."""
        if self._timer is None:
            pause = min(max(_GATHER_S, _GATHER_TIMES * self._took), _LONGEST_GATHER_S)
            self._timer = asyncio.get_running_loop().call_later(pause, self._gather)

    def _gather(self) -> None:
        self._timer = None
        if not self._known:
            return
        began = perf_counter()
        desired: dict[Target, DesiredCondition] = {}
        changed: list[tuple[_Followed, ModelSet]] = []
        of = self._by_name()
        by_pool = self._by_pool(of)
        for (namespace, pool), followed in self._pools.items():
            objects = by_pool[namespace, pool]
            given = {} if self._absent(namespace, pool) else conditions(objects, pool, namespace)
            for target, condition in given.items():
                *replaced, (resource, item) = of[target]
                name = target[1].partition("/")[2]
                desired[resource, name] = DesiredCondition(condition, item.item)
                superseded = Condition(
                    False, "Superseded", f"{resource.group} has an object of this name, which counts"
                )
                desired.update({(former, name): DesiredCondition(superseded, item.item) for former, item in replaced})
            models = model_set(objects, pool, namespace)
            if models != followed.models:
                changed.append((followed, models))
        self._writer.want({**self._without_pools(of), **desired})
        for followed, models in changed:
            followed.models = models
            followed.feed(models)
        self._took = perf_counter() - began

    def _without_pools(
        self, of: Mapping[tuple[str, str], list[tuple[Resource, ModelObject]]]
    ) -> dict[Target, DesiredCondition]:
        """The conditions for accepted objects none of whose pools exists."""
        desired: dict[Target, DesiredCondition] = {}
        for (_, key), versions in of.items():
            resource, item = versions[-1]
            if item.pools and all(self._absent(resource.namespace, pool) for pool in item.pools):
                condition = without_pools(item, self._pool_group)
                if condition is not None:
                    desired[resource, key.partition("/")[2]] = DesiredCondition(condition, item.item)
        return desired

    def _by_name(self) -> dict[tuple[str, str], list[tuple[Resource, ModelObject]]]:
        """The objects by plural and key; that of the first group, which counts, is the last."""
        of: dict[tuple[str, str], list[tuple[Resource, ModelObject]]] = {}
        for _, reflector in sorted(self._reflectors.items(), reverse=True):
            plural = reflector.resource.plural
            namespaces = {key.partition("/")[0] for key in reflector.items}
            resources = {namespace: replace(reflector.resource, namespace=namespace) for namespace in namespaces}
            for key, item in reflector.items.items():
                of.setdefault((plural, key), []).append((resources[key.partition("/")[0]], item))
        return of

    def _by_pool(
        self, of: Mapping[tuple[str, str], list[tuple[Resource, ModelObject]]]
    ) -> dict[tuple[str, str], dict[str, dict[str, ModelObject]]]:
        """The objects that may be for a followed pool, by the pool's namespace and name, plural and key."""
        by_pool: dict[tuple[str, str], dict[str, dict[str, ModelObject]]] = {pool: {} for pool in self._pools}
        for (plural, key), versions in of.items():
            resource, item = versions[-1]
            for pool in item.pools or [name for namespace, name in by_pool if namespace == resource.namespace]:
                if (resource.namespace, pool) in by_pool:
                    by_pool[resource.namespace, pool].setdefault(plural, {})[key] = item
        return by_pool


def _left_out(name: str, reflector: Reflector[ModelObject]) -> bool:
    needless = name == "inferencemodels" or name != reflector.resource.plural
    return needless and reflector.forbidden and not reflector.ready.is_set()
