"""Troubles: what this process cannot do now. The log, metrics, `/readyz` and the dashboard show them within a second.

A check returns the reason in a few words; empty = no trouble. All checks run twice a second. A check that raises counts
as a trouble itself, and the other checks still run.
"""

import os
import re
import resource
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path

from msgspec import Struct

from fairlead.server.observe.exposition import Registry
from fairlead.server.observe.log import Written, get

log = get("troubles")

#: Seconds that a momentary event is shown.
HOLD_S = 60.0
#: Seconds that a reason that replaces another must last before it is logged.
LASTS_S = 5.0
_NUMBERS = re.compile(r"\d+")
#: There is a trouble if at least this share of the file descriptors is in use.
_FEW_LEFT = 0.9

#: Names in one text, at most.
NAMED = 3

Check = Callable[[], str]


def named(names: Sequence[str]) -> str:
    """The first names in one text, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


class Happened(Struct, eq=False):
    """Says which counters have grown within the last `_minute` seconds. The counters never fall. They begin at 0, or
    where `begin` says."""

    _minute: float
    #: Counter's name → its last value, and when it last grew (clock seconds).
    _seen: dict[str, tuple[float, float]] = {}

    def begin(self, name: str, count: float) -> None:
        self._seen[name] = count, -inf

    def lately(self, name: str, count: float, now: float) -> bool:
        """Whether `count` grew within the last minute, as far as one saw it: call this all the time."""
        before, grew = self._seen.get(name, (0.0, -inf))
        if count > before:
            grew = now
        self._seen[name] = count, grew
        return now - grew < self._minute


class Troubles:
    """Runs the checks. Call `look()` twice a second. `now` returns clock seconds."""

    def __init__(self, registry: Registry, now: Callable[[], float]) -> None:
        self._now = now
        self._checks: dict[str, Check] = {}
        self._happened = Happened(HOLD_S)
        #: Present troubles: name → reason.
        self.present: dict[str, str] = {}
        #: Of each present trouble, without numbers: the logged reason, the present one, and its beginning.
        self._reasons: dict[str, tuple[str, str, float]] = {}
        text = "1 for what this process cannot do now; see the log."
        registry.follow("gauge", "fairlead_trouble", text, self._shown, "what")

    def watch(self, what: str, check: Check) -> None:
        """Add a check under the name `what`. It returns a reason while there is a trouble, else an empty text."""
        self._checks[what] = check

    def lately(self, what: str, count: Callable[[], float], reason: str) -> None:
        """Report `reason` while `count` grows, and for `HOLD_S` after that."""
        self._happened.begin(what, count())
        self._checks[what] = lambda: reason if self._happened.lately(what, count(), self._now()) else ""

    def look(self) -> dict[str, str]:
        """Run all checks and log changes; returns the present troubles."""
        self.present = {}
        for what, check in self._checks.items():
            try:
                reason = check()
            except Exception as error:
                reason = f"the check failed: {type(error).__name__}: {error}"
            if reason:
                self.present[what] = reason
        self._log()
        return self.present

    def _log(self) -> None:
        """A trouble may last for another reason than it began with: a server that ends, and then refuses us."""
        now = self._now()
        for what, reason in self.present.items():
            words = _NUMBERS.sub("", reason)
            logged, before, since = self._reasons.get(what, ("", "", now))
            since = since if words == before else now
            if not logged or (words != logged and now - since >= LASTS_S):
                log.warning(f"working with restrictions: {what}", reason=reason)
                logged = words
            self._reasons[what] = logged, words, since
        for what in self._reasons.keys() - self.present.keys():
            del self._reasons[what]
            log.info(f"restriction lifted: {what}")

    def _shown(self) -> dict[str, int]:
        return {what: int(what in self.present) for what in self._checks}


def watch_process(troubles: Troubles) -> None:
    """Add the checks that make sense in any process."""
    troubles.watch("descriptors", descriptors)
    troubles.lately("log", lambda: Written.lost, "lines of the log cannot be written")


def descriptors() -> str:
    """A reason if this process is running out of file descriptors. A new descriptor gets the lowest free number, so
    its number says how many are open."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        number = os.open(os.devnull, os.O_RDONLY)
    except OSError as error:
        return f"no file or connection can be opened: {error.strerror}"
    os.close(number)
    return f"{number} of {most} file descriptors are open" if number >= _FEW_LEFT * most else ""


def children_descriptors(parent: int, mark: str) -> str:
    """A reason if a child of the process `parent` is running out of file descriptors. Only children with `mark` in
    their command line are checked. This may take milliseconds."""
    paths: list[Path] = []
    with suppress(OSError):  # the parent has ended, or no file can be opened
        paths = list(Path(f"/proc/{parent}/task").glob("*/children"))
    for path in paths:
        children: list[str] = []
        with suppress(OSError):  # the thread has ended, or this kernel has no such file
            children = path.read_text(encoding="utf-8").split()
        for child in (Path("/proc", pid) for pid in children):
            with suppress(OSError, StopIteration):  # the child has ended, or belongs to another user
                if mark.encode() in (child / "cmdline").read_bytes():
                    limits = (child / "limits").read_text(encoding="utf-8").splitlines()
                    most = next(line for line in limits if line.startswith("Max open files")).split()[3]
                    count = (child / "fd").stat().st_size or len(os.listdir(child / "fd"))  # 0 until Linux 6.2
                    if most.isdigit() and count >= _FEW_LEFT * int(most):
                        return f"the gateway has {count} of {most} file descriptors open, and refuses requests"
    return ""
