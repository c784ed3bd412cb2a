"""Replicas of one machine tell each other their facts through files, whatever becomes of a process or a file."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from tellers import Teller, agree, running, until

from fairlead.core.events import PeerHeard, PeerLost, StreamLost
from fairlead.server import replicas
from fairlead.server import replicas_files as module
from fairlead.server.replicas import Peer
from fairlead.server.replicas_files import FACTS, RING, SNAPSHOTS, FileReplicas
from fairlead.server.running_gateway import RunningGateway

#: A replica of its own process that says `word`.
_OTHER = """
import asyncio, sys
from tellers import Teller, running
async def main():
    other = Teller("other", sys.argv[1])
    async with running(other):
        other.say("word")
        await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/facts"


@pytest.fixture
def other_process(url: str) -> Iterator[Callable[[], "subprocess.Popen[bytes]"]]:
    started = []

    def start() -> "subprocess.Popen[bytes]":
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "support")}
        started.append(subprocess.Popen((sys.executable, "-c", _OTHER, url), env=environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def folder(url: str) -> Path:
    """Of the files of the pool."""
    return Path(url.removeprefix("file://"), "pool")


def files(url: str) -> set[str]:
    return {path.name for path in folder(url).iterdir()}


def handled(teller: Teller, request_id: int) -> None:
    """As if a session of this replica had ended."""
    assert isinstance(teller.replicas, FileReplicas)
    teller.replicas.feed(StreamLost(request_id))


async def test_whatever_happened_before_an_event_is_known_when_it_is_handled(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tellers = [Teller(name, url) for name in "abc"]
    async with running(*tellers):
        await until(lambda: agree(*tellers) and all(len(teller.replicas.peers) == 2 for teller in tellers))
        monkeypatch.setattr(module, "LOOK_S", 3600.0)
        await asyncio.sleep(0.15)  # until nobody looks by himself
        for number in range(100):
            for teller in tellers:
                teller.say(f"{teller.replicas.origin}{number}")
                handled(teller, number)
                await asyncio.sleep(0)  # the end of the turn
        for teller in tellers:
            handled(teller, 100)
            assert teller.fed[-1] == StreamLost(100)
            heard = [event for event in teller.fed if isinstance(event, PeerHeard)]
            assert all(event.at_once and event.to == teller.replicas.origin for event in heard)
        assert agree(*tellers)
        assert not any(teller.replicas.trouble() for teller in tellers)
        assert tellers[0].replicas.where == url


async def test_a_worker_that_is_not_heard_is_a_trouble_after_a_lease(url: str) -> None:
    one, other = (Teller(f"vm-{number}", url, worker=number - 1, workers=2) for number in (1, 2))
    stranger = Teller("vm-b-3", url)
    async with running(one, stranger):
        async with running(other):
            await until(lambda: agree(one, other, stranger) and len(one.replicas.peers) == 2)
            assert not one.replicas.trouble()
        await until(lambda: "vm-2" not in one.replicas.peers)
        assert not one.replicas.trouble(), "it may start again"
        await until(lambda: "only 1 of 2 workers are heard" in one.replicas.trouble())
        assert not stranger.replicas.trouble(), "it belongs to another gateway"


async def test_a_worker_that_fails_at_every_start_stays_a_trouble(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Teller("vm-1", url, workers=2)
    async with running(one):
        await until(lambda: "only 1 of 2 workers are heard" in one.replicas.trouble())
        for number in (2, 3):
            async with running(Teller(f"vm-{number}", url, worker=1, workers=2)):
                await until(lambda: bool(one.replicas.peers))
                assert "keeps restarting" in one.replicas.trouble()
            await until(lambda: not one.replicas.peers)
            assert "keeps restarting" in one.replicas.trouble()
        monkeypatch.setattr(replicas, "STEADY_S", 0.2)
        async with running(Teller("vm-4", url, worker=1, workers=2)):
            await until(lambda: not one.replicas.trouble())


async def test_workers_of_another_gateway_on_the_host_are_others(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "STEADY_S", 0.2)
    marks = [RunningGateway(directory=directory, workers=2).mark for directory in ("/tmp/a", "/tmp/a", "/tmp/b", "/c")]
    names = [f"vm-{mark}0000000{number}" for number, mark in enumerate(marks)]
    one = Teller(names[0], url, workers=2)
    other, strange, stranger, older = (Teller(name, url) for name in (*names[1:], "vm-00000009"))
    async with running(one, strange, stranger):
        async with running(other):
            await until(lambda: agree(one, other, strange, stranger) and len(one.replicas.peers) == 3)
            assert not one.replicas.trouble()
        await until(lambda: "only 1 of 2 workers are heard" in one.replicas.trouble())
        async with running(older):
            await until(lambda: not one.replicas.trouble())  # its version has no marks


async def test_facts_that_stay_missing_are_a_trouble(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another pool's schedulers, with other endpoints, have the same name."""
    monkeypatch.setattr(replicas, "ASK_CAP_S", 1.0)
    one, other = Teller("vm-1", url), Teller("vm-2", url)
    async with running(one, other):
        await until(lambda: agree(one, other) and len(one.replicas.peers) == 1)
        assert not one.replicas.trouble()
        one.lacks.append("vm-2")
        await until(lambda: "facts of vm-2 stay missing" in one.replicas.trouble())


async def test_why_facts_cannot_be_used_is_said_at_once(url: str) -> None:
    one, other = Teller("vm-1", url, workers=3), Teller("vm-2", url)
    async with running(one, other):
        await until(lambda: agree(one, other) and len(one.replicas.peers) == 1)
        one.problems["vm-2"] = "it has version 3"
        assert one.replicas.trouble() == "the facts of vm-2 cannot be used: it has version 3"
        assert "'problem': 'it has version 3'" in str(one.replicas.page()["replicas"])


async def test_a_lag_of_the_past_is_no_trouble(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "SLOW_S", 0.0)
    one, other = Teller("a", url), Teller("b", url)
    async with running(one, other):
        one.say("word")
        await until(lambda: "late" in other.replicas.trouble())
        monkeypatch.setattr(replicas, "LAG_KEPT_S", 0.2)
        await until(lambda: not other.replicas.trouble())
        assert other.replicas.lag_s == 0.0


async def test_nothing_is_written_while_nothing_happens(url: str) -> None:
    one, other = Teller("a", url), Teller("b", url)
    async with running(one, other):
        await until(lambda: agree(one, other) and {"a", "b"} == {*one.replicas.peers, *other.replicas.peers})
        sent = one.replicas.counts.sent
        one.say("once")
        await until(lambda: other.known == {"a": ["once"]})
        assert one.replicas.counts.sent == sent + 1


async def test_others_are_looked_at_often_while_a_request_waits(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.2)
    one, other = Teller("a", url), Teller("b", url, waits=True)
    async with running(one, other):
        await until(lambda: agree(one, other) and {"b"} == {*one.replicas.peers})
        monkeypatch.setattr(module, "LOOK_S", 3600.0)
        await asyncio.sleep(0.4)
        one.say("end")
        handled(one, 1)
        await until(lambda: other.known == {"a": ["end"]})


async def test_a_joiner_gets_what_was_said_before(url: str) -> None:
    one = Teller("a", url)
    async with running(one):
        one.say("before")
        await until(lambda: one.replicas.counts.sent)
        joiner = Teller("b", url)
        async with running(joiner):
            assert joiner.known == {"a": ["before"]}
            one.say("after")
            await until(lambda: agree(one, joiner))
            assert joiner.snapshots == 1


async def test_one_that_leaves_is_gone_with_its_files_and_its_last_words_are_heard(url: str) -> None:
    one, other = Teller("a", url), Teller("b", url)
    async with running(one):
        async with running(other):
            await until(lambda: agree(one, other) and "b" in one.replicas.peers)
            other.say("farewell")
            assert one.counted == [2]
        await until(lambda: PeerLost("b") in one.fed)
        assert one.counted == [2, 1]
        last, lost = one.fed[-2:]
        assert isinstance(last, PeerHeard) and last.payload == b"0 farewell" and lost == PeerLost("b")
        assert not {f"b{FACTS}", f"b{SNAPSHOTS}"} & files(url)
    assert files(url) == set()


async def test_one_that_is_killed_is_lost_at_once_and_its_files_are_deleted(
    url: str, other_process: Callable[[], "subprocess.Popen[bytes]"]
) -> None:
    one = Teller("a", url)
    async with running(one):
        process = other_process()
        await until(lambda: one.known == {"other": ["word"]})
        process.kill()
        await until(lambda: one.lost == ["other"])
        assert f"other{FACTS}" not in files(url)
        other_process()
        await until(lambda: one.known == {"other": ["word"]})


async def test_files_of_the_dead_are_deleted_by_whoever_comes(
    url: str, other_process: Callable[[], "subprocess.Popen[bytes]"]
) -> None:
    process = other_process()
    await until(lambda: folder(url).is_dir() and f"other{FACTS}" in files(url))
    process.kill()
    process.wait()
    (folder(url) / f"other{SNAPSHOTS}.new").touch()  # as if it was writing one
    one = Teller("a", url)
    async with running(one):
        assert files(url) == {f"a{FACTS}", f"a{SNAPSHOTS}"}
        assert not one.replicas.peers


async def test_one_that_hangs_is_lost_and_comes_back(
    url: str, other_process: Callable[[], "subprocess.Popen[bytes]"]
) -> None:
    one = Teller("a", url)
    async with running(one):
        process = other_process()
        await until(lambda: one.known == {"other": ["word"]})
        process.send_signal(signal.SIGSTOP)
        await until(lambda: one.lost == ["other"])
        process.send_signal(signal.SIGCONT)
        await until(lambda: one.known == {"other": ["word"]})


async def test_all_lengths_come_through_and_who_is_overtaken_gets_a_snapshot(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = Random(1)
    one, other = Teller("a", url), Teller("b", url)
    async with running(one, other):
        await until(lambda: agree(one, other) and {"a", "b"} == {*one.replicas.peers, *other.replicas.peers})
        monkeypatch.setattr(module, "LOOK_S", 2.0)
        await asyncio.sleep(0.15)
        gaps = other.replicas.counts.gaps
        for number in range(800):  # the ring is filled twice
            one.say("x" * chance.choice((1, 2, 7, 100, 5000, 30_000)))
            handled(one, number)
            await asyncio.sleep(0)
            handled(other, number)
        assert one.replicas.counts.sent_bytes > 1.5 * RING
        assert agree(one, other) and other.replicas.counts.gaps == gaps
        for number in range(60):
            one.say("y" * 30_000)
            handled(one, number)
            await asyncio.sleep(0)
        handled(other, 1)
        assert other.replicas.missing == ["a"]
        before = other.snapshots
        monkeypatch.undo()
        await until(lambda: agree(one, other))
        assert other.snapshots == before + 1


async def test_what_cannot_be_taken_in_costs_no_event_of_ours(url: str) -> None:
    one, other = Teller("a", url), Teller("b", url)
    async with running(one, other):
        await until(lambda: agree(one, other) and {"a", "b"} == {*one.replicas.peers, *other.replicas.peers})
        other.fails = True
        one.say("word")
        handled(one, 1)
        await asyncio.sleep(0)
        handled(other, 2)
        assert other.fed[-1] == StreamLost(2) and not other.known.get("a")
        other.fails = False
        await until(lambda: agree(one, other))


async def test_more_than_fits_becomes_a_snapshot(url: str) -> None:
    one, other = Teller("a", url), Teller("b", url)
    async with running(one, other):
        await until(lambda: agree(one, other) and "a" in other.replicas.peers)
        one.say("z" * RING)
        await until(lambda: one.replicas.counts.dropped)
        one.say("next")
        await until(lambda: agree(one, other))


async def test_what_somebody_else_writes_there_does_no_harm(url: str) -> None:
    directory = folder(url)
    directory.mkdir(parents=True)
    (directory / f"empty{FACTS}").write_bytes(b"")
    (directory / f"noise{FACTS}").write_bytes(Random(1).randbytes(RING + 64))
    (directory / f"folder{FACTS}").mkdir()
    (directory / f"link{FACTS}").symlink_to("/dev/zero")
    os.mkfifo(directory / f"pipe{FACTS}")
    one, other = Teller("a", url), Teller("b", url)
    async with running(one, other):
        one.say("before")
        await until(lambda: agree(one, other) and other.known)
        for begin in (64, 100, 0):  # in the records, then in the header
            with (directory / f"a{FACTS}").open("r+b") as file:
                file.seek(begin + (16 if not begin else 0))
                file.write(b"\xff" * 8)
            await asyncio.sleep(0.25)
            one.say("word")
            await until(lambda: agree(one, other))
        assert {*one.replicas.peers} == {"b"}


async def test_deleted_files_are_made_again(url: str) -> None:
    one, other = Teller("a", url), Teller("b", url)
    async with running(one, other):
        one.say("before")
        await until(lambda: agree(one, other) and other.known)
        for path in folder(url).iterdir():
            path.unlink()
        await until(lambda: {f"a{FACTS}", f"b{FACTS}"} <= files(url))
        one.say("after")
        await until(lambda: agree(one, other) and other.known)


async def test_a_directory_that_cannot_be_used_is_said(url: str) -> None:
    directory = folder(url).parent
    directory.write_text("no directory")
    one, other = Teller("a", url), Teller("b", url)
    async with running(one, other):
        assert "decides alone: file:///" in one.replicas.trouble()
        one.say("meanwhile")
        directory.unlink()
        await until(lambda: agree(one, other) and other.known)
        assert not one.replicas.trouble()


async def test_a_full_disk_is_said(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    one = Teller("a", url)
    with monkeypatch.context() as patched:
        patched.setattr(module.os, "write", full)
        await one.replicas.start()
        assert "No space left" in one.replicas.trouble()
        assert files(url) <= {"a.making"}
    await until(lambda: not one.replicas.trouble())
    await one.replicas.close()


def test_a_note_names_few_of_many_replicas() -> None:
    one = Teller("vm-1", "file:///nowhere").replicas
    one.peers |= {f"vm-{number}": Peer(0.0, 0.0, ask_at=1.0) for number in range(2, 8)}
    assert one.note().endswith("facts of vm-2, vm-3, vm-4 and 3 more are missing")


async def test_a_folder_without_room_is_one_clear_trouble_and_no_file_stays(tmp_path: Path, url: str) -> None:
    """A write that fills the disk is cut short without an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (RING // 2, hard))
    try:
        async with running(one := Teller("one", url)):
            assert "each worker needs 3 MiB there" in one.replicas.trouble()
            assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
