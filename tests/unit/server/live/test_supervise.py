"""The parent of the embedded gateway: small, quick to react, and sure of its children's ends."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import fairlead
from fairlead.gateway.envoy.admin import Vitals
from fairlead.server import supervise
from fairlead.server.supervise import DRAIN_SECONDS, ENDS, Child, Parent, SchedulerFailed, reap_adopted

_PR_SET_CHILD_SUBREAPER = 36
SOURCES = str(Path(fairlead.__file__).parents[1])


class Gateway:
    """An Envoy that always starts, and counts what nobody scheduled."""

    def __init__(self) -> None:
        #: Whether it listens to clients as soon as it is started.
        self.quick = True
        self.stopped: list[float] = []
        #: Whether requests run for longer than any grace.
        self.busy = False
        self.admins: list[Any] = [self]
        #: How often its removed files were written.
        self.written = 0
        #: How many requests it balanced by itself.
        self.unscheduled = 0

    async def start(self) -> None:
        if not self.quick:
            await asyncio.Event().wait()

    async def stop(self, grace: float) -> None:
        self.stopped.append(grace)
        if self.busy and grace:
            await asyncio.Event().wait()

    def write_again(self) -> None:
        self.written += 1

    async def vitals(self) -> Vitals:
        return Vitals(self.unscheduled, 0.0)


def child(code: str, stdin: int = 0) -> int:
    """The id of a process that runs `code` and is waited for by nobody."""
    command, inputs = [sys.executable, "-I", "-S", "-c", code], [(os.POSIX_SPAWN_DUP2, stdin, 0)]
    return os.posix_spawn(sys.executable, command, os.environ, file_actions=inputs, setsid=True)


def parent(gateway: Gateway, first: int, again: str = "") -> Parent:
    made: Any = gateway
    return Parent(made, [(first, [sys.executable, "-I", "-S", "-c", again])])


def test_it_imports_what_supervising_needs_and_no_more() -> None:
    code = (
        "import sys; sys.modules['ssl'] = None; sys.path.append(sys.argv[1]); import fairlead.server.supervise;"
        "print(*sys.modules); text = open('/proc/self/smaps_rollup').read();"
        "print(int(text.split('Rss:')[1].split()[0]) / 1024)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, SOURCES], capture_output=True, text=True, check=True, timeout=60
    )
    modules, megabytes = done.stdout.splitlines()
    heavy = {
        "numpy",
        "aiohttp",
        "msgspec",
        "pydantic",
        "yaml",
        "typer",
        "grpc",
        "fairlead.config",
        "fairlead.core.fleet",
    }
    assert not heavy & set(modules.split())
    assert float(megabytes) <= 20.0


@pytest.mark.parametrize(("code", "expected"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9)])
async def test_a_childs_end_is_told(code: str, expected: int) -> None:
    one = Child(child(code))
    async with asyncio.timeout(20):
        while one.runs:
            one.reap()
            await asyncio.sleep(0.005)
    assert await one.wait() == expected
    one.signal(signal.SIGKILL)  # nobody is hit
    one.reap()


@pytest.mark.parametrize(("code", "quick"), [(2, True), (2, False), (1, False)])
async def test_a_first_scheduler_that_cannot_start_ends_all_with_its_code(code: int, quick: bool) -> None:
    """Its configuration cannot be used, or a port is taken: 1, which costs no client anything before it can connect."""
    gateway = Gateway()
    gateway.quick = quick
    with pytest.raises(SchedulerFailed) as failed:
        async with asyncio.timeout(20):
            await parent(gateway, child(f"raise SystemExit({code})")).run()
    assert failed.value.code == code
    assert 0.0 in gateway.stopped


async def test_processes_that_a_dead_scheduler_leaves_are_collected(tmp_path: Path) -> None:
    """As process 1 of a container, the parent adopts them. Exit codes of its own children are not lost."""
    left = tmp_path / "left"
    leader = "if not os.fork(): os.setsid(); os._exit(0)"
    told = f"if pid: open({str(left)!r}, 'w').write(str(pid)); os._exit(1)"
    first = f"import os\n{leader}\npid = os.fork()\n{told}\nos.read(0, 1)"
    held, release = os.pipe()
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        pid = child(first, held)
        own = await asyncio.create_subprocess_exec("/bin/sh", "-c", "exit 7", start_new_session=True)
        made = parent(Gateway(), pid, "import time; time.sleep(60)")
        running = asyncio.create_task(made.run())
        async with asyncio.timeout(20):
            while not left.exists() or not left.read_text():
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.3)  # the first scheduler ended, and the next one runs
            os.close(held)
            os.close(release)  # the process that it left ends
            while Path("/proc", left.read_text()).exists():
                await asyncio.sleep(0.005)
            assert await own.wait() == 7
            os.kill(os.getpid(), signal.SIGTERM)
            await running
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.mark.parametrize("setsid", [True, False])
def test_exit_codes_of_our_own_children_are_left_to_who_started_them(setsid: bool) -> None:
    own = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 7"], os.environ, setsid=setsid)
    os.waitid(os.P_PID, own, os.WEXITED | os.WNOWAIT)
    reap_adopted()
    assert os.waitstatus_to_exitcode(os.waitpid(own, 0)[1]) == 7


def test_a_thread_that_has_just_ended_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: [folder / "0" / "children"])
    reap_adopted()


@pytest.mark.parametrize("code", [1, 3])
async def test_a_scheduler_that_dies_is_followed_by_another_one(tmp_path: Path, code: int) -> None:
    marks = tmp_path / "marks"
    mark = f"import os, signal; open({str(marks)!r}, 'a').write('x')"
    again = f"{mark}; os.kill(os.getppid(), signal.SIGTERM); signal.pause()"
    gateway = Gateway()
    async with asyncio.timeout(20):
        await parent(gateway, child(f"raise SystemExit({code})"), again).run()
    assert marks.read_text() == "x", "the second one ran, and was ended with its parent"
    assert gateway.stopped[0] > 0, "clients first"
    assert gateway.written == 1, "before the second one read what the file contained at the start"


async def test_workers_that_die_together_are_one_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervise, "ASKED_AGAIN_S", 0.5)
    pids = tmp_path / "pids"
    again = f"import os, signal; open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n'); signal.pause()"
    gateway: Any = Gateway()
    schedulers = [(child("raise SystemExit(3)"), [sys.executable, "-I", "-S", "-c", again]) for _ in range(2)]
    running = asyncio.create_task(Parent(gateway, schedulers).run())

    def reports() -> list[int]:
        lines = [record for record in caplog.records if "routed requests without" in record.message]
        return [vars(record)["fields"]["requests"] for record in lines]

    async with asyncio.timeout(20):
        while gateway.written < 2:
            await asyncio.sleep(0.005)
        gateway.unscheduled = 10
        while not reports():
            await asyncio.sleep(0.005)
        os.kill(int(pids.read_text().split()[0]), signal.SIGKILL)
        while gateway.written < 3:
            await asyncio.sleep(0.005)
        gateway.unscheduled = 15
        while 5 not in reports():
            await asyncio.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)
        await running
    assert reports() == [10, 5]


async def test_a_scheduler_that_cannot_start_with_other_files_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (package := tmp_path / "__init__.py").touch()
    monkeypatch.setattr(fairlead, "__file__", str(package))
    gateway, said = Gateway(), "Fairlead's files have changed since this process started"
    running = asyncio.create_task(parent(gateway, child("raise SystemExit(3)"), "raise SystemExit(2)").run())
    async with asyncio.timeout(20):
        while "cannot start with its configuration" not in caplog.text:
            await asyncio.sleep(0.005)
        assert said not in caplog.text
        os.utime(package, (1, 1))
        while said not in caplog.text:
            await asyncio.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)
        await running


def listening(said: Path, **handlers: str) -> int:
    """The id of a process that says `up`, and runs code at signals, by their names. A signal may come as soon as `up`
    can be read: a buffered file would refuse a handler that writes then, and `signal.pause` could miss it."""
    code = f"import os, signal, sys, time\nout = os.open({str(said)!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)\n"
    code += "say = lambda word: os.write(out, word + b'\\n')\n"
    code += "".join(f"signal.signal(signal.{name}, lambda *_: {handler})\n" for name, handler in handlers.items())
    return child(code + "say(b'up')\nwhile True: time.sleep(0.01)\n")


async def until_up(said: Path) -> None:
    await asyncio.sleep(0)  # the parent handles signals from its first step on, also if the child is up before it
    while not said.exists() or "up" not in said.read_text():
        await asyncio.sleep(0.005)


async def test_the_end_is_told_before_it_comes(tmp_path: Path) -> None:
    """SIGRTMIN lets those who wait go while requests run, SIGTERM drains."""
    said = tmp_path / "said"
    pid = listening(said, SIGRTMIN="say(b'ending')", SIGTERM="sys.exit(0)")
    gateway = Gateway()
    gateway.busy = True
    running = asyncio.create_task(parent(gateway, pid).run())
    async with asyncio.timeout(20):
        await until_up(said)
        os.kill(os.getpid(), signal.SIGTERM)
        while said.read_text() != "up\nending\n":
            await asyncio.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)
        await running


async def test_a_signal_before_the_parent_can_handle_it_counts(tmp_path: Path) -> None:
    """It is blocked from before exec on. An interpreter that still imports would print a traceback."""
    said = tmp_path / "said"
    pid = listening(said, SIGRTMIN="None", SIGTERM="sys.exit(0)")
    await until_up(said)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    try:
        async with asyncio.timeout(20):
            await parent(Gateway(), pid).run()
    finally:
        usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, usual)


async def test_a_second_signal_ends_what_still_runs(tmp_path: Path) -> None:
    said = tmp_path / "said"
    pid = listening(said, SIGRTMIN="None", SIGTERM="say(b'drains')", SIGINT="sys.exit(0)")
    gateway = Gateway()
    gateway.busy = True
    running = asyncio.create_task(parent(gateway, pid).run())
    async with asyncio.timeout(20):
        await until_up(said)
        os.kill(os.getpid(), signal.SIGTERM)
        while not gateway.stopped:
            await asyncio.sleep(0.005)
        os.kill(os.getpid(), signal.SIGHUP)
        assert not running.done()
        os.kill(os.getpid(), signal.SIGINT)
        await running
    assert said.read_text() in ("up\n", "up\ndrains\n"), "both signals may be there before it looks, SIGINT first"
    assert gateway.stopped == [DRAIN_SECONDS, 0.0]


def test_a_child_does_not_end_at_signals_that_end_nothing(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    code = "import signal, sys; open(sys.argv[1], 'w').write(str([signal.getsignal(n).name for n in (1, 10, 12)]))"
    pid = supervise.spawn_tied([sys.executable, "-I", "-S", "-c", code, str(shown)])
    os.waitpid(pid, 0)
    assert shown.read_text() == str(["SIG_IGN"] * 3)
