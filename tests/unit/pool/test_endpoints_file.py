"""Following a file of endpoints, and names that resolve to this and that."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from fairlead.config.endpoint_list import Listing, parse_endpoints_text
from fairlead.config.problems import Problem
from fairlead.core.endpoint import Endpoint
from fairlead.core.events import EndpointDown, EndpointUp
from fairlead.pool import endpoints_file, watched_files
from fairlead.pool.aio import IN_ONE_TURN
from fairlead.pool.endpoints_file import EndpointSet, EndpointsFile, resolve_host


def text_of(*entries: tuple[str, str]) -> str:
    lines = [f"- {{name: {name}, address: '{address}', port: 80}}\n" for name, address in entries]
    return "endpoints:\n" + "".join(lines) if lines else "endpoints: []\n"


def listing(*entries: tuple[str, str]) -> Listing:
    return parse_endpoints_text(text_of(*entries).encode())


class Heard:
    """All that was fed and reported, in short, with a way to wait for it."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.problems: list[str] = []
        self._news = asyncio.Event()

    def feed(self, event: EndpointUp | EndpointDown) -> None:
        if isinstance(event, EndpointUp):
            self.events.append(f"up {event.endpoint.id.split('/')[1]} {event.endpoint.address}")
        else:
            self.events.append(f"down {event.endpoint_id.split('/')[1]}")
        self._news.set()

    def report(self, problem: Problem) -> None:
        self.problems.append(str(problem))
        self._news.set()

    def take(self) -> list[str]:
        events, self.events = self.events, []
        return events

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not true():
                self._news.clear()
                await self._news.wait()


class Names:
    """A resolver of our own."""

    def __init__(self) -> None:
        self.known: dict[str, list[str]] = {}
        self.asked = 0

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked += 1
        if host not in self.known:
            raise OSError("Name or service not known")
        return self.known[host]


@pytest.fixture
async def heard() -> Heard:
    return Heard()


Follow = Callable[..., EndpointsFile]


@pytest.fixture
async def follow(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Follow]:
    """Make followers of a path that look often; all are closed at the end."""
    monkeypatch.setattr(watched_files, "SETTLE_S", 0.01)
    made: list[EndpointsFile] = []

    def make(path: Path, names: Names | None = None, **options: Any) -> EndpointsFile:
        resolver = names or Names()
        follower = EndpointsFile(path, heard.feed, heard.report, poll_s=0.01, resolver=resolver, **options)
        made.append(follower)
        return follower

    yield make
    for follower in made:
        await follower.close()


async def test_only_differences_are_fed(tmp_path: Path, heard: Heard, follow: Follow) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text(text_of(("a", "10.0.0.1"), ("b", "10.0.0.2"), ("c", "::1")))
    follower = follow(path)
    assert await follower.start() == ()
    assert follower.loaded
    assert heard.take() == ["up a 10.0.0.1:80", "up b 10.0.0.2:80", "up c [::1]:80"]
    path.write_text(text_of(("a", "10.0.0.1"), ("b", "10.0.0.9"), ("d", "10.0.0.4")))
    await heard.until(lambda: len(heard.events) == 3)
    assert heard.take() == ["up b 10.0.0.9:80", "up d 10.0.0.4:80", "down c"]
    assert [one.address for one in follower.endpoints] == ["10.0.0.1:80", "10.0.0.9:80", "10.0.0.4:80"]


@pytest.mark.parametrize(
    "entries",
    [
        [("a", "10.0.0.1"), ("b", "10.0.0.1")],
        [("b", "10.0.0.1"), ("a", "10.0.0.1")],
        [("a", "10.0.0.1"), ("a", "10.0.0.2")],
        [("a", "10.0.0.2"), ("a", "10.0.0.1"), ("b", "10.0.0.2")],
    ],
)
async def test_of_two_that_have_a_name_or_an_address_both_stay_as_they_were(
    entries: list[tuple[str, str]], heard: Heard
) -> None:
    known = EndpointSet(heard.feed, heard.report)
    known.apply(listing(("a", "10.0.0.1"), ("b", "10.0.0.2")))
    heard.take()
    known.apply(listing(*entries, ("c", "10.0.0.3")))
    assert heard.take() == ["up c 10.0.0.3:80"]
    known.apply(listing(("a", "10.0.0.2"), ("b", "10.0.0.1"), ("c", "10.0.0.3")))
    assert heard.take() == ["up a 10.0.0.2:80", "up b 10.0.0.1:80"], "they may swap their addresses"


