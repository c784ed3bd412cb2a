"""The embedded gateway asks the scheduler where it listens."""

import asyncio
import errno
import json
import signal
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest
from ports import free_ports

from fairlead.compat.load import load
from fairlead.config.reload import plan_reload
from fairlead.core.endpoint import Endpoint
from fairlead.core.errors import ConfigError, FairleadError, Unavailable
from fairlead.core.events import EndpointUp
from fairlead.gateway.envoy.clusters import EndpointsFile, PoolWriter
from fairlead.gateway.envoy.gateway import Plan
from fairlead.gateway.envoy.process import CONFIG, UNWATCHED
from fairlead.server import embedded
from fairlead.server.embedded import (
    check_ports,
    check_workers,
    for_workers,
    gateway_options,
    pinned,
    scheduler_command,
    serve_embedded,
    worker_flags,
)
from fairlead.server.running_gateway import RunningGateway
from fairlead.server.supervise import ENDING, ENDS

FILE = "endpoints: ['127.0.0.1:1']\nextProc: {host: '%s', port: 9002}\nals: {port: 9005}\n"


@pytest.mark.parametrize(
    ("host", "dialled"),
    [
        ("", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("127.0.0.2", "127.0.0.2"),
        ("10.0.0.7", "10.0.0.7"),
        ("::", "127.0.0.1"),
        ("fd00::7", "[fd00::7]"),
        ("box.example", "box.example"),
    ],
)
def test_it_dials_the_host_that_the_scheduler_listens_on(host: str, dialled: str) -> None:
    config = load(FILE % host)
    options = gateway_options(config)
    assert (options.ext_proc, options.als) == (f"{dialled}:9002", f"{dialled}:9005")


def test_it_fails_closed_if_that_is_set() -> None:
    assert gateway_options(load(FILE % "")).fail_open
    assert not gateway_options(load(FILE % "" + "gateway: {failOpen: false}\n")).fail_open


def test_pages_that_may_use_it_are_those_of_the_file() -> None:
    assert gateway_options(load(FILE % "")).allowed_origins == ()
    origins = gateway_options(load(FILE % "" + "gateway: {allowedOrigins: [https://app.example]}\n")).allowed_origins
    assert origins == ("https://app.example",)


def test_a_replacement_listens_where_the_gateway_dials() -> None:
    """Whatever the file says by then."""
    flags = pinned(load(FILE % "10.0.0.7"))
    changed = load("endpoints: ['127.0.0.1:1']\nextProc: {port: 1, tls: {certDir: /x}}\n", flags=flags).ext_proc
    assert (changed.host, changed.port, changed.tls) == ("10.0.0.7", 9002, None)
    with_tls = load("endpoints: ['127.0.0.1:1']\nextProc: {tls: {certDir: /x}}\n")
    again = load(FILE % "", flags=pinned(with_tls)).ext_proc
    assert again.tls is not None and again.tls.cert_dir == "/x"


@pytest.mark.parametrize("section", ["extProc", "admin"])
@pytest.mark.parametrize("before", [0, 1])
def test_a_taken_port_is_named_before_the_gateway_starts(section: str, before: int) -> None:
    """If another scheduler has it, Envoy would take that one for ours, and its pool."""
    _, port, second, _ = free_ports(4)
    ports = {"extProc": second, "admin": second} | {section: port - before}
    places = "".join(f"{name}: {{host: 127.0.0.1, port: {number}}}\n" for name, number in ports.items())
    config = load("endpoints: ['127.0.0.1:1']\n" + places)
    with socket.create_server(("127.0.0.1", port)), pytest.raises(Unavailable, match=f"cannot listen on .*:{port}"):
        check_ports(config, 1 + before)
    check_ports(load(f"endpoints: ['127.0.0.1:1']\nadmin: {{port: {second}}}\nextProc: {{port: {port}}}\n"), 1)


def test_a_password_of_the_file_is_on_no_command_line() -> None:
    text = "endpoints: ['127.0.0.1:1']\nreplicas: {via: 'valkey://me:s3cret@host:6379/0'}\n"
    plan = Plan("/gateway", [], ["/gateway/admin-0.sock"], 0.0, 1.0)
    for worker in range(2):
        assert "s3cret" not in str(scheduler_command(load(text), Path("f.yaml"), plan, worker, 2))
    own = worker_flags(load("endpoints: ['127.0.0.1:1']\n"), plan, 1)["replicas"]["via"]
    assert own.startswith("file:///gateway/"), "the workers' own"


def test_only_the_first_worker_answers_autoscalers() -> None:
    """All would give the same answers, and only one can have the port."""
    config = load("endpoints: ['127.0.0.1:1']\nautoscaling: {port: 9100}\n")
    plan = Plan("/gateway", [], ["/gateway/admin-0.sock"], 0.0, 1.0)
    check_workers(config, 3)
    assert worker_flags(config, plan, 0).get("autoscaling") is None
    assert worker_flags(config, plan, 1)["autoscaling"] == {"port": 0}
    taken = load("endpoints: ['127.0.0.1:1']\nautoscaling: {port: 9004}\n")
    with pytest.raises(ConfigError, match=r"9004 is that of autoscaling\.port"):
        check_workers(taken, 3)


def test_files_of_workers_are_beside_those_of_the_first() -> None:
    plan = Plan("/gateway", [], ["/gateway/admin-0.sock"], 0.0, 1.0)
    config = load("endpoints: ['127.0.0.1:1']\njournal: {path: /j}\n")
    paths = [load("endpoints: ['127.0.0.1:1']", flags=worker_flags(config, plan, i)) for i in range(2)]
    assert (paths[1].journal.path, paths[1].state.file) == ("/j/worker-1", "/j/learned.state.worker-1")
    assert not paths[0].state.file, "the journal's directory says it"


def test_workers_share_the_size_of_the_journal() -> None:
    plan = Plan("/gateway", [], ["/gateway/admin-0.sock"], 0.0, 1.0, schedulers=3)
    config = load("endpoints: ['127.0.0.1:1']\njournal: {path: /j, maxBytes: 3Mi}\n")
    check_workers(config, 3)
    each = [load("endpoints: ['127.0.0.1:1']", flags=worker_flags(config, plan, i)).journal.max_bytes for i in range(3)]
    assert each == [1 << 20] * 3
    with pytest.raises(ConfigError, match="4 workers share it and need at least 4Mi"):
        check_workers(config, 4)


def test_a_replacement_knows_the_gateway_and_its_own_number() -> None:
    config = load("endpoints: ['127.0.0.1:1']\n")
    plan = Plan("/gateway", [], ["/gateway/admin-0.sock"], 0.0, 1.0)
    command = scheduler_command(config, Path("f.yaml"), plan, 1, 3)
    gateway = RunningGateway(**json.loads(command[command.index("--running-gateway") + 1]))
    assert gateway == RunningGateway(["/gateway/admin-0.sock"], "/gateway", 1, 3, ending=ENDING, restarted=True)
    assert gateway.pool_file is None, "the first worker writes it"
    assert RunningGateway([], "/gateway").pool_file == plan.endpoints_file


def test_a_file_that_changes_meanwhile_does_not_change_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what the workers begin with, nor the copy for those that follow. Names are resolved between."""
    file, first = tmp_path / "f.yaml", b"endpoints: ['127.0.0.1:1']\n"
    directory = tmp_path / "gateway"
    directory.mkdir()

    def prepared(*given: object, **options: object) -> Plan:
        file.write_text("endpoints: ['127.0.0.1:1']\nseed: 7\n")
        return Plan(str(directory), [], [], 0.0, 1.0)

    monkeypatch.setattr(embedded, "prepare", prepared)
    monkeypatch.setattr(embedded, "check_ports", lambda *given: None)
    monkeypatch.setattr(embedded, "tie_to", lambda parent: None)
    monkeypatch.setattr(embedded.os, "fork", lambda: 0)
    monkeypatch.setattr(embedded.os, "setsid", lambda: None)
    config, _ = serve_embedded(load(first.decode()), file, first, 2)
    assert (config.seed, (directory / CONFIG).read_bytes()) == (None, first)


def test_a_directory_without_room_for_the_gateways_files_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> Plan:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(embedded, "prepare", full)
    monkeypatch.setattr(embedded, "check_ports", lambda *given: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(FairleadError, match=f"to {tmp_path}: No space left on device; set TMPDIR"):
        serve_embedded(load("endpoints: ['127.0.0.1:1']"), tmp_path / "f.yaml", b"", 1)


def test_workers_do_not_start_without_room_for_what_they_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.setattr(embedded, "prepare", lambda *given, **options: Plan(str(own), [], [], 0.0, 1.0))
    monkeypatch.setattr(embedded, "check_ports", lambda *given: None)
    monkeypatch.setattr(embedded.shutil, "disk_usage", lambda path: type("", (), {"total": 1 << 30, "free": 5 << 20}))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(FairleadError, match="No space left on device; set TMPDIR to one with 7 MiB of room"):
        serve_embedded(load("endpoints: ['127.0.0.1:1']\n"), tmp_path / "config", b"", 2)
    assert not own.exists()


def test_a_refused_change_says_what_to_do_with_several_workers() -> None:
    listed = "endpoints: ['127.0.0.1:1']\n"
    before = load(listed)
    new = load(listed + "seed: 3\nkvEvents: {enabled: true, bind: 'tcp://127.0.0.1:7000'}\n")
    found = {problem.path: problem for problem in for_workers(plan_reload(before, new)[1], new, 2)}
    assert found["$.seed"].hint == "restart fairlead serve to apply it, not a worker"
    wrong = found["$.kvEvents.bind"]
    assert wrong.message.startswith("fairlead serve --workers 2 would not start again: workers cannot listen at one")
    assert wrong.hint == "correct the file before a restart"


def test_ctrl_c_waits_until_the_parent_handles_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked: list[set[int]] = []

    def execv(*command: object) -> None:
        blocked.append(signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS))

    monkeypatch.setattr(embedded, "prepare", lambda *given, **options: Plan(str(tmp_path), [], [], 0.0, 1.0))
    monkeypatch.setattr(embedded, "check_ports", lambda *given: None)
    monkeypatch.setattr(embedded.os, "fork", lambda: 1)
    monkeypatch.setattr(embedded.os, "execv", execv)
    serve_embedded(load("endpoints: ['127.0.0.1:1']"), tmp_path / "f.yaml", b"", 1)
    assert blocked[0] >= set(ENDS)


def up(address: str) -> EndpointUp:
    return EndpointUp(Endpoint("e", address))


async def test_endpoints_that_cannot_be_written_for_envoy_are_a_problem_until_they_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[object] = []
    write = EndpointsFile.write
    monkeypatch.setattr(EndpointsFile, "write", lambda file, pool: (tries.append(pool), write(file, pool)))
    monkeypatch.setattr("fairlead.gateway.envoy.clusters.CHECK_S", 0.01)
    (directory := tmp_path / "gateway").mkdir()
    pool = PoolWriter(directory / "endpoints.json")
    directory.rmdir()
    pool.changed(up("127.0.0.1:1"))
    async with asyncio.timeout(30):
        while not pool.problem:
            await asyncio.sleep(0.01)
        assert "it keeps the old ones" in pool.problem
        pool.changed(up("127.0.0.1:2"))
        while len(tries) < 3:
            await asyncio.sleep(0.01)
        directory.mkdir()
        while pool.problem:
            await asyncio.sleep(0.01)
    assert '"port_value": 2' in (directory / "endpoints.json").read_text()
    assert len(caplog.records) == 1
    pool.close()


async def test_a_burst_of_changes_is_written_once_and_soon_in_any_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of endpoints join in many turns of the event loop, and Envoy must not get a part of them."""
    loop, now, due = asyncio.get_running_loop(), 100.0, list[float]()
    call_at = loop.call_at

    def at(when: float, call: Any) -> asyncio.TimerHandle:
        due.append(when)
        return call_at(when, call)

    monkeypatch.setattr(loop, "time", lambda: now)
    monkeypatch.setattr(loop, "call_at", at)
    pool = PoolWriter(tmp_path / "endpoints.json")
    for number in range(60):
        now = 100.0 + number * 0.01
        pool.changed(EndpointUp(Endpoint(f"e{number}", f"10.0.0.{number}:80")))
    pool.close()
    assert due[:23] == pytest.approx([100.02 + number * 0.01 for number in range(23)])
    assert due[23:26] == pytest.approx([100.25] * 3)
    assert due[59] == pytest.approx(100.59), "it is late already"


async def test_a_pool_that_was_removed_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As cleaners of /tmp do. An Envoy that ends writes that of the start, and must not keep it."""
    monkeypatch.setattr("fairlead.gateway.envoy.clusters.CHECK_S", 0.01)
    file = tmp_path / "endpoints.json"
    pool = PoolWriter(file)
    pool.changed(up("127.0.0.1:2"))
    async with asyncio.timeout(30):
        while not file.exists():
            await asyncio.sleep(0.01)
        file.unlink()
        file.write_text("{}")
        while '"port_value": 2' not in file.read_text():
            await asyncio.sleep(0.01)
        file.unlink()
        while not file.exists():
            await asyncio.sleep(0.01)
        (tmp_path / UNWATCHED).touch()
        while "removed and made again" not in pool.problem:
            await asyncio.sleep(0.01)
        (tmp_path / UNWATCHED).unlink()
        while pool.problem:
            await asyncio.sleep(0.01)
    pool.close()
