"""A parent of an older version starts a scheduler from newer files: its command line must be understood."""

import json
from pathlib import Path

import pytest
from command_line import answers, running, until
from ports import free_ports


@pytest.mark.parametrize(
    ("gateway", "writes"),
    [
        (["--gateway-admin={0}/admin-0.sock", "--gateway-pool", "{0}/endpoints.json"], True),  # 0.1.0, at first
        (["--gateway-admin={0}/admin-0.sock", "--gateway-pool", ""], False),  # and another worker than the first
        (["--running-gateway", '{{"admins":["{0}/admin-0.sock"],"directory":"{0}","workers":1,"later":[]}}'], True),
    ],
)
def test_a_scheduler_starts_with_what_an_older_parent_gives(tmp_path: Path, gateway: list[str], writes: bool) -> None:
    ports = free_ports(3)
    file = tmp_path / "fairlead.yaml"
    settings = {"gateway": {"mode": "embedded", "port": ports[0]}, "extProc": {"port": 1}, "admin": {"port": ports[2]}}
    file.write_text(json.dumps({**settings, "endpoints": ["127.0.0.1:1"]}))
    flags = {"extProc": {"host": "", "port": ports[1], "tls": None}, "als": {"enabled": True, "port": ports[1]}}
    given = [each.format(tmp_path) for each in gateway]
    with running(tmp_path, "serve", str(file), "--scheduler-only", *given, "--flags", json.dumps(flags)) as scheduler:
        pool = tmp_path / "endpoints.json"
        page = f"http://127.0.0.1:{ports[2]}/metrics"
        until(lambda: (answers(page) and pool.exists() == writes) or scheduler.poll() is not None, tmp_path)
        assert scheduler.poll() is None, (tmp_path / "serve.log").read_text()
