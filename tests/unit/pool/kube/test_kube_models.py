"""Definitions of models from an API server, and the conditions they get."""

import asyncio
from itertools import count, pairwise
from typing import Any

import pytest
from fake_kube import GROUPS, FakeKube

from fairlead.core.models import ModelSet
from fairlead.pool.kube.client import KubeClient, Resource, Unreachable
from fairlead.pool.kube.models import PoolModels
from fairlead.pool.kube.status import Condition, DesiredCondition, StatusWriter
from fairlead.pool.model_kinds import conditions
from fairlead.server.observe.component_metrics import KubeMetrics
from fairlead.server.observe.exposition import Registry

X = "inference.networking.x-k8s.io/v1alpha2"
LLMD = "llm-d.ai/v1alpha2"


def model(name: str, model_name: str, pool: str = "llama", **spec: Any) -> Any:
    value = {"modelName": model_name, "poolRef": {"name": pool}, **spec}
    return {"metadata": {"name": name, "namespace": "default"}, "spec": value}


def rewrite(name: str, target: str) -> Any:
    rules = [{"targets": [{"modelRewrite": target}]}]
    return {"metadata": {"name": name, "namespace": "default"}, "spec": {"poolRef": {"name": "llama"}, "rules": rules}}


def objective(name: str, priority: int) -> Any:
    spec = {"priority": priority, "poolRef": {"name": "llama"}}
    return {"metadata": {"name": name, "namespace": "default"}, "spec": spec}


class Followed:
    def __init__(self, client: KubeClient) -> None:
        self.leads = True
        self.sets: list[ModelSet] = []
        self.troubles: list[str] = []
        self.present: dict[str, str] = {}
        self.writer = StatusWriter(client, lambda: self.leads, self.troubles.append)
        self.models = PoolModels(
            client,
            "default",
            self.writer,
            rediscover_s=0.05,
            on_trouble=self.note,
        )
        self.models.follow("default", "llama", self.sets.append)

    def note(self, resource: str, trouble: str) -> None:
        self.present.pop(resource, None)
        if trouble:
            self.present[resource] = trouble
            self.troubles.append(trouble)


@pytest.fixture
async def followed(client: KubeClient, tasks: Any) -> Followed:
    made = Followed(client)
    tasks(made.models.run())
    tasks(made.writer.run())
    return made


def condition(kube: FakeKube, version: str, plural: str, name: str) -> tuple[str, str] | None:
    found = kube.objects[version, plural][f"default/{name}"].get("status", {}).get("conditions", [])
    return next(((one["status"], one["reason"]) for one in found if one["type"] == "Accepted"), None)


async def test_nothing_defined_is_known_too(followed: Followed, until: Any) -> None:
    await until(lambda: followed.sets)
    assert followed.sets == [ModelSet()]
    assert not followed.models.missing


async def test_the_older_group_may_be_out_of_reach(kube: FakeKube, client: KubeClient, tasks: Any, until: Any) -> None:
    kube.put(LLMD, "inferenceobjectives", objective("urgent", 2))
    kube.forbidden |= {("list", f"{plural}.{X.partition('/')[0]}") for plural in GROUPS[X]}
    followed = Followed(client)
    tasks(followed.models.run())
    await until(lambda: followed.sets)
    assert [one.priority for one in followed.sets[-1].objectives] == [2]
    assert followed.troubles and not followed.models.missing
    metrics = KubeMetrics(Registry())
    metrics.follow(lambda: followed.models.reflectors)
    await until(lambda: not metrics.trouble())


async def test_a_kind_that_is_uninstalled_is_no_trouble(kube: FakeKube, followed: Followed, until: Any) -> None:
    kube.forbidden.add(("list", "inferenceobjectives"))
    await until(lambda: "inferenceobjectives" in followed.present)
    kube.groups = {version: plurals for version, plurals in GROUPS.items() if version not in (LLMD, X)}
    await until(lambda: not followed.present)


@pytest.mark.parametrize("plural", ["inferencemodels", "inferenceobjectives"])
async def test_the_older_models_may_be_out_of_reach_and_nothing_else(
    kube: FakeKube, client: KubeClient, tasks: Any, until: Any, plural: str
) -> None:
    kube.forbidden.add(("list", plural))
    followed = Followed(client)
    tasks(followed.models.run())
    await until(lambda: followed.troubles)
    seen = len(kube.requests)
    await until(lambda: len(kube.requests) >= seen + 20)  # looked for again and again
    assert followed.sets == ([ModelSet()] if plural == "inferencemodels" else [])
    assert bool(followed.models.missing) == (plural != "inferencemodels")