async def test_the_address_of_one_that_stays_is_free_for_nobody(heard: Heard) -> None:
    known = EndpointSet(heard.feed, heard.report)
    known.apply(listing(("a", "10.0.0.1"), ("b", "10.0.0.2"), ("c", "10.0.0.3")))
    heard.take()
    known.apply(listing(("a", "10.0.0.9"), ("b", "10.0.0.9"), ("c", "10.0.0.1"), ("d", "10.0.0.3"), ("e", "10.0.0.4")))
    assert heard.take() == ["up e 10.0.0.4:80"]
    assert heard.problems[1:] == [
        "10.0.0.1:80 stays with default/a: nothing changes for default/c",
        "10.0.0.3:80 stays with default/c: nothing changes for default/d",
    ]
    known.apply(listing(("a", "10.0.0.9"), ("c", "10.0.0.1"), ("d", "10.0.0.3"), ("e", "10.0.0.4")))
    assert heard.take() == ["up a 10.0.0.9:80", "up c 10.0.0.1:80", "up d 10.0.0.3:80", "down b"]


@pytest.mark.parametrize("text", ["endpoints: []\n", "[]"])
async def test_a_list_that_becomes_empty_is_believed_only_if_that_is_allowed(
    text: str, tmp_path: Path, heard: Heard, follow: Follow
) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text(text_of(("a", "10.0.0.1"), ("b", "10.0.0.2")))
    careful, believing = follow(path), follow(path, allow_empty=True)
    await careful.start()
    await believing.start()
    heard.take()
    path.write_text(text)
    await heard.until(lambda: heard.problems)
    assert heard.problems == [f"{path} is empty: its 2 endpoints stay (endpoints.allowEmpty: true takes them away)"]
    assert (careful.problem, believing.problem) == (heard.problems[0], "")
    assert [one.id for one in careful.endpoints] == ["default/a", "default/b"]
    await heard.until(lambda: not believing.endpoints)
    assert sorted(heard.take()) == ["down a", "down b"]
    path.write_text(text_of(("c", "10.0.0.3")))
    await heard.until(lambda: [one.id for one in careful.endpoints] == ["default/c"])


async def test_atomic_rename(tmp_path: Path, heard: Heard, follow: Follow) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text(text_of(("a", "10.0.0.1")))
    await follow(path).start()
    heard.take()
    for i in range(2, 5):
        (tmp_path / "next").write_text(text_of(("a", f"10.0.0.{i}")))
        os.replace(tmp_path / "next", path)
        await heard.until(lambda: heard.events)
        assert heard.take() == [f"up a 10.0.0.{i}:80"]


async def test_symlink_swap_of_a_mounted_configmap(tmp_path: Path, heard: Heard, follow: Follow) -> None:
    for i in (1, 2):
        (tmp_path / f"v{i}").mkdir()
        (tmp_path / f"v{i}" / "endpoints.yaml").write_text(text_of(("a", f"10.0.0.{i}")))
    (tmp_path / "..data").symlink_to("v1")
    (tmp_path / "endpoints.yaml").symlink_to("..data/endpoints.yaml")
    await follow(tmp_path / "endpoints.yaml").start()
    assert heard.take() == ["up a 10.0.0.1:80"]
    (tmp_path / "..tmp").symlink_to("v2")
    os.replace(tmp_path / "..tmp", tmp_path / "..data")
    await heard.until(lambda: heard.events)
    assert heard.take() == ["up a 10.0.0.2:80"]


