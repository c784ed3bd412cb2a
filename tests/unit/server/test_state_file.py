"""The state file: written whole, read with care, and nothing that happens to it stops the scheduler."""

import asyncio
import errno
import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from shutil import rmtree
from typing import Any

import pytest

from fairlead.compat.load import load
from fairlead.config.building import build_pipeline
from fairlead.config.schema import Config, JournalSettings, StateSettings
from fairlead.core.clock import VirtualClock
from fairlead.core.endpoint import Endpoint
from fairlead.core.events import EndpointUp, Restored
from fairlead.core.learned import EndpointLearned, PrefixesLearned
from fairlead.core.prefix import ChainHasher
from fairlead.core.request import Request
from fairlead.core.scheduler import Pipeline
from fairlead.core.state import VERSION, Head, encode
from fairlead.server import state as module
from fairlead.server.journal.blocks import block
from fairlead.server.state import MAGIC, StateFile, Stored, read_state

HASHER = ChainHasher()
MOST = 1 << 20


def prompt(number: int, size: int = 8000) -> Request:
    chain = HASHER.chain(b"m", Random(number).randbytes(size))
    return Request(number, 0.0, model="m", prompt_tokens=size // 4, prompt_bytes=size, prefix=chain)


class Process:
    """What a scheduler has of it. `up`: endpoints that join at once."""

    def __init__(self, path: Path, *up: str, cut: ChainHasher = HASHER, **settings: Any) -> None:
        self.pipeline: Pipeline = build_pipeline(
            load("policy: default", need_endpoints=False), VirtualClock(), Random(0)
        )
        self.events: list[Any] = []
        self.file = StateFile(
            path, StateSettings(**({"max_bytes": MOST} | settings)), self.pipeline, cut, self.feed, lambda: 0.0
        )
        self._up = up

    def feed(self, event: Any) -> None:
        self.events.append(event)
        self.pipeline.handle(event)

    async def start(self) -> "Process":
        await self.file.start()
        for name in self._up:
            await self.join(name)
        return self

    async def join(self, name: str) -> None:
        endpoint = Endpoint(name, f"10.0.0.{name[1:]}:8000")
        self.feed(EndpointUp(endpoint))
        self.file.joined(endpoint)
        await self.file.settled()

    def serve(self, *numbers: int) -> None:
        for number in numbers:
            slot = number % len(self.pipeline.fleet.table)
            fleet = self.pipeline.fleet
            fleet.ledger.release(fleet.charge(prompt(number), slot, 0.0, 0, 10.0))
        self.pipeline.tokens.learn("m", 8000, 2500)

    def knows(self, *numbers: int) -> list[bool]:
        return [self.pipeline.fleet.match(prompt(number)) is not None for number in numbers]


def said(caplog: pytest.LogCaptureFixture) -> str:
    """Messages, and what they tell besides."""
    return "\n".join(f"{record.message} {record.fields}" for record in caplog.records)  # type: ignore[attr-defined]


@pytest.fixture
async def written(tmp_path: Path) -> Path:
    """The file of a process that has served ten prompts."""
    path = tmp_path / "learned.state"
    process = await Process(path, "e0", "e1").start()
    process.serve(*range(10))
    await process.file.close()
    return path


async def restarted(path: Path, **settings: Any) -> Process:
    return await Process(path, "e0", "e1", **settings).start()


async def test_the_next_process_knows_it(written: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fairlead")
    process = await restarted(written)
    assert all(process.knows(*range(10)))
    assert process.knows(11) == [False]
    assert process.pipeline.tokens.bytes_per_token("m") < 4.2
    process.pipeline.validate()
    prefixes = process.pipeline.fleet.prefix.entries
    assert process.file.note == (
        f"restored {prefixes} prefixes for 2 endpoints, learned speeds of 1 engine class, 0 s old"
    )
    assert process.file.note in said(caplog)
    assert (process.file.counts.prefixes, process.file.counts.endpoints) == (prefixes, 2)
    await process.file.close()


async def test_only_its_owner_may_read_it(written: Path) -> None:
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert [path.name for path in written.parent.iterdir() if path.suffix == ".new"] == []


async def test_it_is_written_while_the_process_runs(tmp_path: Path) -> None:
    """Who is killed leaves the last one: nothing is done at the end here but to stop the task."""
    path = tmp_path / "new" / "directory" / "learned.state"
    process = await Process(path, "e0", interval=0.01).start()
    process.serve(1, 2)
    async with asyncio.timeout(30):
        before = process.file.counts.written
        while process.file.counts.written < before + 2:
            await asyncio.sleep(0.01)
    stored = read_state(path, HASHER, MOST)
    assert stored.problems == []
    assert [type(part) for part in stored.endpoints["e0"]] == [EndpointLearned, PrefixesLearned]
    await process.file.close()


async def test_no_file_is_no_problem(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    process = await Process(tmp_path / "none", "e0").start()
    assert process.file.note == ""
    assert caplog.records == []
    await process.file.close()


def changed(head: Head) -> bytes:
    return MAGIC + block(encode(head), pack=False)


DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "it is no state file"),
    "another file": (lambda data: b"#!/bin/sh\n" * 1000, "it is no state file"),
    "only its first line": (lambda data: MAGIC, "it has no beginning"),
    "a newer version": (lambda data: changed(Head(VERSION + 1, 1.0)), f"it has version {VERSION + 1}"),
    "an older version": (lambda data: changed(Head(VERSION - 1, 1.0)), f"it has version {VERSION - 1}"),
    "its head is damaged": (lambda data: data[:30] + b"\0" + data[31:], "it has no beginning"),
    "noise": (lambda data: MAGIC + Random(1).randbytes(100_000), "damaged bytes"),
    "too large": (lambda data: data + bytes(MOST), "it is larger than maxBytes"),
    "parts of another program": (lambda data: data + block(b"\x81\xa4type\xa3odd", pack=False), "cannot be read"),
}


@pytest.mark.parametrize(("change", "problem"), DAMAGED.values(), ids=DAMAGED)
async def test_a_file_that_cannot_be_used_is_a_note(
    change: Callable[[bytes], bytes], problem: str, written: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written.write_bytes(change(written.read_bytes()))
    process = await restarted(written)
    assert problem in said(caplog)
    process.pipeline.validate()
    process.serve(20)
    await process.file.close()
    assert (await restarted(written)).knows(20) == [True], "a good one took its place"


async def test_a_file_cut_anywhere_gives_what_is_whole(written: Path) -> None:
    data = written.read_bytes()
    counts = set()
    for size in range(0, len(data), 101):
        written.write_bytes(data[:size])
        stored = read_state(written, HASHER, MOST)
        counts.add(sum(map(len, stored.endpoints.values())))
    assert counts == {0, 1, 2, 3}


async def test_a_file_that_is_a_directory_is_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "learned.state").mkdir()
    process = await Process(tmp_path / "learned.state", "e0").start()
    assert "it cannot be read" in said(caplog)
    await process.file.close()
    assert "a restart forgets" in process.file.problem


async def test_a_pipe_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "learned.state")
    process = await Process(tmp_path / "learned.state", "e0").start()
    assert "it cannot be read: it is not a regular file" in said(caplog)
    await process.file.close()


