"""Checks at once, each within its time; what they find, in order; as text and as JSON."""

import asyncio
import json
from collections.abc import Iterable

from fairlead.compat.load import load
from fairlead.doctor.report import as_json, as_text
from fairlead.doctor.run import Check, Examination, Finding, Kind, Outcome, Run, Severity, Skipped, examine, merged
from fairlead.doctor.site import Need, Site

SLOW = Kind("a.slow", Severity.WARNING, "it is slow", "make it fast", "docs/doctor.md")
DEAD = Kind("b.dead", Severity.CRITICAL, "it is dead", "start it", "docs/doctor.md")
NOTED = Kind("b.noted", Severity.NOTE, "it is there", "do nothing", "docs/doctor.md")
CONFIG = "endpoints: ['127.0.0.1:9']\nadmin: {port: 0}"


def check(name: str, run: Run, needs: tuple[Need, ...] = (), budget: float = 5.0) -> Check:
    return Check(name=name, about="all is well", kinds=(), run=run, needs=needs, budget=budget)


def finding(*found: Finding) -> Run:
    async def run(site: Site) -> Iterable[Finding]:
        return found

    return run


async def examined(*checks: Check) -> tuple[Examination, list[Outcome]]:
    heard: list[Outcome] = []
    async with Site(load(CONFIG)) as site:
        return await examine(site, checks, heard.append), heard


def test_what_is_the_same_at_several_places_is_told_once() -> None:
    slow = [SLOW.at("e0", "3 s"), SLOW.at("e2", "4 s"), SLOW.at("e0", "6 s")]
    found = merged([*slow, DEAD.at("e1"), SLOW.at("e3", "5 s", "buy a new one")])
    assert [(one.code, one.where) for one in found] == [
        ("b.dead", ("e1",)), ("a.slow", ("e0", "e2")), ("a.slow", ("e3",)),
    ]  # fmt: skip
    assert (found[1].evidence, found[1].fix, found[2].fix) == ("3 s", "make it fast", "buy a new one")


async def test_findings_are_in_the_order_of_harm() -> None:
    found, heard = await examined(
        check("a", finding(SLOW.at("e0"))), check("b", finding(DEAD.at("e0"))), check("c", finding())
    )
    assert [one.code for one in found.findings] == ["b.dead", "a.slow"]
    assert [(one.check, one.state) for one in found.outcomes] == [("a", "found"), ("b", "found"), ("c", "well")]
    assert {one.check for one in heard} == {"a", "b", "c"}
    assert not found.well


async def test_notes_do_no_harm() -> None:
    assert (await examined(check("b", finding(NOTED.at("e0")))))[0].well


async def test_a_check_that_hangs_or_breaks_costs_only_itself() -> None:
    async def hang(site: Site) -> Iterable[Finding]:
        await asyncio.Event().wait()
        return []

    async def fail(site: Site) -> Iterable[Finding]:
        raise ZeroDivisionError("by zero")

    found, _ = await examined(check("a", hang, budget=0.02), check("b", fail), check("c", finding(SLOW.at("e0"))))
    assert [(one.check, one.state) for one in found.outcomes] == [
        ("a", "unfinished"), ("b", "failed"), ("c", "found"),
    ]  # fmt: skip
    assert found.outcomes[1].detail == "ZeroDivisionError: by zero"
    assert "failed: b: ZeroDivisionError: by zero" in as_text(found)
    only, _ = await examined(check("a", hang, budget=0.02))
    assert (only.findings, only.well) == ((), False)


async def test_a_check_without_what_it_needs_is_skipped_and_says_why() -> None:
    found, _ = await examined(
        check("a", finding(DEAD.at("e0")), ("probe",)), check("b", finding(DEAD.at("e0")), ("endpoints", "admin"))
    )
    assert [one.state for one in found.outcomes] == ["skipped", "skipped"]
    assert found.well
    text = as_text(found)
    assert "not run: a: it sends small requests to model servers: allow that with --probe" in text
    assert text.endswith("0 checks: nothing found")


async def test_a_check_may_find_that_there_is_nothing_to_look_at() -> None:
    async def look(site: Site) -> Iterable[Finding]:
        raise Skipped("the moon is away")

    found, _ = await examined(check("a", look))
    assert found.outcomes == (Outcome(check="a", state="skipped", detail="the moon is away"),)
    assert found.well


async def test_what_several_checks_ask_is_fetched_once_and_outlives_who_asked_first() -> None:
    asked = 0

    async def fetch() -> int:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.05)
        return 7

    async with Site(load(CONFIG)) as site:
        impatient = asyncio.create_task(site.once("it", fetch))
        await asyncio.sleep(0)
        impatient.cancel()
        both = await asyncio.gather(site.once("it", fetch), site.once("it", fetch))
        assert list(both) == [7, 7]
    assert asked == 1


def examination() -> Examination:
    places = [SLOW.at(f"e{at}", "3 s\x1b[31m") for at in range(7)]
    return Examination(tuple(merged([*places, DEAD.at("", "no answer")])), (Outcome(check="a", state="found"),))


def test_the_text_says_what_was_seen_and_what_to_do() -> None:
    assert as_text(examination()).splitlines()[:5] == [
        "critical  b.dead: it is dead",
        "          seen  no answer",
        "          do    start it",
        "          read  docs/doctor.md",
        "",
    ]
    assert "where e0, e1, e2, e3, e4 and 2 more" in as_text(examination())
    assert as_text(examination()).endswith("1 checks: 1 critical, 1 warning")
    assert "\033[31;1mcritical\033[0m  b.dead" in as_text(examination(), colour=True)


def test_what_servers_say_cannot_move_the_cursor() -> None:
    assert "\x1b" not in as_text(examination())


def test_the_json_has_everything() -> None:
    told = json.loads(as_json(examination()))
    assert told["well"] is False
    assert [one["severity"] for one in told["findings"]] == ["critical", "warning"]
    assert told["findings"][1]["where"] == [f"e{at}" for at in range(7)]
    assert told["checks"] == [{"check": "a", "state": "found", "seconds": 0.0, "detail": ""}]


def test_long_lines_are_broken_between_words_where_a_terminal_ends() -> None:
    text = as_text(examination(), width=40)
    assert all(len(line) <= 40 or " " not in line[16:] for line in text.splitlines() if line.startswith(" "))
    assert " ".join(text.split()) == " ".join(as_text(examination()).split())