async def test_broken_text_keeps_everything(tmp_path: Path, heard: Heard, follow: Follow) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text(text_of(("a", "10.0.0.1")))
    follower = follow(path)
    await follower.start()
    heard.take()
    path.write_text("endpoints: [")
    await heard.until(lambda: heard.problems)
    assert heard.problems == ["line 1: not valid YAML: did not find expected node content"]
    assert (heard.events, len(follower.endpoints)) == ([], 1)
    assert follower.problem == heard.problems[0]
    path.write_text(text_of(("b", "10.0.0.2")))
    await heard.until(lambda: len(heard.events) == 2)
    assert follower.problem == ""
    assert heard.take() == ["up b 10.0.0.2:80", "down a"]


async def test_a_wrong_entry_keeps_its_last_state(tmp_path: Path, heard: Heard, follow: Follow) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text(text_of(("a", "10.0.0.1"), ("b", "10.0.0.2"), ("c", "10.0.0.3")))
    follower = follow(path)
    await follower.start()
    heard.take()
    path.write_text(text_of(("a", "10.0.0.999"), ("b", "10.0.0.8")))
    await heard.until(lambda: len(heard.events) == 2)
    assert heard.take() == ["up b 10.0.0.8:80", "down c"]
    assert heard.problems == [
        "line 2, $.endpoints[0].address: '10.0.0.999' is neither an IP address nor a host name",
    ]
    assert [one.address for one in follower.endpoints] == ["10.0.0.1:80", "10.0.0.8:80"]
    assert follower.problem == heard.problems[0]


async def test_a_nameless_wrong_entry_takes_nothing_down(tmp_path: Path, heard: Heard, follow: Follow) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text(text_of(("a", "10.0.0.1"), ("b", "10.0.0.2")))
    await follow(path).start()
    heard.take()
    path.write_text(text_of(("a", "10.0.0.7"), ("''", "10.0.0.2")))
    await heard.until(lambda: heard.events and heard.problems)
    assert heard.take() == ["up a 10.0.0.7:80"]


async def test_a_file_that_goes_away_keeps_everything(tmp_path: Path, heard: Heard, follow: Follow) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text(text_of(("a", "10.0.0.1")))
    follower = follow(path)
    await follower.start()
    path.unlink()
    await heard.until(lambda: heard.problems)
    assert heard.problems == [f"cannot read {path}: No such file or directory"] == [follower.problem]
    path.write_text(text_of(("a", "10.0.0.2")))
    await heard.until(lambda: len(heard.events) == 2)
    assert follower.problem == ""
    assert heard.take() == ["up a 10.0.0.1:80", "up a 10.0.0.2:80"]


