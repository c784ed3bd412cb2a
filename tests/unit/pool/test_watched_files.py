"""Following files: one change at a time, whatever its consumer does, and no end that waits for a hung disk."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from fairlead.pool import watched_files
from fairlead.pool.watched_files import WatchedFiles


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_files, "SETTLE_S", 0.01)


@pytest.fixture
async def follow() -> AsyncIterator[Callable[..., WatchedFiles]]:
    made: list[WatchedFiles] = []

    def start(names: Callable[[], list[str]], changed: Any) -> WatchedFiles:
        made.append(WatchedFiles(names, changed, 0.01, "what a test watches"))
        made[-1].start()
        return made[-1]

    yield start
    for one in made:
        await one.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def running() -> int:
    return sum(thread.name == "follows what a test watches" for thread in threading.enumerate())


async def test_the_next_look_comes_after_the_change_was_taken(tmp_path: Path, follow: Any) -> None:
    path = tmp_path / "a"
    path.write_text("1")
    seen: list[str] = []
    gate = asyncio.Event()

    async def changed() -> None:
        seen.append(path.read_text())
        await gate.wait()

    one = follow(lambda: [str(path)], changed)
    await until(lambda: seen == ["1"])
    path.write_text("22")
    looks = 0

    def names() -> list[str]:
        nonlocal looks
        looks += 1
        return []

    async def nothing() -> None:
        pass

    beside = follow(names, nothing)  # it looks as often, which shows that there was time for it
    await until(lambda: looks >= 5)
    assert seen == ["1"], "one at a time"
    await beside.close()
    gate.set()
    await until(lambda: seen == ["1", "22"])
    await one.close()
    await until(lambda: not running())


async def test_following_goes_on_after_a_consumer_that_raises(tmp_path: Path, follow: Any) -> None:
    path = tmp_path / "a"
    path.write_text("1")
    seen: list[str] = []
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))

    async def changed() -> None:
        seen.append(path.read_text())
        raise ValueError("not today")

    follow(lambda: [str(path)], changed)
    await until(lambda: seen == ["1"])
    path.write_text("22")
    await until(lambda: seen == ["1", "22"])
    await until(lambda: len(told) == 2)
    assert [str(one["exception"]) for one in told] == ["not today"] * 2
    assert "what a test watches" in told[0]["message"]


async def test_files_that_could_not_be_read_are_taken_again(tmp_path: Path, follow: Any) -> None:
    (tmp_path / "a").write_text("1")
    tries = 0

    async def changed() -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            followed.retry()

    followed = follow(lambda: [str(tmp_path / "a")], changed)
    await until(lambda: tries == 3)
    looks = 0

    def names() -> list[str]:
        nonlocal looks
        looks += 1
        return []

    async def nothing() -> None:
        pass

    follow(names, nothing)
    await until(lambda: looks >= 5)
    assert tries == 3


async def test_closing_ends_a_change_that_is_being_taken(tmp_path: Path, follow: Any) -> None:
    (tmp_path / "a").write_text("1")
    begun, ended = asyncio.Event(), asyncio.Event()

    async def changed() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    one = follow(lambda: [str(tmp_path / "a")], changed)
    await begun.wait()
    await one.close()
    assert ended.is_set()
    await until(lambda: not running())


async def test_a_hung_disk_holds_up_neither_the_loop_nor_the_end(tmp_path: Path, follow: Any) -> None:
    hung, free = threading.Event(), threading.Event()

    def names() -> list[str]:
        hung.set()
        free.wait(30)
        return [str(tmp_path)]

    async def changed() -> None:
        raise AssertionError("it was closed")

    one = follow(names, changed)
    await until(hung.is_set)
    async with asyncio.timeout(5):
        await one.close()
    assert running() == 1
    free.set()
    await until(lambda: not running())


async def test_what_was_noted_is_no_change_and_what_is_away_is_one(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("1")
    count = 0

    async def changed() -> None:
        nonlocal count
        count += 1

    looks = 0

    def names() -> list[str]:
        nonlocal looks
        looks += 1
        return [str(path)]

    one = WatchedFiles(names, changed, 0.01)
    await one.note()
    one.start()
    before = looks
    await until(lambda: looks > before + 2)
    assert count == 0
    os.unlink(path)
    await until(lambda: count == 1)
    path.write_text("1")
    await until(lambda: count == 2)
    await one.close()
