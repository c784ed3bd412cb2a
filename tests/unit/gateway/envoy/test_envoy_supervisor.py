"""The supervisor with small scripts in place of Envoy."""

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tcp import TcpServer

from fairlead.gateway.envoy import supervisor
from fairlead.gateway.envoy.admin import EnvoyAdmin, GatewayError
from fairlead.gateway.envoy.supervisor import Supervisor


class Ready(EnvoyAdmin):
    """Says what it is told to say."""

    def __init__(self, *answers: bool) -> None:
        super().__init__()
        self.answers = list(answers)

    async def ready(self, command: Sequence[str]) -> bool:
        return self.answers.pop(0) if self.answers else True


def make(script: str, admin: EnvoyAdmin | None = None, **settings: float) -> Supervisor:
    return Supervisor([sys.executable, "-c", script], admin or Ready(), on_restart=lambda: None, **settings)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    "body", [b"[]", b'"ok"', b"1", b"{}", b"\xff", b'{"state": "LIVE", "command_line_options": null}']
)
async def test_another_server_at_the_admin_port_is_no_envoy_of_ours(body: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + body)

    async with TcpServer(answer) as server:
        assert not await EnvoyAdmin(port=server.port).ready(["envoy", "-c", "bootstrap.json"])


async def test_starts_when_ready_and_ends_when_told() -> None:
    admin = Ready(False, False, True)
    child = make("import time; time.sleep(60)", admin)
    await child.start()
    pid = child.pid
    assert admin.answers == [] and alive(pid)
    assert os.getpgid(pid) == pid, "Ctrl-C at our terminal must not reach it"
    await child.stop()
    assert not alive(pid) and child.pid == 0 and child.restarts == 0


async def test_a_start_that_ends_is_explained() -> None:
    script = "import sys; print('[critical][main] bad luck', file=sys.stderr); sys.exit(3)"
    with pytest.raises(GatewayError, match=r"Envoy ended with code 3:\nbad luck"):
        await make(script, Ready(*[False] * 1000)).start()


@pytest.mark.parametrize("error", [BlockingIOError(11, "no process"), RuntimeError("can't start new thread")])
async def test_a_limit_of_processes_is_named(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refused)
    with pytest.raises(GatewayError, match="limit of processes"):
        await make("").start()


async def test_a_start_that_is_never_ready_is_given_up() -> None:
    child = make("import time; print('hm', flush=True); time.sleep(60)", Ready(*[False] * 1000), start_timeout=0.2)
    with pytest.raises(GatewayError, match=r"not ready after 0\.2 s"):
        await child.start()
    assert child.pid == 0


async def test_a_cancelled_start_leaves_nothing() -> None:
    child = make("import time; time.sleep(60)", Ready(*[False] * 1000))
    task = asyncio.create_task(child.start())
    async with asyncio.timeout(10):
        while not child.pid:
            await asyncio.sleep(0.01)
    pid = child.pid
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not alive(pid)


async def test_it_is_restarted_as_often_as_it_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_FIRST", 0.01)
    told: list[int] = []
    count = tmp_path / "count"
    count.write_text("")
    script = (
        f"import time; f = open({str(count)!r}, 'a'); f.write('x'); f.close()\n"
        f"time.sleep(0.05 if len(open({str(count)!r}).read()) < 4 else 60)"
    )
    child = Supervisor([sys.executable, "-c", script], Ready(), on_restart=lambda: told.append(child.restarts))
    await child.start()
    async with asyncio.timeout(20):
        while len(count.read_text()) < 4:
            await asyncio.sleep(0.01)
    assert child.restarts == 3 and told == [1, 2, 3] and child.pid
    await child.stop()
    assert child.pid == 0 and child.restarts == 3


async def test_it_is_killed_when_it_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    lines: list[str] = []
    monkeypatch.setattr(supervisor.access, "info", lines.append)
    child = make(script, kill_after=0.1)
    await child.start()
    async with asyncio.timeout(10):
        while not lines:
            await asyncio.sleep(0.01)
    pid = child.pid
    await child.stop()
    assert not alive(pid)


async def test_output_becomes_log_records_whatever_it_is(caplog: pytest.LogCaptureFixture) -> None:
    script = (
        "import sys, time\n"
        "e = sys.stderr.buffer\n"
        "e.write(b'[error][upstream] a\\n' + b'y' * 200_000 + b'\\n' + b'\\xff\\xfe\\n\\n[info][x] b\\n')\n"
        "e.write(b'Couldn\\'t respect usage limit of 33554432 and OOM is likely\\nno newline')\n"
        "e.flush()\n"
        "print('{\"status\": 200}', flush=True)\n"
        "time.sleep(0.1)"
    )
    caplog.set_level(logging.INFO)
    child = make(script, Ready(*[False] * 1000))
    with pytest.raises(GatewayError):
        await child.start()
    records = {(r.levelno, r.name, r.getMessage()[:30]) for r in caplog.records}
    assert (logging.ERROR, "fairlead.gateway", "envoy upstream: a") in records
    assert (logging.INFO, "fairlead.gateway", "envoy x: b") in records
    assert (logging.WARNING, "fairlead.gateway", "envoy: no newline") in records
    assert (logging.WARNING, "fairlead.gateway", "envoy: \ufffd\ufffd") in records
    assert "OOM" not in caplog.text, "the limit is our own"
    assert (logging.INFO, "fairlead.gateway.access", '{"status": 200}') in records
    assert max(len(r.getMessage()) for r in caplog.records) < 20_000