async def test_a_file_that_could_not_be_read_is_tried_again(
    tmp_path: Path, heard: Heard, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after chmod, which stat does not show."""
    path = tmp_path / "endpoints.yaml"
    path.write_text(text_of(("a", "10.0.0.1")))
    await follow(path).start()
    with monkeypatch.context() as unreadable:
        unreadable.setattr(watched_files, "open", _refuse, raising=False)
        path.write_text(text_of(("a", "10.0.0.2")))
        await heard.until(lambda: heard.problems)
    await heard.until(lambda: len(heard.events) == 2)
    assert heard.problems == [f"cannot read {path}: Permission denied"]


def _refuse(*_: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


async def test_a_file_that_is_not_there_yet(tmp_path: Path, heard: Heard, follow: Follow) -> None:
    path = tmp_path / "endpoints.yaml"
    follower = follow(path)
    assert [str(problem) for problem in await follower.start()] == [f"cannot read {path}: No such file or directory"]
    assert not follower.loaded
    path.write_text(text_of(("a", "10.0.0.1")))
    await heard.until(lambda: heard.events)
    assert follower.loaded


async def test_a_pipe_does_not_hang(tmp_path: Path, heard: Heard, follow: Follow) -> None:
    os.mkfifo(tmp_path / "pipe")
    follower = follow(tmp_path / "pipe")
    assert "not a regular file" in str((await follower.start())[0])


async def test_without_watching_nothing_changes(tmp_path: Path, heard: Heard, follow: Follow) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text(text_of(("a", "10.0.0.1")))
    follower = follow(path, watch=False)
    await follower.start()
    path.write_text(text_of(("b", "10.0.0.1")))
    # One that is watched, and looked at as often, shows that there was time for it.
    watched = tmp_path / "watched.yaml"
    watched.write_text(text_of(("c", "10.0.0.2")))
    await follow(watched).start()
    watched.write_text(text_of(("d", "10.0.0.2")))
    await heard.until(lambda: "up d 10.0.0.2:80" in heard.events)
    assert "up a 10.0.0.1:80" in heard.events
    assert not any("b" in event.split() for event in heard.events)


async def test_names_become_addresses(tmp_path: Path, heard: Heard, follow: Follow) -> None:
    path = tmp_path / "endpoints.yaml"
    names = Names()
    names.known["model"] = ["fd00::1", "fd00::2"]
    path.write_text(text_of(("a", "model"), ("b", "10.0.0.2")))
    await follow(path, names).start()
    assert sorted(heard.take()) == ["up a [fd00::1]:80", "up b 10.0.0.2:80"]
    names.known["other"] = ["10.0.0.3"]
    path.write_text(text_of(("a", "other"), ("b", "10.0.0.2")))
    await heard.until(lambda: heard.events)
    assert heard.take() == ["up a 10.0.0.3:80"]


async def test_names_are_resolved_again(heard: Heard) -> None:
    names = Names()
    names.known["model"] = ["10.0.0.1", "10.0.0.2"]
    endpoints = EndpointSet(heard.feed, heard.report, resolver=names, resolve_s=0.01)
    endpoints.apply(listing(("a", "model")))
    assert heard.events == []
    await endpoints.start()
    assert heard.take() == ["up a 10.0.0.1:80"]
    names.known["model"] = ["10.0.0.2", "10.0.0.1"]  # rotated: still ours
    asked = names.asked
    while names.asked < asked + 3:
        await asyncio.sleep(0.01)
    assert heard.events == []
    names.known["model"] = ["10.0.0.3"]
    await heard.until(lambda: heard.events)
    assert heard.take() == ["up a 10.0.0.3:80"]
    await endpoints.close()


@pytest.mark.parametrize(
    ("addresses", "used"),
    [
        (["::1", "127.0.0.1"], "127.0.0.1:80"),
        (["127.0.0.1", "::1"], "127.0.0.1:80"),
        (["::1"], "[::1]:80"),
        (["fd00::1", "127.0.0.2", "127.0.0.1"], "127.0.0.2:80"),
        (["fd00::1", "255.255.255.255"], "[fd00::1]:80"),
    ],
)
async def test_of_a_names_addresses_the_first_of_ipv4_that_has_a_route_is_used(
    heard: Heard, addresses: list[str], used: str
) -> None:
    """No connection can be made to a broadcast address."""
    names = Names()
    names.known["localhost"] = addresses
    endpoints = EndpointSet(heard.feed, heard.report, resolver=names)
    endpoints.apply(listing(("a", "localhost")))
    await endpoints.start()
    assert heard.take() == [f"up a {used}"]
    await endpoints.close()


async def test_an_address_in_use_is_kept_though_a_preferred_one_appears(heard: Heard) -> None:
    names = Names()
    names.known["localhost"] = ["::1"]
    endpoints = EndpointSet(heard.feed, heard.report, resolver=names, resolve_s=0.01)
    endpoints.apply(listing(("a", "localhost")))
    await endpoints.start()
    assert heard.take() == ["up a [::1]:80"]
    names.known["localhost"] = ["::1", "127.0.0.1"]
    asked = names.asked
    while names.asked < asked + 3:
        await asyncio.sleep(0.01)
    assert heard.events == []
    await endpoints.close()


async def test_a_name_that_fails_is_tried_again_and_reported_once(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints_file, "RETRY_S", 0.01)
    names = Names()
    endpoints = EndpointSet(heard.feed, heard.report, resolver=names, resolve_s=0.01)
    endpoints.apply(listing(("a", "model")))
    await endpoints.start()
    while names.asked < 4:
        await asyncio.sleep(0.01)
    assert heard.problems == ["cannot resolve model: Name or service not known"] == [endpoints.problem]
    names.known["model"] = ["10.0.0.1"]
    await heard.until(lambda: heard.events)
    assert endpoints.problem == ""
    del names.known["model"]
    await heard.until(lambda: len(heard.problems) == 2)
    assert (heard.events, endpoints.endpoints) == (
        ["up a 10.0.0.1:80"],
        [Endpoint("default/a", "10.0.0.1:80")],
    )
    endpoints.apply(listing())
    assert heard.events == ["up a 10.0.0.1:80", "down a"]
    assert endpoints.problem == ""
    await endpoints.close()


@pytest.mark.parametrize("resolve_s", [30.0, 0.05])
async def test_only_names_that_fail_are_tried_often(
    heard: Heard, monkeypatch: pytest.MonkeyPatch, resolve_s: float
) -> None:
    monkeypatch.setattr(endpoints_file, "RETRY_S", 0.01)
    asked: list[str] = []

    async def resolver(host: str, port: int) -> list[str]:
        asked.append(host)
        if host == "gone":
            raise OSError("Name or service not known")
        return ["10.0.0.1"]

    endpoints = EndpointSet(heard.feed, heard.report, resolver=resolver, resolve_s=resolve_s)
    endpoints.apply(listing(("a", "model"), ("b", "gone")))
    await endpoints.start()
    async with asyncio.timeout(10):
        while asked.count("gone") < 20:
            await asyncio.sleep(0.01)
        endpoints.apply(listing(("a", "model"), ("b", "gone"), ("c", "other")))
        await heard.until(lambda: len(heard.events) == 2)
    assert (asked.count("model") == 1) == (resolve_s == 30.0)
    await endpoints.close()


async def test_a_name_that_left_while_it_was_resolved(heard: Heard) -> None:
    answer: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()

    async def slow(host: str, port: int) -> list[str]:
        return await answer

    endpoints = EndpointSet(heard.feed, heard.report, resolver=slow)
    endpoints.apply(listing(("a", "model")))
    starting = asyncio.create_task(endpoints.start())
    await asyncio.sleep(0)
    endpoints.apply(listing())
    answer.set_result(["10.0.0.1"])
    await starting
    assert heard.events == []
    await endpoints.close()


async def test_the_start_does_not_wait_for_a_resolver_that_hangs(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def hang(host: str, port: int) -> list[str]:
        asked.append(host)
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(endpoints_file, "RESOLVE_TIMEOUT_S", 0.05)
    endpoints = EndpointSet(heard.feed, heard.report, resolver=hang)
    endpoints.apply(listing(*((f"e{i}", f"host{i}") for i in range(100)), ("b", "10.0.0.1")))
    async with asyncio.timeout(10):
        await endpoints.start(within_s=0.05)
        assert heard.take() == ["up b 10.0.0.1:80"]
        assert len(asked) < 100, "later ones wait for their turn in the background"
        await heard.until(lambda: len(heard.problems) == 100)
        await endpoints.close()
    assert heard.problems[0] == "cannot resolve host0: no answer"


async def test_a_late_answer_counts(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a first name server that is dead, every answer is late."""
    monkeypatch.setattr(endpoints_file, "RESOLVE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(endpoints_file, "RETRY_S", 0.01)
    asked: list[str] = []
    answers: dict[str, asyncio.Future[list[str]]] = {}

    async def resolver(host: str, port: int) -> list[str]:
        asked.append(host)
        answers[host] = asyncio.get_running_loop().create_future()
        return await answers[host]

    known = EndpointSet(heard.feed, heard.report, resolver=resolver)
    known.apply(listing(("a", "a.example"), ("b", "b.example")))
    await known.start(within_s=0.05)
    known.apply(listing(("b", "b.example")))
    known.apply(listing(("a", "a.example"), ("b", "b.example"), ("c", "c.example")))
    async with asyncio.timeout(10):
        while "cannot resolve c.example: no answer" not in heard.problems:
            await asyncio.sleep(0.01)
        assert asked == ["a.example", "b.example", "c.example"], "one lookup of a name at a time"
        for number, host in enumerate(asked[:3]):
            answers[host].set_result([f"10.0.0.{number}"])
        await heard.until(lambda: len(heard.events) == 3)
        assert known.problem == ""
        await known.close()
    assert heard.take() == ["up a 10.0.0.0:80", "up b 10.0.0.1:80", "up c 10.0.0.2:80"]


async def test_a_restart_knows_the_addresses_of_names_that_cannot_be_resolved(heard: Heard, tmp_path: Path) -> None:
    names, kept = Names(), tmp_path / "names.json"
    names.known = {"model": ["10.0.0.1"], "other": ["10.0.0.2"], "gone": ["10.0.0.3"]}
    first = EndpointSet(heard.feed, heard.report, resolver=names, kept=kept)
    first.apply(listing(("a", "model"), ("b", "other"), ("c", "gone")))
    await first.start()
    assert kept.exists()
    await first.close()
    assert len(heard.take()) == 3

    names.known = {"model": ["10.0.0.4"]}
    second = EndpointSet(heard.feed, heard.report, resolver=names, kept=kept)
    second.apply(listing(("a", "model"), ("b", "other")))
    await second.start()
    assert sorted(heard.take()) == ["up a 10.0.0.1:80", "up a 10.0.0.4:80", "up b 10.0.0.2:80"]
    assert second.problem == "cannot resolve other: Name or service not known"
    await second.close()

    kept.write_text("half a fi")
    third = EndpointSet(heard.feed, heard.report, resolver=names, kept=kept)
    third.apply(listing(("a", "model"), ("b", "other")))
    await third.start()
    assert heard.take() == ["up a 10.0.0.4:80"]
    await third.close()


async def test_names_of_one_server_are_a_problem(heard: Heard) -> None:
    names = Names()
    names.known = {"model": ["10.0.0.1"], "other": ["10.0.0.2"]}
    known = EndpointSet(heard.feed, heard.report, resolver=names, resolve_s=0.01)
    known.apply(listing(("a", "model"), ("b", "other"), ("c", "10.0.0.3")))
    await known.start()
    assert known.problem == ""
    for address, both in ("10.0.0.1", "default/a and default/b"), ("10.0.0.3", "default/b and default/c"):
        names.known["other"] = [address]
        await heard.until(lambda: heard.events[-1] == f"up b {names.known['other'][0]}:80")
        assert known.problem == f"{both} are one server, {address}:80, which gets requests for two"
    await known.close()


async def test_the_real_resolver() -> None:
    assert set(await resolve_host("localhost", 80)) <= {"127.0.0.1", "::1"}
    assert await resolve_host("127.0.0.1", 80) == ["127.0.0.1"]


async def test_a_consumer_that_raises_does_not_end_the_following(tmp_path: Path, heard: Heard, follow: Follow) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text(text_of(("a", "10.0.0.1")))
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context["exception"]))
    calm = heard.feed

    def feed(event: EndpointUp | EndpointDown) -> None:
        calm(event)
        raise RuntimeError("broken consumer")

    heard.feed = feed  # type: ignore[method-assign]
    await follow(path).start()
    path.write_text(text_of(("a", "10.0.0.2")))
    await heard.until(lambda: len(heard.events) == 2)
    assert len(errors) == 2


