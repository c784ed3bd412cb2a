"""Runs checks at once, each within its own time, and puts what they find in order."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Literal

from msgspec import Struct

from fairlead.doctor.finding import Finding, Kind, Severity, merged
from fairlead.doctor.needs import NEEDS, Need
from fairlead.doctor.site import Site

Run = Callable[[Site], Awaitable[Iterable[Finding]]]
State = Literal["well", "found", "skipped", "unfinished", "failed"]


class Skipped(Exception):
    """Raised by a check that finds that there is nothing for it to look at; the message says why."""


class Check(Struct, frozen=True, kw_only=True):
    """`run` is called once, with what it `needs` at hand. `budget`: seconds after which it is given up."""

    name: str
    #: Completes "looks whether …".
    about: str
    kinds: tuple[Kind, ...]
    run: Run
    needs: tuple[Need, ...] = ()
    budget: float = 15.0


class Outcome(Struct, frozen=True, kw_only=True):
    """How one check went. `detail`: why it was skipped or did not finish."""

    check: str
    state: State
    seconds: float = 0.0
    detail: str = ""


class Examination(Struct, frozen=True):
    """`findings` by harm; `outcomes` in the order of the checks."""

    findings: tuple[Finding, ...] = ()
    outcomes: tuple[Outcome, ...] = ()

    @property
    def well(self) -> bool:
        """Nothing but notes was found, and every check that could run came to its end."""
        harmless = all(one.severity is Severity.NOTE for one in self.findings)
        return harmless and not any(one.state in ("unfinished", "failed") for one in self.outcomes)


async def examine(
    site: Site, checks: Sequence[Check], progress: Callable[[Outcome], object] = lambda outcome: None
) -> Examination:
    """`progress` hears of every check that is over. Never raises but for cancellation."""
    findings: dict[str, list[Finding]] = {}

    async def one(check: Check) -> Outcome:
        outcome = await _attempt(site, check, findings)
        progress(outcome)
        return outcome

    outcomes = await asyncio.gather(*(one(check) for check in checks))
    found = [finding for check in checks for finding in findings.get(check.name, ())]
    return Examination(tuple(merged(found)), tuple(outcomes))


async def _attempt(site: Site, check: Check, findings: dict[str, list[Finding]]) -> Outcome:
    for need in check.needs:
        if not site.has(need):
            return Outcome(check=check.name, state="skipped", detail=NEEDS[need])
    loop = asyncio.get_running_loop()
    started = loop.time()
    try:
        async with asyncio.timeout(check.budget):
            found = findings[check.name] = list(await check.run(site))
    except Skipped as reason:
        return Outcome(check=check.name, state="skipped", detail=str(reason))
    except TimeoutError:
        detail = f"not over after {check.budget:g} s"
        return Outcome(check=check.name, state="unfinished", seconds=check.budget, detail=detail)
    except Exception as error:  # a check that breaks costs only its own answer
        detail = f"{type(error).__name__}: {error}"
        return Outcome(check=check.name, state="failed", seconds=loop.time() - started, detail=detail)
    return Outcome(check=check.name, state="found" if found else "well", seconds=loop.time() - started)