async def test_definitions_come_change_and_go(kube: FakeKube, followed: Followed, until: Any) -> None:
    kube.put(X, "inferencemodels", model("chat", "chat", criticality="Critical"))
    kube.put(LLMD, "inferenceobjectives", objective("urgent", 7))
    kube.put(LLMD, "inferencemodelrewrites", rewrite("all", "llama-3"))
    await until(lambda: followed.sets and followed.sets[-1].rewrites and followed.sets[-1].models)
    assert [one.criticality for one in followed.sets[-1].models] == ["Critical"]
    assert [one.priority for one in followed.sets[-1].objectives] == [7]
    kube.put(X, "inferencemodels", model("chat", "chat", criticality="Sheddable"))
    await until(lambda: followed.sets[-1].models[0].criticality == "Sheddable")
    kube.drop(X, "inferencemodels", "chat")
    await until(lambda: not followed.sets[-1].models)


async def test_what_is_for_other_pools_is_theirs(kube: FakeKube, followed: Followed, until: Any) -> None:
    kube.put(X, "inferencemodels", model("ours", "a"))
    kube.put(X, "inferencemodels", model("theirs", "b", pool="other"))
    await until(lambda: condition(kube, X, "inferencemodels", "ours"))
    assert [one.model for one in followed.sets[-1].models] == ["a"]
    assert condition(kube, X, "inferencemodels", "theirs") is None