async def test_many_changes_are_fed_in_several_turns_of_the_event_loop(heard: Heard) -> None:
    """Each takes the scheduler a fraction of a millisecond, and requests must not wait for thousands. Those that go
    follow those that come, so that the pool never gets small, and whose address another one has at once: it would be
    one server twice."""
    first = listing(*((f"a{number}", f"10.0.0.{number}") for number in range(40)), ("z", "10.0.1.0"))
    second = listing(*((f"b{number}", f"10.0.1.{number}") for number in range(40)))
    known, turns = EndpointSet(heard.feed, heard.report), list[int]()
    known.apply(first)
    known.apply(second)
    assert len(known.endpoints) == 40
    while len(heard.events) < 122:
        turns.append(len(heard.events))
        await asyncio.sleep(0)
    assert turns == list(range(IN_ONE_TURN, 122, IN_ONE_TURN))
    events = heard.take()
    assert events[:41] == [*(f"up a{number} 10.0.0.{number}:80" for number in range(40)), "up z 10.0.1.0:80"]
    assert events[41:43] == ["up b0 10.0.1.0:80", "down z"]
    assert events[43:82] == [f"up b{number} 10.0.1.{number}:80" for number in range(1, 40)]
    assert events[82:] == [f"down a{number}" for number in range(40)]


