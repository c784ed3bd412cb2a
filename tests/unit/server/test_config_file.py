"""The configuration file is followed: what is told, and what is not."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fairlead.compat.load import load
from fairlead.config.schema import Config
from fairlead.core.errors import ConfigError
from fairlead.gateway.envoy.authentication import new_key
from fairlead.gateway.envoy.process import KEYS
from fairlead.server import followed_files
from fairlead.server.followed_files import ConfigFile, FollowedKeys, followed_keys

ONE = "endpoints: ['10.0.0.1:1']\n"


class Heard:
    def __init__(self) -> None:
        self.weights: list[float] = []
        self.refused: list[list[str]] = []

    def changed(self, config: Config) -> None:
        self.weights.append(config.policy.scorers[0].weight)

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not true():
                await asyncio.sleep(0.01)


def text(weight: float) -> str:
    return f"{ONE}scorers: [{{type: load-aware, weight: {weight}}}]\n"


def replace(file: Path, content: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(content)
    os.replace(new, file)


@pytest.fixture
async def following(tmp_path: Path):  # type: ignore[no-untyped-def]
    """(what was heard, the file)."""
    file = tmp_path / "f.yaml"
    file.write_text(text(1))
    heard = Heard()
    follower = ConfigFile(file, heard.changed, heard.refused.append, poll_s=0.01)
    follower.start()
    await heard.until(lambda: heard.weights == [1.0])
    heard.weights.clear()
    yield heard, file
    await follower.close()


async def test_new_contents_are_told_once(following: tuple[Heard, Path]) -> None:
    heard, file = following
    replace(file, text(2))
    await heard.until(lambda: heard.weights == [2.0])
    replace(file, text(2))
    replace(file, text(3))
    await heard.until(lambda: heard.weights == [2.0, 3.0])
    assert heard.refused == []


async def test_a_broken_file_is_reported_once_and_a_good_one_told_again(following: tuple[Heard, Path]) -> None:
    heard, file = following
    replace(file, text(2) + "log: {level: loud}\n")
    await heard.until(lambda: bool(heard.refused))
    assert heard.refused[0][0].startswith(f"{file}:3: $.log.level: unknown value 'loud'")
    os.utime(file, (1, 1))
    replace(file, text(5))
    await heard.until(lambda: heard.weights == [5.0])
    assert len(heard.refused) == 1


async def test_a_file_that_goes_away_and_comes_back(following: tuple[Heard, Path]) -> None:
    heard, file = following
    file.unlink()
    await heard.until(lambda: bool(heard.refused))
    assert "cannot be read: No such file" in heard.refused[0][0]
    replace(file, text(4))
    await heard.until(lambda: heard.weights == [4.0])


async def test_a_file_that_could_not_be_read_is_tried_again(
    following: tuple[Heard, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after chmod, which stat does not show."""
    heard, file = following
    with monkeypatch.context() as unreadable:
        unreadable.setattr(followed_files, "read_bytes", _refuse)
        replace(file, text(2))
        await heard.until(lambda: bool(heard.refused))
    await heard.until(lambda: heard.weights == [2.0])
    assert heard.refused == [["no right to read it"]]


def _refuse(*_: object) -> None:
    raise ConfigError("no right to read it")


async def test_a_file_that_is_missing_from_the_start_on_is_reported(tmp_path: Path) -> None:
    """As beside a gateway that runs. The last valid content is kept for the scheduler after this one."""
    file, keep, heard = tmp_path / "f.yaml", tmp_path / "last.yaml", Heard()
    follower = ConfigFile(file, heard.changed, heard.refused.append, poll_s=0.01, keep=keep)
    follower.start()
    await heard.until(lambda: bool(heard.refused))
    assert "cannot be read: No such file" in heard.refused[0][0]
    replace(file, text(2))
    await heard.until(lambda: heard.weights == [2.0])
    replace(file, "[")
    await heard.until(lambda: len(heard.refused) == 2)
    await follower.close()
    assert keep.read_text() == text(2)


async def test_a_swapped_symlink_is_a_change(tmp_path: Path) -> None:
    """How Kubernetes updates a ConfigMap volume."""
    for name, weight in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f.yaml").write_text(text(weight))
    link = tmp_path / "data"
    link.symlink_to("a")
    heard = Heard()
    follower = ConfigFile(link / "f.yaml", heard.changed, heard.refused.append, poll_s=0.01)
    follower.start()
    await heard.until(lambda: heard.weights == [1.0])
    (tmp_path / "new").symlink_to("b")
    os.replace(tmp_path / "new", link)
    await heard.until(lambda: heard.weights == [1.0, 2.0])
    await follower.close()


async def test_following_outlives_a_consumer_that_raises(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(text(1))
    raised: list[object] = []
    heard = Heard()

    def changed(config: Config) -> None:
        heard.changed(config)
        raise RuntimeError("oops")

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context["exception"]))
    follower = ConfigFile(file, changed, heard.refused.append, poll_s=0.01)
    follower.start()
    for weight in (1.0, 2.0):
        replace(file, text(weight))
        await heard.until(lambda weight=weight: heard.weights[-1:] == [weight])  # type: ignore[misc]
    await follower.close()
    assert len(raised) == 2


async def test_keys_that_could_not_be_used_are_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whether their file cannot be read, or the filter's file not be written, say on a full disk."""
    into = tmp_path / KEYS
    (tmp_path / "keys.txt").write_text("a key")
    unreadable, full = [ConfigError("no right")] * 3, [OSError(28, "no space")] * 3

    def read() -> str:
        if unreadable:
            raise unreadable.pop()
        return "a key"

    def write(file: Path, keys: str) -> None:
        if full:
            raise full.pop()
        file.write_text(keys)

    keys = FollowedKeys("API keys", str(tmp_path / "keys.txt"), read, into, write)
    await keys.begin()
    async with asyncio.timeout(20):
        while not into.exists():
            await asyncio.sleep(0.01)
    await keys.close()
    assert keys.unusable == ""
    assert len([record for record in caplog.records if "cannot load" in record.message]) == 2, "once per problem"


async def test_a_filter_that_was_removed_is_written_again(tmp_path: Path) -> None:
    """As cleaners of /tmp do. Without it, Envoy does not start again."""
    file, into = tmp_path / "keys.txt", tmp_path / KEYS
    file.write_text(f"{new_key('a')[1].digest} a\n")
    (keys,) = followed_keys(load(f"{ONE}gateway: {{keys: {{file: '{file}'}}}}").gateway, tmp_path)
    await keys.begin()
    first = into.read_bytes()
    file.write_text(f"{new_key('a')[1].digest} a\n")
    async with asyncio.timeout(20):
        while (second := into.read_bytes()) == first:
            await asyncio.sleep(0.01)
        into.unlink()
        while not into.exists():
            await asyncio.sleep(0.01)
        assert into.read_bytes() == second
        file.write_text("no key\n")
        while not keys.unusable:
            await asyncio.sleep(0.01)
        into.unlink()
        while not into.exists():
            await asyncio.sleep(0.01)
    assert into.read_bytes() == second, "the keys read before stay in force"
    await keys.close()
