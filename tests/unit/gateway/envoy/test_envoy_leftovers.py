"""Directories of gateways that were killed are removed by the next one, and no others."""

import fcntl
import os
import tempfile
import time
from pathlib import Path

import pytest

from fairlead.gateway.envoy.gateway import prepare, remove_leftovers
from fairlead.gateway.envoy.options import Options


def gateway(base: Path, age_s: float = 0.0, listens: bool = True) -> Path:
    directory = Path(tempfile.mkdtemp(prefix="fairlead-", dir=base))
    for name in ("endpoints.json", "listeners.json", *(() if listens else ("listeners-later.json",))):
        (directory / name).write_text("{}")
    (directory / "facts" / "default").mkdir(parents=True)
    made = time.time() - age_s
    os.utime(directory, (made, made))
    return directory


def test_only_those_are_removed_that_nobody_runs_in(tmp_path: Path) -> None:
    killed, running, begun = gateway(tmp_path), gateway(tmp_path), gateway(tmp_path, 3600.0, listens=False)
    before_the_clock_was_set_back = gateway(tmp_path, -3600.0, listens=False)
    starting = gateway(tmp_path, listens=False)
    linked, somewhere = tmp_path / "fairlead-abcdefg_", gateway(tmp_path).rename(tmp_path / "somewhere")
    linked.symlink_to(somewhere)
    lock = os.open(running, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        remove_leftovers(tmp_path)
    finally:
        os.close(lock)
    assert set(tmp_path.iterdir()) == {running, starting, linked, somewhere}
    assert not killed.exists()
    assert not begun.exists()
    assert not before_the_clock_was_set_back.exists()
    assert (somewhere / "facts").exists()


def test_directories_of_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = gateway(tmp_path).rename(tmp_path / "fairlead-pool")
    shared, empty = gateway(tmp_path), gateway(tmp_path)
    shared.chmod(0o755)
    for name in ("endpoints.json", "listeners.json"):
        (empty / name).unlink()
    os.utime(empty, (0, 0))
    remove_leftovers(tmp_path)
    assert set(tmp_path.iterdir()) == {named, shared, empty}
    theirs, own = gateway(tmp_path), os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    remove_leftovers(tmp_path)
    assert theirs.exists()


def test_a_gateway_that_was_only_prepared_stays(tmp_path: Path) -> None:
    directories = [Path(prepare(Options(port=0), binary="/bin/true", directory=tmp_path).directory) for _ in range(2)]
    assert set(tmp_path.iterdir()) == set(directories)


def test_a_gateway_that_writes_its_files_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, exists = gateway(tmp_path, listens=False), Path.exists
    files = [directory / name for name in ("listeners-later.json", "listeners.json")]
    for file in files:
        file.unlink()

    def written_after_the_first_look(path: Path) -> bool:
        found = exists(path)
        for file in files:
            file.write_text("{}")
        return found

    monkeypatch.setattr(Path, "exists", written_after_the_first_look)
    remove_leftovers(tmp_path)
    assert exists(directory)
