"""Directories of gateways that were killed are removed by the next one, and no others."""

import fcntl
import os
import time
from pathlib import Path

from fairlead.gateway.envoy.gateway import remove_leftovers


def gateway(base: Path, name: str, age_s: float = 3600.0, workers: bool = True) -> Path:
    directory = base / f"fairlead-{name}"
    directory.mkdir()
    (directory / "endpoints.json").write_text("{}")
    if workers:
        (directory / "facts" / "default").mkdir(parents=True)
    made = time.time() - age_s
    os.utime(directory, (made, made))
    return directory


def test_only_those_are_removed_that_nobody_runs_in(tmp_path: Path) -> None:
    killed, running = gateway(tmp_path, "killed"), gateway(tmp_path, "running")
    starting, alone = gateway(tmp_path, "starting", age_s=1.0), gateway(tmp_path, "alone", workers=False)
    linked, somewhere = tmp_path / "fairlead-linked", gateway(tmp_path, "somewhere").rename(tmp_path / "somewhere")
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
