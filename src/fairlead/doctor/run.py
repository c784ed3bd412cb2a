"""Defines checks and findings, and runs checks: all at the same time, each with its own time limit."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from enum import IntEnum
from typing import Literal

from msgspec import Struct, structs

from fairlead.doctor.site import Need, Site


class Severity(IntEnum):
    """Levels of harm."""

    #: Good to know; everything works.
    NOTE = 0
    #: Works, but wastes something or will break.
    WARNING = 1
    #: Decisions are made from wrong or missing knowledge.
    ERROR = 2
    #: Requests fail, or can be abused.
    CRITICAL = 3

    @property
    def word(self) -> str:
        return self.name.lower()


class Finding(Struct, frozen=True, kw_only=True):
    """A problem that was found. `where`: ids of endpoints or names of other places; empty = the whole installation."""

    code: str
    severity: Severity
    what: str
    evidence: str = ""
    fix: str = ""
    #: A page of the documentation with an anchor, e.g. `docs/doctor.md#checks`; empty = none.
    docs: str = ""
    where: tuple[str, ...] = ()


class Kind(Struct, frozen=True):
    """A kind of finding. `code` is `check.name` and does not change between versions."""

    code: str
    severity: Severity
    what: str
    fix: str
    docs: str = "docs/doctor.md"

    def at(self, where: str = "", evidence: str = "", fix: str = "") -> Finding:
        return Finding(
            code=self.code,
            severity=self.severity,
            what=self.what,
            evidence=evidence,
            fix=fix or self.fix,
            docs=self.docs,
            where=(where,) if where else (),
        )


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Merge equal findings at several places into one, with the evidence of the first. The most harmful come first."""
    groups: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        key = finding.code, finding.what, finding.fix
        known = groups.get(key)
        places = dict.fromkeys((*known.where, *finding.where)) if known is not None else finding.where
        groups[key] = structs.replace(known or finding, where=tuple(places))
    return sorted(groups.values(), key=lambda finding: -finding.severity)


Run = Callable[[Site], Awaitable[Iterable[Finding]]]
State = Literal["well", "found", "skipped", "unfinished", "failed"]


class Skipped(Exception):
    """Raised by a check that has nothing to examine; the message says why."""


class Check(Struct, frozen=True, kw_only=True):
    """A check. `run` is called once, if the site has what it `needs`. `budget`: seconds after which it is cancelled."""

    name: str
    #: What the check verifies: it completes the sentence "checks that …".
    about: str
    kinds: tuple[Kind, ...]
    run: Run
    needs: tuple[Need, ...]
    budget: float


def check(name: str, about: str, needs: tuple[Need, ...] = (), budget: float = 15.0) -> Callable[[Run], Check]:
    """Decorate a function of the site to make a `Check`. It can find the kinds that its module defines before it and
    whose codes begin with its name."""

    def make(run: Run) -> Check:
        there = vars(sys.modules[run.__module__]).values()
        kinds = tuple(kind for kind in there if isinstance(kind, Kind) and kind.code.startswith(f"{name}."))
        return Check(name=name, about=about, kinds=kinds, run=run, needs=needs, budget=budget)

    return make


class Outcome(Struct, frozen=True, kw_only=True):
    """The outcome of one check. `detail`: why it was skipped or did not finish."""

    check: str
    state: State
    seconds: float = 0.0
    detail: str = ""


class Examination(Struct, frozen=True):
    """The result of all checks: `findings`, the most harmful first, and `outcomes`, in the order of the checks."""

    findings: tuple[Finding, ...] = ()
    outcomes: tuple[Outcome, ...] = ()

    @property
    def well(self) -> bool:
        """Whether only notes were found, and every check that could run has finished."""
        harmless = all(item.severity is Severity.NOTE for item in self.findings)
        return harmless and not any(item.state in ("unfinished", "failed") for item in self.outcomes)


async def examine(
    site: Site, checks: Sequence[Check], progress: Callable[[Outcome], object] = lambda outcome: None
) -> Examination:
    """Run the checks. `progress` receives each outcome. Never raises except for cancellation."""
    findings: dict[str, list[Finding]] = {}

    async def attempt(check: Check) -> Outcome:
        outcome = await _attempt(site, check, findings)
        progress(outcome)
        return outcome

    outcomes = await asyncio.gather(*(attempt(check) for check in checks))
    in_order = [finding for check in checks for finding in findings.get(check.name, ())]
    return Examination(tuple(merged(in_order)), tuple(outcomes))


async def _attempt(site: Site, check: Check, findings: dict[str, list[Finding]]) -> Outcome:
    for need in check.needs:
        if not site.has(need):
            return Outcome(check=check.name, state="skipped", detail=site.lack(need))
    loop = asyncio.get_running_loop()
    started = loop.time()
    try:
        async with asyncio.timeout(check.budget):
            listed = findings[check.name] = list(await check.run(site))
    except Skipped as reason:
        return Outcome(check=check.name, state="skipped", detail=str(reason))
    except TimeoutError:
        detail = f"not over after {check.budget:g} s"
        return Outcome(check=check.name, state="unfinished", seconds=check.budget, detail=detail)
    except Exception as error:  # a check that fails must not stop the others
        detail = f"{type(error).__name__}: {error}"
        return Outcome(check=check.name, state="failed", seconds=loop.time() - started, detail=detail)
    return Outcome(check=check.name, state="found" if listed else "well", seconds=loop.time() - started)