async def test_a_start_ends_when_all_endpoints_were_fed_and_nothing_is_fed_after_the_end(heard: Heard) -> None:
    known = EndpointSet(heard.feed, heard.report)
    known.apply(listing(*((f"a{number}", f"10.0.0.{number}") for number in range(100))))
    await known.start()
    assert len(heard.take()) == 100
    known.apply(listing(*((f"b{number}", f"10.0.1.{number}") for number in range(100))))
    await known.close()
    before = heard.take()
    for _ in range(20):
        await asyncio.sleep(0)
    assert heard.take() == [] and len(before) < 100


async def test_endpoints_go_after_the_names_of_those_that_come_were_tried(heard: Heard) -> None:
    asked, answers = asyncio.Queue[str](), dict[str, asyncio.Future[list[str]]]()

    async def resolver(host: str, port: int) -> list[str]:
        if host not in answers:
            answers[host] = asyncio.get_running_loop().create_future()
            asked.put_nowait(host)
        return await answers[host]

    known = EndpointSet(heard.feed, heard.report, resolver=resolver)
    known.apply(listing(("a", "10.0.0.1"), ("b", "10.0.0.2")))
    await known.start()
    known.apply(listing(("c", "c.example"), ("d", "d.example")))
    assert {await asked.get(), await asked.get()} == {"c.example", "d.example"}
    known.apply(listing(("b", "10.0.0.2"), ("c", "c.example"), ("d", "d.example"), ("e", "e.example")))
    answers["c.example"].set_result(["10.0.0.3"])
    answers["d.example"].set_exception(OSError("no such host"))
    assert await asked.get() == "e.example"
    known.apply(listing(("f", "10.0.0.2"), ("c", "c.example"), ("d", "d.example"), ("e", "e.example")))
    assert heard.take() == ["up a 10.0.0.1:80", "up b 10.0.0.2:80", "up c 10.0.0.3:80", "up f 10.0.0.2:80", "down b"]
    answers["e.example"].set_result(["10.0.0.5"])
    await heard.until(lambda: len(heard.events) == 2)
    assert heard.take() == ["up e 10.0.0.5:80", "down a"]
    await known.close()


async def test_endpoints_of_one_address_all_leave(heard: Heard) -> None:
    async def resolver(host: str, port: int) -> list[str]:
        return ["10.0.0.1"]

    known = EndpointSet(heard.feed, heard.report, resolver=resolver)
    known.apply(listing(("a", "a.example"), ("b", "b.example")))
    await known.start()
    assert len(heard.take()) == 2
    known.apply(listing(("c", "10.0.0.2")))
    assert sorted(heard.take()) == ["down a", "down b", "up c 10.0.0.2:80"]
    await known.close()