async def test_each_pool_is_given_its_own_objects_only(
    kube: FakeKube, followed: Followed, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking through all objects for each pool took the event loop 0.4 s with 50 pools and 1,000 objects."""
    given: dict[str, list[str]] = {}

    def noted(objects: Any, pool: str, namespace: str) -> Any:
        given[pool] = sorted(key.partition("/")[2] for table in objects.values() for key in table)
        return conditions(objects, pool, namespace)

    monkeypatch.setattr("fairlead.pool.kube.models.conditions", noted)
    sets: list[ModelSet] = []
    followed.models.follow("default", "other", sets.append)
    kube.put(X, "inferencemodels", model("ours", "a"))
    kube.put(X, "inferencemodels", model("theirs", "b", pool="other"))
    kube.put(X, "inferencemodels", model("broken", "", pool="other"))
    kube.put(X, "inferenceobjectives", objective("moved", 1))
    moved = objective("moved", 2)
    moved["spec"]["poolRef"]["name"] = "other"
    kube.put(LLMD, "inferenceobjectives", moved)
    kube.put(LLMD, "inferenceobjectives", {**objective("all", 3), "spec": {"priority": 3, "poolSelector": {"a": "b"}}})
    await until(lambda: given == {"llama": ["all", "ours"], "other": ["all", "broken", "moved", "theirs"]})
    await until(lambda: sorted(item.priority for item in sets[-1].objectives) == [2, 3])
    await until(lambda: [item.priority for item in followed.sets[-1].objectives] == [3])


@pytest.mark.parametrize(("seconds", "pause"), [(0.25, 2.5), (60.0, 5.0)])
async def test_reports_that_take_long_are_few(
    kube: FakeKube, followed: Followed, until: Any, monkeypatch: pytest.MonkeyPatch, seconds: float, pause: float
) -> None:
    """Each condition that is written is a change."""
    loop, pauses = asyncio.get_running_loop(), list[float]()
    call_later = loop.call_later

    def later(seconds: float, call: Any, *arguments: Any) -> asyncio.TimerHandle:
        pauses.append(seconds)
        return call_later(0.0, call, *arguments)

    monkeypatch.setattr("fairlead.pool.kube.models.perf_counter", count(0.0, seconds).__next__)
    monkeypatch.setattr(loop, "call_later", later)
    await until(lambda: pause in pauses)


async def test_conditions_say_who_has_the_name(kube: FakeKube, followed: Followed, until: Any) -> None:
    kube.put(X, "inferencemodels", model("older", "chat"))
    kube.put(X, "inferencemodels", model("newer", "chat"))
    kube.put(X, "inferencemodels", model("broken", "", targetModels=[{"name": "x"}]))
    await until(lambda: condition(kube, X, "inferencemodels", "newer") == ("False", "ModelNameInUse"))
    await until(lambda: condition(kube, X, "inferencemodels", "older") == ("True", "Accepted"))
    await until(lambda: condition(kube, X, "inferencemodels", "broken") == ("False", "Invalid"))
    kube.drop(X, "inferencemodels", "older")
    await until(lambda: condition(kube, X, "inferencemodels", "newer") == ("True", "Accepted"))
    assert [one.model for one in followed.sets[-1].models] == ["chat"]


async def test_a_rewrite_that_decides_nothing_says_which_one_does(
    kube: FakeKube, followed: Followed, until: Any
) -> None:
    kube.put(LLMD, "inferencemodelrewrites", rewrite("older", "llama-3"))
    kube.put(LLMD, "inferencemodelrewrites", rewrite("newer", "llama-4"))

    def said(name: str) -> str:
        found = kube.objects[LLMD, "inferencemodelrewrites"][f"default/{name}"].get("status", {}).get("conditions", [])
        return "".join(one["message"] for one in found if one["type"] == "Accepted")

    await until(lambda: said("older") == "in use")
    await until(lambda: said("newer") == "in use; the older default/older decides for all other models")
    kube.drop(LLMD, "inferencemodelrewrites", "older")
    await until(lambda: said("newer") == "in use")


async def test_conditions_of_others_stay_and_ours_is_written_once(
    kube: FakeKube, followed: Followed, until: Any
) -> None:
    ready = {"type": "Ready", "status": "Unknown", "reason": "Pending"}
    kube.put(X, "inferencemodels", {**model("chat", "chat"), "status": {"conditions": [ready]}})
    await until(lambda: condition(kube, X, "inferencemodels", "chat") == ("True", "Accepted"))
    kube.put(LLMD, "inferencemodelrewrites", rewrite("all", "llama-3"))
    await until(lambda: condition(kube, LLMD, "inferencemodelrewrites", "all"))
    await until(lambda: followed.sets[-1].rewrites)
    assert ready in kube.objects[X, "inferencemodels"]["default/chat"]["status"]["conditions"]
    await until(lambda: followed.writer.writes == 2)  # the answer comes after the deed
    assert len([one for one in kube.requests if one[0] == "PATCH"]) == 2


async def test_only_the_leader_writes(kube: FakeKube, followed: Followed, until: Any) -> None:
    followed.leads = False
    kube.put(X, "inferencemodels", model("chat", "chat"))
    await until(lambda: followed.sets and followed.sets[-1].models)
    assert condition(kube, X, "inferencemodels", "chat") is None
    followed.leads = True
    followed.writer.wake()
    await until(lambda: condition(kube, X, "inferencemodels", "chat"))


async def test_a_fight_over_a_status_slows_down(
    kube: FakeKube, client: KubeClient, followed: Followed, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[float] = []
    patch = client.patch

    async def timed(*arguments: Any) -> Any:
        written.append(asyncio.get_running_loop().time())
        return await patch(*arguments)

    monkeypatch.setattr(client, "patch", timed)
    kube.put(X, "inferencemodels", model("chat", "chat"))
    for _ in range(3):
        await until(lambda: condition(kube, X, "inferencemodels", "chat"))
        kube.put(X, "inferencemodels", model("chat", "chat"))  # somebody takes it away again
    await until(lambda: len(written) == 4)
    pauses = [later - earlier for earlier, later in pairwise(written)]
    assert all(pause >= least for pause, least in zip(pauses, (0.49, 0.49, 0.99), strict=True))


async def test_missing_permission_is_told_and_routing_goes_on(kube: FakeKube, followed: Followed, until: Any) -> None:
    kube.forbidden.add(("patch", "inferencemodels/status"))
    kube.put(X, "inferencemodels", model("chat", "chat"))
    await until(lambda: any('resources: ["inferencemodels/status"]' in one for one in followed.troubles))
    assert followed.sets[-1].models


async def test_a_webhook_that_refuses_is_quoted(kube: FakeKube, followed: Followed, until: Any) -> None:
    """Another rule in the role would not help."""
    kube.why_forbidden = 'admission webhook "policy" denied the request: not on Fridays'
    kube.forbidden.add(("patch", "inferencemodels/status"))
    kube.put(X, "inferencemodels", model("chat", "chat"))
    await until(lambda: followed.troubles)
    assert followed.troubles == [f"no status is written: {kube.why_forbidden}"]


async def test_what_may_not_be_written_does_not_hold_up_others(kube: FakeKube, followed: Followed, until: Any) -> None:
    """A role may allow one kind, and an admission webhook may refuse one object."""
    kube.forbidden.add(("patch", "inferenceobjectives/status"))
    for number in range(3):
        kube.put(LLMD, "inferenceobjectives", objective(f"o{number}", number))
    kube.put(X, "inferencemodels", model("chat", "chat"))
    kube.put(LLMD, "inferencemodelrewrites", rewrite("all", "llama-3"))
    await until(lambda: condition(kube, X, "inferencemodels", "chat"))
    await until(lambda: condition(kube, LLMD, "inferencemodelrewrites", "all"))
    await until(lambda: followed.troubles)
    assert len(followed.troubles) == 1, "it is reported once"
    assert sum(path.endswith("/status") for _, path in kube.requests) <= 3 + 2


async def test_of_one_name_in_both_groups_the_newer_counts(kube: FakeKube, followed: Followed, until: Any) -> None:
    kube.put(X, "inferenceobjectives", objective("urgent", 1))
    kube.put(X, "inferenceobjectives", objective("older", 3))
    kube.put(LLMD, "inferenceobjectives", objective("urgent", 2))
    await until(lambda: condition(kube, X, "inferenceobjectives", "urgent") == ("False", "Superseded"))
    assert {one.origin.name: one.priority for one in followed.sets[-1].objectives} == {"urgent": 2, "older": 3}
    await until(lambda: condition(kube, X, "inferenceobjectives", "older") == ("True", "Accepted"))
    await until(lambda: condition(kube, LLMD, "inferenceobjectives", "urgent") == ("True", "Accepted"))
    kube.drop(LLMD, "inferenceobjectives", "urgent")
    await until(lambda: condition(kube, X, "inferenceobjectives", "urgent") == ("True", "Accepted"))
    assert {one.origin.name: one.priority for one in followed.sets[-1].objectives} == {"urgent": 1, "older": 3}


async def test_objects_stay_when_the_newer_group_is_installed(kube: FakeKube, followed: Followed, until: Any) -> None:
    kube.groups = {version: plurals for version, plurals in GROUPS.items() if version != LLMD}
    kube.put(X, "inferenceobjectives", objective("older", 3))
    await until(lambda: followed.sets and followed.sets[-1].objectives)
    kube.forbidden.add(("list", "inferenceobjectives"))
    kube.groups = dict(GROUPS)
    await until(lambda: followed.troubles)
    assert not followed.models.missing, "requests are served as before"
    kube.forbidden.clear()
    kube.put(LLMD, "inferenceobjectives", objective("urgent", 2))
    await until(lambda: len(followed.sets[-1].objectives) == 2)
    assert all(known.objectives for known in followed.sets[1:]), "none was forgotten meanwhile"


async def test_kinds_may_be_installed_later(kube: FakeKube, followed: Followed, until: Any) -> None:
    kube.groups = {version: plurals for version, plurals in GROUPS.items() if version not in (LLMD, X)}
    await until(lambda: followed.sets)
    kube.groups = dict(GROUPS)
    kube.put(LLMD, "inferenceobjectives", objective("urgent", 2))
    await until(lambda: followed.sets[-1].objectives)
    kube.groups = {version: plurals for version, plurals in GROUPS.items() if version != LLMD}
    kube.put(X, "inferenceobjectives", objective("urgent", 1))
    await until(lambda: [one.priority for one in followed.sets[-1].objectives] == [1])


async def test_an_end_that_comes_with_a_wake_up_is_not_lost(
    kube: FakeKube, client: KubeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`asyncio.wait_for` of Python 3.11 returns the result then, and the task goes on for ever."""

    async def unreachable(*_: object) -> Any:
        await asyncio.sleep(0)
        raise Unreachable("on purpose")  # so that it is tried again later

    monkeypatch.setattr(client, "patch", unreachable)
    writer = StatusWriter(client, lambda: True, lambda trouble: None)
    item = kube.put(X, "inferencemodels", model("chat", "chat"))
    resource = Resource(*X.split("/"), "inferencemodels", "default")
    writer.want({(resource, "chat"): DesiredCondition(Condition(True, "Accepted", "fine"), item)})
    for turns in range(6):
        task = asyncio.create_task(writer.run())
        for _ in range(4):
            await asyncio.sleep(0)
        writer.wake()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=10)
        assert done
