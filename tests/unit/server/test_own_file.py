"""A file that only one process writes, on a disk that may hang."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fairlead.server.own_file import OwnFile


class Disk:
    """Pieces that hang until `goes_on` is set."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces
        self.goes_on, self.begun = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        self.begun.set()
        self.goes_on.wait(30)
        yield from self._pieces


async def test_a_disk_that_hangs_is_an_error_until_it_answers(tmp_path: Path) -> None:
    own, path, disk = OwnFile(), tmp_path / "file", Disk(b"old")
    for pieces in (disk, (b"new",)):
        with pytest.raises(OSError, match=r"the disk has not answered for 0 s"):
            await own.write(path, "held", pieces, 0.05)
    assert not path.exists()
    disk.goes_on.set()
    assert await own.write(path, "held", (b"new",), 30) == 3
    assert path.read_bytes() == b"new"
    own.release()


async def test_a_file_that_is_still_written_is_not_released(tmp_path: Path) -> None:
    own, other, path, disk = OwnFile(), OwnFile(), tmp_path / "file", Disk(b"old")
    with pytest.raises(OSError, match="the disk has not answered"):
        await own.write(path, "held", disk, 0.05)
    own.release()
    with pytest.raises(OSError, match="held"):
        await other.write(path, "held", (b"theirs",), 30)
    disk.goes_on.set()
    async with asyncio.timeout(30):
        while True:
            with suppress(OSError):
                await other.write(path, "held", (b"theirs",), 30)
                break
            await asyncio.sleep(0.01)
    assert path.read_bytes() == b"theirs"
    other.release()


async def test_after_a_cancelled_write_the_next_one_waits(tmp_path: Path) -> None:
    own, path, disk = OwnFile(), tmp_path / "file", Disk(b"first", b"part")
    first = asyncio.create_task(own.write(path, "held", disk, 30))
    await asyncio.to_thread(disk.begun.wait, 30)
    first.cancel()
    second = asyncio.create_task(own.write(path, "held", (b"second",), 30))
    done, _ = await asyncio.wait((first, second), timeout=0.1)
    assert done == {first} and first.cancelled()
    disk.goes_on.set()
    assert await second == 6
    assert path.read_bytes() == b"second"
    own.release()


async def test_a_thread_that_cannot_start_is_an_error_of_that_write_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    own, path = OwnFile(), tmp_path / "file"
    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", refused)
        with pytest.raises(OSError, match="can't start new thread"):
            await own.write(path, "held", (b"lost",), 30)
    assert await own.write(path, "held", (b"kept",), 30) == 4
    own.release()


_HANGS = """
import asyncio, sys
from pathlib import Path
from fairlead.server.own_file import OwnFile
async def main():
    try:
        await OwnFile().write(Path(sys.argv[1]), "held", (), 0.1)
    except OSError as error:
        print(error)
asyncio.run(main())
"""


def test_the_process_ends_although_the_disk_hangs(tmp_path: Path) -> None:
    subprocess.run(["mkfifo", tmp_path / "file.new"], check=True)  # opening it waits for a reader
    ended = subprocess.run(
        [sys.executable, "-c", _HANGS, str(tmp_path / "file")], capture_output=True, text=True, timeout=30, check=True
    )
    assert ended.stdout == "the disk has not answered for 0 s\n"
