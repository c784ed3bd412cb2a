"""What the process cannot do is said everywhere, and one broken check hides no other."""

import logging
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fairlead.server.observe import log as log_module
from fairlead.server.observe.exposition import Registry
from fairlead.server.observe.troubles import HOLD_S, Troubles, children_descriptors, descriptors


class Shop:
    def __init__(self) -> None:
        self.now = 100.0
        self.registry = Registry()
        self.troubles = Troubles(self.registry, lambda: self.now)

    def shown(self) -> dict[str, int]:
        lines = self.registry.render().decode().splitlines()
        return {line.split('"')[1]: int(line[-1]) for line in lines if not line.startswith("#")}


def test_it_is_told_once_when_it_begins_and_once_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    shop, state = Shop(), {"reason": ""}
    shop.troubles.watch("journal", lambda: state["reason"])
    with caplog.at_level(logging.INFO, "fairlead"):
        assert (shop.troubles.look(), shop.shown()) == ({}, {"journal": 0})
        state["reason"] = "the disk is full"
        assert shop.troubles.look() == shop.troubles.look() == {"journal": "the disk is full"}
        assert shop.shown() == {"journal": 1}
        state["reason"] = ""
        assert (shop.troubles.look(), shop.shown()) == ({}, {"journal": 0})
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_another_reason_is_logged_once_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    """A server that restarts closes connections and refuses new ones; what remains is why it cannot be used."""
    shop, state = Shop(), {"reason": ""}
    shop.troubles.watch("replicas", lambda: state["reason"])

    def look(reason: str) -> None:
        state["reason"] = reason
        shop.now += 1.0
        shop.troubles.look()

    for reason in ("closed", "port 80 refuses", *(f"its certificate expired {ago} s ago" for ago in range(20))):
        look(reason)
    for _ in range(20):  # a reason that does not last
        look("its certificate expired")
        look("no answer")
    assert [record.fields["reason"] for record in caplog.records] == ["closed", "its certificate expired 5 s ago"]


def test_what_happened_is_told_for_a_while() -> None:
    shop, counts = Shop(), [5]
    shop.troubles.lately("log", lambda: counts[0], "lines are lost")
    assert shop.troubles.look() == {}, "of before"
    counts[0] += 1
    assert "log" in shop.troubles.look()
    shop.now += HOLD_S - 1.0
    counts[0] += 1
    assert "log" in shop.troubles.look()
    shop.now += HOLD_S - 1.0
    assert "log" in shop.troubles.look()
    shop.now += 2.0
    assert shop.troubles.look() == {}


def test_a_check_that_raises_is_a_trouble_and_hides_no_other() -> None:
    shop = Shop()
    shop.troubles.watch("broken", lambda: str(1 // 0))
    shop.troubles.watch("other", lambda: "it is so")
    assert shop.troubles.look() == {
        "broken": "the check failed: ZeroDivisionError: integer division or modulo by zero",
        "other": "it is so",
    }


def test_descriptors_that_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert descriptors() == ""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (5, 5))
    assert "of 5 file descriptors" in descriptors()

    def full(*arguments: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("os.open", full)
    assert descriptors() == "no file or connection can be opened: Too many open files"


def test_descriptors_of_a_child_that_run_out() -> None:
    code = "import os; files = [os.dup(0) for _ in range(25)]; print('open', flush=True); input()"
    command = ["sh", "-c", 'ulimit -n "$0" && exec "$@"', "30", sys.executable, "-c", code, "/gateway/bootstrap-0.json"]
    for most, reason in (("30", "of 30 file descriptors open"), ("60", "")):
        command[3] = most
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdout.readline()
            assert reason in children_descriptors(os.getpid(), "/gateway/bootstrap-")
            assert bool(reason) == bool(children_descriptors(os.getpid(), "/gateway/bootstrap-"))
            assert children_descriptors(os.getpid(), "/other/bootstrap-") == ""
            child.stdin.write(b"\n")


def test_a_child_that_ends_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = "Limit  Soft Limit  Hard Limit  Units\nMax open files  30  30  files\n"
    pages = {"self/children": "8 9 ", "9/cmdline": "envoy", "9/limits": limits}

    def read(path: Path, encoding: str = "utf-8") -> str:
        try:
            return pages["/".join(path.parts[-2:])]
        except KeyError:
            raise ProcessLookupError from None

    monkeypatch.setattr(Path, "glob", lambda path, pattern: [Path("/proc/7/task/self/children")])
    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path).encode())
    monkeypatch.setattr(Path, "stat", lambda path: SimpleNamespace(st_size=29))
    assert "29 of 30 file descriptors open" in children_descriptors(7, "envoy")


def test_without_free_descriptors_children_are_not_looked_at() -> None:
    """Whoever asks every second must not end because of it."""
    code = (
        "import os, resource; from fairlead.server.observe.troubles import children_descriptors\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)); children_descriptors(os.getppid(), 'x')\n"
        "files = [os.dup(0) for _ in range(40 - len(os.listdir('/proc/self/fd')) + 1)]\n"
        "print(repr(children_descriptors(os.getppid(), 'x')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.stderr) == ("''\n", "")


def test_lines_that_cannot_be_written_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    before, level, handlers = log_module.Written.lost, root.level, root.handlers[:]
    try:
        with Path("/dev/full").open("w") as full:
            log_module.setup("info", stream=full)
            log_module.get("test").warning("nobody reads this")
            assert log_module.Written.lost > before
            full.write = lambda text: 0  # type: ignore[method-assign, assignment]
    except OSError:
        pass  # closing flushes
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
