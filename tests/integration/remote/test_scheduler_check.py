"""The conformance checker passes what is right, and finds each way of being wrong."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from fairlead.core.events import Outcome, RemotePick
from fairlead.gateway.h2_server import H2Server
from fairlead.server.remote.messages import PATH, Answer, Picks, Welcome, decode_answer, encode_answer
from fairlead.server.sdk.check import CHECKS, Checker
from fairlead.server.sdk.server import SchedulerServer, SchedulerStats, Session, policy_maker

Change = Callable[[Answer], list[Answer]]


class Bent:
    """A stream whose session's answers are bent on their way out."""

    def __init__(self, stream: Any, change: Change) -> None:
        self._stream, self._change = stream, change

    def send(self, *messages: bytes) -> None:
        for message in messages:
            self._stream.send(*(encode_answer(one) for one in self._change(decode_answer(message))))

    def finish(self, code: int = 0, message: str = "") -> None:
        self._stream.finish(code, message)


async def failing(change: Change) -> set[str]:
    """Names of the checks that a good scheduler fails once its answers are bent."""
    make, stats = policy_maker("cost-model"), SchedulerStats()
    server = H2Server({PATH: lambda stream, metadata: Session(Bent(stream, change), metadata, make, stats)})  # type: ignore[arg-type]
    port = await server.listen("127.0.0.1")
    try:
        results = await Checker(f"127.0.0.1:{port}", budget_ms=5000.0).run()
    finally:
        await server.close()
    assert all(result.detail for result in results if not result.ok), "a failure says what came"
    return {result.name for result in results if not result.ok}


def each(change: Callable[[RemotePick], list[RemotePick]]) -> Change:
    def bend(answer: Answer) -> list[Answer]:
        if answer.picks is None:
            return [answer]
        picks = tuple(new for pick in answer.picks.picks for new in change(pick))
        return [Answer(picks=Picks(batch=answer.picks.batch, picks=picks))]

    return bend


def bent(pick: RemotePick, **fields: Any) -> RemotePick:
    return msgspec.structs.replace(pick, **fields)


async def test_a_good_one_passes() -> None:
    server = SchedulerServer(policy_maker("least-requests"))
    address = await server.start("127.0.0.1:0")
    results = await Checker(address, budget_ms=5000.0).run()
    await server.close()
    assert [result.name for result in results if not result.ok] == []
    assert len(results) == len(CHECKS)


async def test_each_way_of_being_wrong_is_found() -> None:
    assert "picks" in await failing(each(lambda pick: [bent(pick, endpoint="nobody", outcome=Outcome.PICKED)]))
    assert "picks" in await failing(each(lambda pick: [bent(pick, outcome=0)]))
    assert "every-request-once" in await failing(each(lambda pick: [pick, pick]))
    assert "candidates" in await failing(each(lambda pick: [bent(pick, endpoint="e1", outcome=Outcome.PICKED)]))
    assert "picks" in await failing(each(lambda pick: [bent(pick, prefill="nobody")]))
    assert "decides" in await failing(each(lambda pick: [bent(pick, endpoint="", outcome=Outcome.PASSED)]))
    stale = each(lambda pick: [bent(pick, endpoint="e2") if pick.outcome == Outcome.PICKED else pick])
    assert {"departures", "slots-are-reused"} <= await failing(stale)


async def test_a_wrong_welcome_ends_the_checks() -> None:
    assert await failing(lambda answer: [answer] if answer.picks else [Answer(welcome=Welcome(version=2))]) == {
        "welcomes"
    }


async def test_nobody_there() -> None:
    (result,) = await Checker("127.0.0.1:1").run()
    assert not result.ok and "cannot connect" in result.detail


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fairlead", "scheduler", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


async def test_the_commands() -> None:
    """`serve` in a process of its own, `check` with text and JSON, and what wrong usage says."""
    command = [sys.executable, "-m", "fairlead", "scheduler", "serve", "power-of-two", "--listen", "127.0.0.1:0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    child = await asyncio.to_thread(
        lambda: subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    )
    try:
        assert child.stdout is not None
        line = await asyncio.to_thread(child.stdout.readline)
        found = re.search(r"serving power-of-two on (\S+)", line)
        assert found is not None, line
        checked = await asyncio.to_thread(run, "check", found[1], "--json", "--budget", "5000")
        report = json.loads(checked.stdout)
        assert (checked.returncode, report["ok"], len(report["checks"])) == (0, True, len(CHECKS))
        failed = await asyncio.to_thread(run, "check", found[1], "--budget", "0.1")
        lines = failed.stdout.splitlines()
        assert any(one.startswith("FAIL  in-time") for one in lines) == (failed.returncode == 1)
        assert lines[-1].endswith("checks passed")
        child.terminate()
        rest = await asyncio.to_thread(child.stdout.read)
        assert re.search(r"\d+ requests in \d+ batches on \d+ streams", rest)
        assert await asyncio.to_thread(child.wait, 30) == 0
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve"], "Missing argument 'policy'"),
        (["check"], "Missing argument 'address'"),
        (["serve", "nonesuch"], "MODULE:NAME"),
        (["serve", "cost-model", "--listen", "nowhere"], "cannot listen"),
        (["check", "nonsense"], "'nonsense' is neither host:port nor unix:/path"),
        (["check", "127.0.0.1:1", "--ca-file", "nowhere.pem"], "No such file"),
    ],
)
def test_wrong_usage_says_what_to_do(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and said in done.stderr


def test_the_contract_is_printed() -> None:
    done = run("proto")
    assert done.returncode == 0 and "service Scheduler {" in done.stdout
