"""Directories of gateways that were killed are removed by the next one, and no others."""

import fcntl
import os
import tempfile
import time
from pathlib import Path

from fairlead.gateway.envoy.gateway import remove_leftovers


def gateway(base: Path, age_s: float = 3600.0, workers: bool = True) -> Path:
    directory = Path(tempfile.mkdtemp(prefix="fairlead-", dir=base))
    (directory / "endpoints.json").write_text("{}")
    if workers:
        (directory / "facts" / "default").mkdir(parents=True)
    made = time.time() - age_s
    os.utime(directory, (made, made))
    return directory


def test_only_those_are_removed_that_nobody_runs_in(tmp_path: Path) -> None:
    killed, running = gateway(tmp_path), gateway(tmp_path)
    starting, alone = gateway(tmp_path, age_s=1.0), gateway(tmp_path, workers=False)
    linked, somewhere = tmp_path / "fairlead-abcdefg_", gateway(tmp_path).rename(tmp_path / "somewhere")
    linked.symlink_to(somewhere)
    lock = os.open(running, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        remove_leftovers(tmp_path)
    finally:
        os.close(lock)
    assert set(tmp_path.iterdir()) == {running, starting, alone, linked, somewhere}
    assert not killed.exists()
    assert (somewhere / "facts").exists()


def test_directories_of_others_stay(tmp_path: Path) -> None:
    named = gateway(tmp_path).rename(tmp_path / "fairlead-pool")
    shared, empty = gateway(tmp_path), gateway(tmp_path)
    shared.chmod(0o755)
    (empty / "endpoints.json").unlink()
    os.utime(empty, (0, 0))
    remove_leftovers(tmp_path)
    assert set(tmp_path.iterdir()) == {named, shared, empty}
