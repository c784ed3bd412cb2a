"""A reflector is right again after whatever happens to the API server."""

from random import Random
from typing import Any

import pytest
from fake_kube import FakeKube

from fairlead.pool.kube.client import KubeClient, Resource
from fairlead.pool.kube.pods import Pod, read_pod
from fairlead.pool.kube.reflector import PAGE, Reflector

PODS = Resource("", "v1", "pods", "default")


class Seen:
    """A reflector of pods and what it told."""

    def __init__(self, client: KubeClient, **more: Any) -> None:
        self.on_trouble: list[tuple[str, Pod | None]] = []
        self.troubles: list[str] = []
        self.problems: list[str] = []
        self.reflector = Reflector(
            client,
            PODS,
            read_pod,
            lambda pods: self.on_trouble.extend(pods.items()),
            on_trouble=self.troubles.append,
            report=self.problems.append,
            **more,
        )

    @property
    def names(self) -> list[str]:
        return sorted(key.partition("/")[2] for key in self.reflector.items)

    def news(self) -> list[tuple[str, bool]]:
        """(name, is it there) of everything told since last asked."""
        told, self.on_trouble = self.on_trouble, []
        return [(key.partition("/")[2], pod is not None) for key, pod in told]


@pytest.fixture
def seen(client: KubeClient) -> Seen:
    return Seen(client)


async def test_lists_then_follows_changes(kube: FakeKube, seen: Seen, pod: Any, tasks: Any, until: Any) -> None:
    kube.put("v1", "pods", pod("a"))
    tasks(seen.reflector.run())
    await until(lambda: seen.reflector.ready.is_set())
    assert seen.news() == [("a", True)]
    kube.put("v1", "pods", pod("b"))
    await until(lambda: seen.names == ["a", "b"])
    kube.put("v1", "pods", pod("a", ready=False))
    kube.drop("v1", "pods", "b")
    await until(lambda: seen.names == ["a"])
    assert seen.news() == [("b", True), ("a", True), ("b", False)]
    assert seen.troubles == [""]


async def test_pages_are_joined(kube: FakeKube, seen: Seen, pod: Any, tasks: Any, until: Any) -> None:
    for i in range(2 * PAGE + 3):
        kube.put("v1", "pods", pod(f"p{i:04d}"))
    tasks(seen.reflector.run())
    await until(lambda: seen.reflector.ready.is_set())
    assert len(seen.names) == 2 * PAGE + 3
    assert sum(method == "GET" for method, _ in kube.requests) >= 3


async def test_what_was_deleted_behind_its_back_is_told(
    kube: FakeKube, seen: Seen, pod: Any, tasks: Any, until: Any
) -> None:
    for i in range(20):
        kube.put("v1", "pods", pod(f"p{i:02d}"))
    tasks(seen.reflector.run())
    await until(lambda: seen.reflector.ready.is_set())
    seen.news()
    await kube.stop()
    await until(lambda: not seen.reflector.stats.connected)
    for i in range(10):
        kube.drop("v1", "pods", f"p{i:02d}")
    kube.put("v1", "pods", pod("p15", "10.9.9.9"))
    kube.put("v1", "pods", pod("new"))
    kube.compact()
    assert len(seen.names) == 20  # the last known state stays
    await kube.start()
    await until(lambda: len(seen.names) == 11)
    gone = [(f"p{i:02d}", False) for i in range(10)]
    assert sorted(seen.news()) == sorted([*gone, ("p15", True), ("new", True)])  # and nothing else moved
    assert seen.reflector.stats.lists == 2
    assert seen.troubles[-1] == ""


async def test_watch_ended_by_the_server_goes_on_where_it_was(
    kube: FakeKube, seen: Seen, pod: Any, tasks: Any, until: Any
) -> None:
    kube.put("v1", "pods", pod("a"))
    tasks(seen.reflector.run())
    await until(lambda: seen.reflector.stats.watches == 1 and seen.reflector.stats.connected)
    await until(lambda: kube.requests[-1][0] == "GET" and kube.watching == 1)
    kube.cut()
    kube.put("v1", "pods", pod("b"))
    await until(lambda: seen.names == ["a", "b"])
    assert seen.reflector.stats.lists == 1
    assert seen.reflector.stats.watches >= 2


async def test_an_old_version_is_not_tried_twice(kube: FakeKube, seen: Seen, pod: Any, tasks: Any, until: Any) -> None:
    kube.put("v1", "pods", pod("a"))
    tasks(seen.reflector.run())
    await until(lambda: kube.watching == 1)
    kube.put("coordination.k8s.io/v1", "leases", {"metadata": {"name": "x"}})  # moves the version on
    kube.compact()
    kube.cut()
    await until(lambda: seen.reflector.stats.lists == 2 and kube.watching == 1)
    assert seen.reflector.stats.watches == 3
    assert seen.news() == [("a", True)]


