"""What the leader learned reaches the replica that leads next."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientSession

from fairlead.compat.load import load
from fairlead.config.building import build_pipeline
from fairlead.config.plugins import build_hasher
from fairlead.config.schema import Admin as Settings
from fairlead.config.schema import StateSettings, Tls
from fairlead.core.clock import VirtualClock
from fairlead.core.endpoint import Endpoint
from fairlead.core.events import EndpointUp
from fairlead.core.request import Request
from fairlead.pool.kube.elector import Lease
from fairlead.server.admin import Admin, AdminSources, admin_access
from fairlead.server.live.handover import SILENT_S, Handover, reachable
from fairlead.server.state import StateFile

CONFIG = load("policy: default", need_endpoints=False)
HASHER = build_hasher(CONFIG)


def prompt(number: int) -> Request:
    chain = HASHER.chain(b"m", Random(number).randbytes(8000))
    return Request(number, 0.0, model="m", prompt_tokens=2000, prompt_bytes=8000, prefix=chain)


class Replica:
    """A scheduler of one endpoint, with its admin port, where a token is needed."""

    def __init__(self, directory: Path, name: str, pool: str) -> None:
        self.pipeline = build_pipeline(CONFIG, VirtualClock(), Random(0))
        settings = StateSettings(interval=0.05)
        feed = self.pipeline.handle
        self.file = StateFile(directory / name, settings, self.pipeline, HASHER, feed, lambda: 0.0)
        self.states = {pool: self.file}
        self.handover = Handover(lambda: self.states, "http://127.0.0.1:PORT")
        token = directory / "token"
        token.write_text("secret")
        nothing = AdminSources(metrics=tuple, unready=list, endpoints=list, decisions=lambda count: ())
        access = admin_access((), str(token), free=(self.handover.path,))
        self.admin = Admin(
            nothing, port=0, debug=False, access=access, secret=(self.handover.path, self.handover.serve)
        )
        self.elector = SimpleNamespace(leading=False, former=Lease())
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> "Replica":
        await self.file.start()
        endpoint = Endpoint("e", "10.0.0.1:8000")
        self.pipeline.handle(EndpointUp(endpoint))
        self.file.joined(endpoint)
        await self.admin.start()
        return self

    @property
    def page(self) -> str:
        return self.handover.page.replace("PORT", str(self.admin.port))

    def follow(self, page: str, acquired: str = "2026-01-01T00:00:00.000000Z") -> None:
        elector: Any = self.elector
        elector.former = Lease("other", acquired=acquired, page=page)
        self.task = self.task or asyncio.create_task(self.handover.run(elector))

    def lead(self, leading: bool = True) -> None:
        self.elector.leading = leading
        self.handover.changed(leading)

    async def status(self, url: str = "") -> int:
        """The status of this replica's page, or of another URL."""
        url = url or f"{self.page}?pool={next(iter(self.states))}"
        async with ClientSession() as session, session.get(url) as answer:
            return answer.status

    async def takes_over(self) -> None:
        async with asyncio.timeout(20):
            while await self.status() != 200:
                await asyncio.sleep(0.01)

    def serve(self, number: int) -> None:
        fleet = self.pipeline.fleet
        fleet.ledger.release(fleet.charge(prompt(number), 0, 0.0, 0, 10.0))

    def knows(self, number: int) -> bool:
        return self.pipeline.fleet.match(prompt(number)) is not None

    async def end(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        await self.admin.close()
        await self.file.close()


@asynccontextmanager
async def silent_page() -> AsyncIterator[str]:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1") as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/learned/x"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture(params=["", "team-a/llama"], ids=["one pool", "several"])
async def two(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[tuple[Replica, Replica]]:
    leader, standby = [await Replica(tmp_path, name, request.param).start() for name in ("a.state", "b.state")]
    leader.follow("", acquired="")
    leader.lead()
    await leader.takes_over()
    yield leader, standby
    for replica in (leader, standby):
        await replica.end()


async def test_a_leader_that_stops_tells_everything(two: tuple[Replica, Replica]) -> None:
    leader, standby = two
    standby.follow(leader.page)
    leader.serve(1)
    await leader.handover.prepare()
    standby.lead()
    await until(lambda: standby.knows(1))


async def test_of_a_leader_that_died_counts_what_was_read_last(two: tuple[Replica, Replica]) -> None:
    leader, standby = two
    leader.serve(1)
    await leader.file.write()
    standby.follow(leader.page)
    await asyncio.sleep(0.5)
    await leader.admin.close()
    assert not standby.knows(1), "a standby only keeps it"
    standby.lead()
    await until(lambda: standby.knows(1))


async def test_a_leader_that_cannot_be_reached_tells_nothing(two: tuple[Replica, Replica]) -> None:
    leader, standby = two
    standby.serve(2)
    await leader.admin.close()
    standby.follow(leader.page)
    standby.lead()
    await asyncio.sleep(0.5)
    assert standby.knows(2)
    assert standby.task is not None and not standby.task.done()


async def test_a_leader_that_hangs_is_not_waited_for_once_a_pool(tmp_path: Path) -> None:
    standby = await Replica(tmp_path, "c.state", "pool 0").start()
    standby.states.update({f"pool {number}": standby.file for number in range(1, 8)})
    async with silent_page() as page:
        standby.follow(page)
        standby.lead()
        async with asyncio.timeout(4 * SILENT_S):
            await standby.takes_over()
        await standby.end()


async def test_only_who_knows_the_path_reads_the_page(two: tuple[Replica, Replica]) -> None:
    leader, _ = two
    assert await leader.status(leader.page + "?pool=other") == 404
    assert await leader.status(leader.page[:-1]) == 401
    assert await leader.status(leader.page.rpartition("/")[0]) == 401


async def test_a_leader_that_pauses_keeps_what_it_knows(two: tuple[Replica, Replica]) -> None:
    former, leader = two
    former.serve(1)
    await former.handover.prepare()
    leader.follow(former.page)
    leader.lead()
    await until(lambda: leader.knows(1))
    leader.serve(2)
    leader.lead(False)
    await asyncio.sleep(0.5)
    leader.lead()
    await asyncio.sleep(0.5)
    assert leader.knows(2), "nobody else led meanwhile"


async def test_a_standby_tells_only_what_it_has_taken_over(two: tuple[Replica, Replica]) -> None:
    leader, standby = two
    leader.serve(1)
    await leader.handover.prepare()
    await standby.file.write()
    assert await standby.status() == 404
    standby.follow(leader.page)
    standby.lead()
    await standby.takes_over()
    leader.lead(False)
    leader.follow(standby.page)
    await asyncio.sleep(0.5)
    leader.lead()
    await asyncio.sleep(0.5)
    assert leader.knows(1)


async def test_who_led_long_ago_tells_nothing_before_it_has_taken_over_again(two: tuple[Replica, Replica]) -> None:
    first, _ = two
    async with silent_page() as page:
        first.lead(False)
        first.follow(page, acquired="2026-01-02T00:00:00.000000Z")
        assert await first.status() == 200, "the next leader reads it now"
        first.lead()
        assert await first.status() == 404
        first.lead(False)
        assert await first.status() == 404, "whoever led meanwhile must not read it"
        first.lead()
        await first.takes_over()


async def test_who_led_meanwhile_is_read_although_the_first_look_had_not_ended(two: tuple[Replica, Replica]) -> None:
    other, leader = two
    other.serve(1)
    await other.handover.prepare()
    async with silent_page() as page:
        leader.follow(page, acquired="2026-01-02T00:00:00.000000Z")
        leader.lead()
        await asyncio.sleep(0.1)
        leader.lead(False)
        leader.follow(other.page, acquired="2026-01-03T00:00:00.000000Z")
        leader.lead()
        await until(lambda: leader.knows(1))


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        (Settings(host="::", port=9090), "http://10.0.0.1:9090"),
        (Settings(port=9091, metrics_host="0.0.0.0", metrics_port=9090), "http://10.0.0.1:9090"),
        (Settings(port=9090), ""),
        (Settings(host="localhost", port=9090), ""),
        (Settings(host="pod-0.pods", port=9090), "http://10.0.0.1:9090"),
        (Settings(host="::", port=0), ""),
        (Settings(host="::", port=9090, tls=Tls(cert_dir="/tls")), ""),
    ],
)
def test_where_other_pods_reach_it(settings: Settings, url: str) -> None:
    assert reachable(settings, "10.0.0.1") == url
    assert reachable(settings, "") == ""
