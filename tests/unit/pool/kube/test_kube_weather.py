"""Malformed answers are normal weather: nothing crashes, nothing known is lost, and the next good answer counts."""

import asyncio
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest
from aiohttp import web
from fake_kube import FakeKube

from fairlead.pool.kube import client as kube_client
from fairlead.pool.kube import reflector
from fairlead.pool.kube.auth import Access, FixedSecret, Secret, Where
from fairlead.pool.kube.client import KubeClient, Resource, Unreachable
from fairlead.pool.kube.pods import Pod, read_pod
from fairlead.pool.kube.reflector import Reflector

PODS = Resource("", "v1", "pods", "default")


class Stormy(FakeKube):
    """Sends these bytes in its next watches, one each, and answers these to its next lists, before it behaves."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[bytes] = []
        self.lists: list[bytes] = []

    async def _send(self, response: web.StreamResponse, *more: Any) -> None:
        if self.streams:
            await response.write(self.streams.pop(0))
            return
        await super()._send(response, *more)

    async def _collection(self, request: web.Request, *more: Any) -> web.StreamResponse:
        if self.lists and "watch" not in request.query:
            return web.Response(body=self.lists.pop(0), content_type="application/json")
        return await super()._collection(request, *more)


@pytest.fixture
async def storm() -> AsyncIterator[Stormy]:
    server = Stormy()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def client(storm: Stormy, rng: Random) -> AsyncIterator[KubeClient]:
    made = KubeClient(Access(Where(storm.url), FixedSecret(Secret())), rng)
    yield made
    await made.close()


@pytest.fixture
def followed(storm: Stormy, client: KubeClient, pod: Any) -> Reflector[Pod]:
    storm.put("v1", "pods", pod("a"))
    return Reflector(client, PODS, read_pod, lambda changes: None)


STREAMS = [
    b"nonsense\n",
    b"\xff\xfe\n",
    b"[]\n",
    b"{}\n",
    b'{"type":"ADDED"}\n',
    b'{"type":"ADDED","object":7}\n',
    b'{"type":"ADDED","object":{"metadata":{"name":7}}}\n',
    b'{"type":"ADDED","object":{"metadata":{"name":"half',
    b'{"type":"ERROR","object":{"code":500,"message":"etcd"}}\n',
    b'{"type":"ERROR","object":"?"}\n',
    b'{"type":"SOMETHING","object":{"metadata":{"name":"x","resourceVersion":"1"}}}\n',
    b"\n\n\r\n",
    b"{" * 200_000 + b"\n",
]


@pytest.mark.parametrize("stream", STREAMS, ids=range(len(STREAMS)))
async def test_a_stream_of_nonsense(
    storm: Stormy, followed: Reflector[Pod], stream: bytes, tasks: Any, until: Any, pod: Any
) -> None:
    storm.streams = [stream]
    task = tasks(followed.run())
    await until(lambda: not storm.streams)
    storm.put("v1", "pods", pod("b"))
    await until(lambda: {"default/a", "default/b"} <= {*followed.items})
    assert not task.done()


@pytest.mark.parametrize("page", [b"", b"null", b"[]", b"{}", b'{"items":7}', b'{"metadata":{}}', b"\x00" * 100])
async def test_a_list_of_nonsense(storm: Stormy, followed: Reflector[Pod], page: bytes, tasks: Any, until: Any) -> None:
    storm.lists = [page, page]
    tasks(followed.run())
    await until(lambda: followed.ready.is_set())
    assert [*followed.items] == ["default/a"]
    assert followed.stats.failures == 2


async def test_items_that_are_none_delete_nothing(
    storm: Stormy, followed: Reflector[Pod], tasks: Any, until: Any
) -> None:
    tasks(followed.run())
    await until(lambda: storm.watching == 1)
    storm.lists = [b'{"metadata":{"resourceVersion":"200"},"items":[7]}']
    storm.streams = [b"nonsense\n"]
    storm.cut()
    await until(lambda: not storm.lists and not storm.streams)
    assert [*followed.items] == ["default/a"]


async def test_an_object_without_end_is_given_up(
    storm: Stormy, client: KubeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_client, "MAX_LINE", 100_000)
    storm.streams = [b"x" * 300_000]
    with pytest.raises(Unreachable, match="larger than"):
        async for _ in client.watch(PODS, {"resourceVersion": "1"}, 5.0):
            pass


async def test_a_long_object_in_many_pieces_is_read_once(storm: Stormy, client: KubeClient) -> None:
    storm.streams = [b"y" * 1_500_000 + b"\nz\n"]
    lines: list[bytes] = []
    async with asyncio.timeout(20):
        async for batch in client.watch(PODS, {"resourceVersion": "1"}, 5.0):
            lines += [line for line in batch if line]
    assert [len(line) for line in lines] == [1_500_000, 1]


@pytest.mark.parametrize(("said", "at_least"), [("7", 7.0), ("3600", 10.0), ("Fri, 31 Dec 1999 23:59:59 GMT", 0.0)])
@pytest.mark.parametrize("watch", [False, True])
async def test_a_busy_server_is_left_alone_for_as_long_as_it_says(
    storm: Stormy, followed: Reflector[Pod], monkeypatch: pytest.MonkeyPatch, said: str, at_least: float, watch: bool
) -> None:
    """It does so for 429 (priority and fairness) and while it ends."""

    async def busy(request: web.Request, *more: Any) -> web.StreamResponse:
        if watch and "watch" not in request.query:
            return await Stormy._collection(storm, request, *more)
        return web.Response(status=429, headers={"Retry-After": said}, text="busy")

    paused: list[float] = []

    async def pause(seconds: float) -> None:
        if seconds:
            paused.append(seconds)
            raise asyncio.CancelledError

    monkeypatch.setattr(storm, "_collection", busy)
    monkeypatch.setattr("fairlead.pool.kube.reflector.asyncio.sleep", pause)
    with pytest.raises(asyncio.CancelledError):
        await followed.run()
    assert at_least < paused[0] <= at_least + reflector.FIRST_PAUSE_S
    assert followed.stats.trouble == "HTTP 429: busy"