async def test_bookmarks_save_the_relist(
    seen: Seen, client: KubeClient, kube: FakeKube, pod: Any, tasks: Any, until: Any
) -> None:
    kube.bookmark_s = 0.01
    kube.put("v1", "pods", pod("a"))
    tasks(seen.reflector.run())
    await until(lambda: kube.watching == 1)
    kube.put("coordination.k8s.io/v1", "leases", {"metadata": {"name": "x"}})
    sent = kube.bookmarks
    await until(lambda: kube.bookmarks > sent + 1)  # one of them has the new version
    kube.compact()
    kube.cut()
    await until(lambda: seen.reflector.stats.watches >= 2 and kube.watching == 1)
    assert seen.reflector.stats.lists == 1


async def test_an_unreadable_object_keeps_what_was_known(
    kube: FakeKube, seen: Seen, pod: Any, tasks: Any, until: Any
) -> None:
    kube.put("v1", "pods", pod("a"))
    tasks(seen.reflector.run())
    await until(lambda: kube.watching == 1)
    broken = pod("a")
    broken["status"]["podIP"] = 17
    kube.put("v1", "pods", broken)
    kube.put("v1", "pods", pod("b"))
    await until(lambda: seen.names == ["a", "b"])
    assert seen.reflector.items["default/a"].serves
    assert len(seen.problems) == 1 and "default/a" in seen.problems[0]
    kube.compact()
    kube.cut()
    await until(lambda: seen.reflector.stats.lists >= 1 and kube.watching == 1)
    assert seen.reflector.items["default/a"].serves


async def test_what_is_not_allowed_names_the_rule_to_add(kube: FakeKube, seen: Seen, tasks: Any, until: Any) -> None:
    kube.forbidden.add(("list", "pods"))
    tasks(seen.reflector.run())
    await until(lambda: seen.troubles)
    assert seen.troubles == [
        "not allowed to list pods in namespace default; add to the role: "
        '- {apiGroups: [""], resources: ["pods"], verbs: ["list"]}'
    ]
    assert not seen.reflector.ready.is_set()


async def test_a_watch_that_is_not_allowed_says_so_too(kube: FakeKube, seen: Seen, tasks: Any, until: Any) -> None:
    kube.forbidden.add(("watch", "pods"))
    tasks(seen.reflector.run())
    await until(lambda: any('verbs: ["watch"]' in trouble for trouble in seen.troubles))
    assert seen.reflector.stats.lists < 3  # no spinning


async def test_lists_do_not_end_the_trouble_with_a_watch_that_is_refused(
    kube: FakeKube, client: KubeClient, pod: Any, tasks: Any, until: Any
) -> None:
    class NoPause(Random):
        def uniform(self, a: float, b: float) -> float:
            return 0.0

    client.rng = NoPause()
    seen = Seen(client)
    kube.forbidden.add(("watch", "pods"))
    tasks(seen.reflector.run())
    await until(lambda: seen.reflector.stats.lists > 4)
    first, trouble = seen.troubles
    assert (first, seen.reflector.stats.trouble) == ("", trouble) and 'verbs: ["watch"]' in trouble
    kube.put("v1", "pods", pod("a"))
    await until(lambda: seen.names == ["a"])
    kube.forbidden.clear()
    await until(lambda: seen.troubles == ["", trouble, ""])
    assert not seen.reflector.stats.trouble


async def test_a_broken_consumer_stops_nothing(
    client: KubeClient, kube: FakeKube, pod: Any, tasks: Any, until: Any
) -> None:
    import asyncio

    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))

    def broken(changes: Any) -> None:
        raise RuntimeError

    reflector = Reflector(client, PODS, read_pod, broken)
    kube.put("v1", "pods", pod("a"))
    tasks(reflector.run())
    await until(lambda: kube.watching == 1)
    kube.put("v1", "pods", pod("b"))
    await until(lambda: len(reflector.items) == 2)
    assert len(complaints) == 2


async def test_silence_begins_the_watch_anew(
    client: KubeClient, kube: FakeKube, pod: Any, tasks: Any, until: Any
) -> None:
    seen = Seen(client, idle_s=0.05)
    kube.put("v1", "pods", pod("a"))
    tasks(seen.reflector.run())
    await until(lambda: seen.reflector.stats.watches >= 2)
    assert seen.reflector.stats.lists == 1
    assert seen.names == ["a"]
