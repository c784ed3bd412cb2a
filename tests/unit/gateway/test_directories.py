"""Secrets of processes that were killed do not stay."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fairlead.gateway.directories import temporary_directory

KILLED = """
import sys
from fairlead.gateway.directories import temporary_directory
with temporary_directory("fairlead-epp-") as directory:
    (directory / "tls.key").write_text("secret")
    print(flush=True)
    sys.stdin.read()
"""


def test_the_next_process_removes_what_a_killed_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    others = {tmp_path / "fairlead-epp-begun_00", tmp_path / "fairlead-epp-mine"}
    for path in others:
        path.mkdir(mode=0o700)
    with subprocess.Popen([sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        (running,) = set(tmp_path.iterdir()) - others
        with temporary_directory("fairlead-epp-") as own:
            assert set(tmp_path.iterdir()) == {running, own, *others}, "it runs"
        process.send_signal(signal.SIGKILL)
    assert (running / "tls.key").exists()
    with temporary_directory("fairlead-epp-") as own:
        assert set(tmp_path.iterdir()) == {own, *others}
        assert own.stat().st_mode & 0o777 == 0o700
    assert set(tmp_path.iterdir()) == others