async def test_prompts_cut_otherwise_are_left_out_and_the_rest_is_used(
    written: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = await restarted(written, cut=ChainHasher(finest=64))
    assert process.knows(*range(10)) == [False] * 10
    assert process.pipeline.tokens.bytes_per_token("m") < 4.2
    assert "blocks of another size" in said(caplog)
    await process.file.close()


async def test_what_is_too_old_is_left_out_and_the_rest_is_used(
    written: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(module.time, "time", lambda: now + 100.0)
    process = await restarted(written, max_age=50.0)
    assert process.knows(*range(10)) == [False] * 10
    assert process.pipeline.tokens.bytes_per_token("m") < 4.2
    assert "it is 100 s old" in said(caplog)
    await process.file.close()
    assert (await restarted(written, max_age=500.0)).knows(*range(10)) == [False] * 10, "nor is it kept any longer"


async def test_a_clock_that_went_back_makes_nothing_younger_than_now(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(module.time, "time", lambda: now - 1000.0)
    process = await restarted(written)
    assert {event.age_s for event in process.events if isinstance(event, Restored)} == {0.0}
    await process.file.close()


async def test_an_endpoint_that_joins_later_is_known_too(written: Path) -> None:
    process = await Process(written, "e0").start()
    assert process.knows(0, 1) == [True, False]
    await process.join("e1")
    assert process.knows(0, 1) == [True, True]
    await process.file.close()


async def test_endpoints_that_join_while_it_is_written(tmp_path: Path) -> None:
    path, names = tmp_path / "learned.state", [f"e{number}" for number in range(40)]
    before = await Process(path, *names).start()
    before.serve(*range(80))
    await before.file.close()
    process = await Process(path, interval=0.001).start()
    for name in reversed(names):
        await process.join(name)
    written = process.file.counts.written
    async with asyncio.timeout(30):
        while process.file.counts.written < written + 2:
            await asyncio.sleep(0.01)
    assert (process.file.problem, process.file.counts.errors) == ("", 0)
    await process.file.close()


async def test_an_error_while_it_is_written_does_not_end_the_writing(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await Process(written, "e0", interval=0.01).start()
    with monkeypatch.context() as patch:
        patch.setattr(module, "encode", None)
        async with asyncio.timeout(30):
            while not process.file.problem:
                await asyncio.sleep(0.01)
    assert "a restart forgets: TypeError: " in process.file.problem
    async with asyncio.timeout(30):
        while process.file.problem:
            await asyncio.sleep(0.01)
    await process.file.close()


async def test_an_endpoint_that_is_away_gets_older(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the next file too, and is not made young by that."""
    now = [time.time()]
    monkeypatch.setattr(module.time, "time", lambda: now[0])
    for _ in range(2):
        now[0] += 60.0
        process = await Process(written, "e0").start()
        await process.file.close()
    now[0] += 60.0
    process = await Process(written, "e1").start()
    assert process.knows(1) == [True]
    ages = [event.age_s for event in process.events if isinstance(event, Restored)]
    assert max(ages) == pytest.approx(180.0, abs=5.0)
    await process.file.close()
    now[0] += 60.0
    late = await Process(written, "e0", max_age=100.0).start()
    assert late.knows(0) == [False]
    await late.file.close()


async def test_the_file_is_never_larger_than_it_may_be(tmp_path: Path) -> None:
    path, most = tmp_path / "learned.state", 64 << 10
    process = await Process(path, "e0", "e1", max_bytes=most).start()
    for number in range(200):
        process.serve(number)
    process.pipeline.fleet.prefix.set_capacity(0, 1 << 30)
    for number in range(200):
        process.serve(2 * number)
    assert process.pipeline.fleet.prefix.entries * 12 > most
    await process.file.close()
    assert most // 2 < path.stat().st_size == process.file.counts.bytes <= most
    fresh = await restarted(path)
    assert fresh.knows(398) == [True], "what was used last is kept"
    await fresh.file.close()


async def test_a_disk_that_is_full_leaves_the_file_before(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = written.read_bytes()
    process = await restarted(written)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        await process.file.close()
    assert process.file.problem == f"{written} cannot be written, and a restart forgets: No space left on device"
    assert process.file.counts.errors == 1
    assert written.read_bytes() == before
    assert not written.with_name("learned.state.new").exists()


async def test_a_directory_that_cannot_be_written_is_a_trouble_until_it_can(tmp_path: Path) -> None:
    (tmp_path / "directory").write_text("a file")
    process = await Process(tmp_path / "directory" / "learned.state", "e0", interval=0.01).start()
    async with asyncio.timeout(30):
        while not process.file.problem:
            await asyncio.sleep(0.01)
        assert "cannot be written, and a restart forgets" in process.file.problem
        (tmp_path / "directory").unlink()
        while process.file.problem:
            await asyncio.sleep(0.01)
    await process.file.close()
    assert (tmp_path / "directory" / "learned.state").exists()


async def test_of_two_with_one_file_the_second_waits_for_the_first_to_end(written: Path) -> None:
    first = await Process(written, "e0", interval=0.01).start()
    async with asyncio.timeout(30):
        while not first.file.counts.written:
            await asyncio.sleep(0.01)
        second = await Process(written, "e0", interval=0.01).start()
        while not second.file.problem:
            await asyncio.sleep(0.01)
        assert "another scheduler writes there; give each a file of its own" in second.file.problem
        assert second.file.counts.written == 0
        await first.file.close()
        while not second.file.counts.written:
            await asyncio.sleep(0.01)
    assert second.file.problem == ""
    await second.file.close()


async def test_a_directory_that_was_removed_is_made_again_and_one_process_writes_there(tmp_path: Path) -> None:
    path = tmp_path / "state" / "learned.state"
    first, second = Process(path, "e0"), Process(path, "e0")
    await first.file.write()
    rmtree(path.parent)
    await first.file.write()
    assert first.file.problem == "" and path.exists()
    await second.file.write()
    assert "another scheduler writes there" in second.file.problem
    rmtree(path.parent)
    await second.file.write()
    await first.file.write()
    assert "another scheduler writes there" in first.file.problem and second.file.problem == ""
    await second.file.close()
    await first.file.close()
    assert first.file.problem == ""


async def test_a_start_that_fails_keeps_what_was_known(written: Path) -> None:
    """The process ends before any endpoint has joined."""
    process = await Process(written).start()
    await process.file.close()
    assert all((await restarted(written)).knows(*range(10)))


def test_where_it_is() -> None:
    beside = JournalSettings(path="/var/journal")
    assert StateSettings().path(JournalSettings()) == ""
    assert StateSettings().path(beside) == "/var/journal/learned.state"
    assert StateSettings(file="/mine").path(beside) == "/mine"
    assert StateSettings(file="/mine", enabled=False).path(beside) == ""
    config: Config = load("state: {file: /mine, interval: 5s, maxAge: 10m, maxBytes: 1MiB}", need_endpoints=False)
    assert (config.state.interval, config.state.max_age, config.state.max_bytes) == (5.0, 600.0, 1 << 20)


def test_a_file_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    assert read_state(tmp_path / "none", HASHER, MOST) == Stored()


async def test_a_worker_without_a_file_reads_that_of_the_first(written: Path) -> None:
    own = written.with_name(f"{written.name}.worker-1")
    process = await restarted(own)
    assert all(process.knows(*range(10)))
    process.serve(11)
    await process.file.close()
    again = await restarted(own)
    assert again.knows(11) == [True], "it has a file of its own by now"
    await again.file.close()
    old = await restarted(own, max_age=1e-9)
    assert old.knows(1) == [False]
    await old.file.close()
    assert read_state(written, HASHER, MOST).problems == []


async def test_a_worker_whose_file_is_of_a_run_before_takes_that_of_the_first(
    written: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a run with fewer workers was in between."""
    caplog.set_level(logging.INFO, "fairlead")
    own, now = written.with_name(f"{written.name}.worker-1"), time.time()
    monkeypatch.setattr("time.time", lambda: now - 60.0)
    before = await Process(own, "e0", "e1").start()
    before.serve(11)
    await before.file.close()
    monkeypatch.undo()
    process = await restarted(own)
    assert process.knows(1, 11) == [True, False]
    assert f"'file': '{written}'" in said(caplog), "the log says what was read"
    await process.file.close()
    written.unlink()
    process = await restarted(own, max_age=1e-9)
    assert process.knows(1) == [False]
    assert "state.maxAge" in said(caplog), "its own is too old, and there is no other"
    await process.file.close()


async def test_a_new_leader_takes_over_what_the_last_one_learned(
    written: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    successor = await Process(tmp_path / "own.state", "e0", "e1").start()
    successor.serve(20, 21)
    caplog.set_level(logging.INFO)
    await successor.file.inherit(written.read_bytes(), "http://10.0.0.9:9090/learned")
    assert successor.knows(*range(10), 20, 21) == [True] * 10 + [False] * 2
    assert "restored" in said(caplog)
    await successor.join("e2")
    await successor.file.close()
    successor.pipeline.fleet.validate()


async def test_what_is_no_state_file_is_not_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    successor = await Process(tmp_path / "own.state", "e0").start()
    successor.serve(20)
    await successor.file.inherit(b"<html>", "http://10.0.0.9:9090/learned")
    assert successor.knows(20) == [True]
    assert "it is no state file" in said(caplog)
    await successor.file.close()
