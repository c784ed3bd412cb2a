"""`fairlead top` against an admin port."""

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from certificates_made import make_pair
from rich.console import Console
from tcp import TcpServer
from typer.testing import CliRunner

from fairlead.cli.app import build_app
from fairlead.cli.top import follow, view
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.fleet import Fleet
from fairlead.core.records import DecisionRecord
from fairlead.core.request import Request
from fairlead.gateway.tls import ServerTls
from fairlead.server.admin import Admin, AdminSources
from fairlead.server.observe.snapshot import SnapshotMaker
from fairlead.server.observe.watch import Watch


class Port:
    """An admin port over three endpoints, the last of which was never scraped."""

    def __init__(self) -> None:
        now = asyncio.get_running_loop().time
        self.now, self.fleet = now, Fleet(staleness=1e6)
        self.served = ["llama"]
        fleet = self.fleet
        self.watch = Watch(fleet, now, served=lambda: self.served)
        for i in (10, 2, 1):
            fleet.up(Endpoint(f"server-{i}", f"10.0.0.{i}:80"))
            if i > 1:
                fleet.sampled(f"server-{i}", now(), now(), Sample(waiting=i, running=1, kv_usage=0.5))
        for i in range(5):
            request = Request(id=i, arrived=now(), model="llama", prompt_tokens=100)
            record = DecisionRecord(request=request, at=now(), policy="p", endpoint="server-2", address="x:1")
            self.watch.on_decision(record, 1e-4)
        self.replicas, self.schedulers = "", 1
        maker = SnapshotMaker(
            self.watch,
            now,
            lambda: 0.0,
            pool="default",
            policy=lambda: "cost-model",
            reasons=list,
            replicas=lambda: self.replicas,
            schedulers=lambda: self.schedulers,
        )
        dashboard = SimpleNamespace(
            begin=maker.begin, end=maker.end, beginning=maker.beginning, take=maker.take, answers={}, tick=0.05
        )
        self.sources = AdminSources(
            metrics=list, unready=list, endpoints=list, decisions=lambda count: [], dashboard=dashboard
        )
        self.number = 0

    async def start(self, debug: bool = True) -> str:
        self.admin = Admin(self.sources, port=self.number, debug=debug)
        await self.admin.start()
        self.number = self.admin.port
        return f"http://127.0.0.1:{self.number}"


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    made = Port()
    await made.start()
    yield made
    await made.admin.close()


async def call(*arguments: str, width: int = 150) -> Any:
    runner = CliRunner(env={"COLUMNS": str(width), "NO_COLOR": "1"})
    return await asyncio.to_thread(runner.invoke, build_app(), ["top", *arguments])


async def test_one_moment_as_text(port: Port) -> None:
    done = await call("--admin", f"127.0.0.1:{port.number}", "--once")
    assert done.exit_code == 0, done.output
    names = [line.split()[0] for line in done.output.splitlines() if line.strip().startswith("server-")]
    assert names == ["server-1", "server-2", "server-10"]
    assert "5 decided" in done.output and "llama" in done.output and "cost-model" in done.output
    assert "△ The metrics of endpoint server-1 cannot be read (no scrape has succeeded yet)" in done.output
    assert "metrics not read" in done.output and "≈0" in done.output
    assert "\x1b" not in done.output and "replicas" not in done.output and "numbers of" not in done.output


async def test_not_all_is_well_while_requests_get_4xx(port: Port) -> None:
    port.fleet.sampled("server-1", port.now(), port.now(), Sample(waiting=1, running=1, kv_usage=0.5))
    state, _ = await asyncio.to_thread(lambda: next(follow(f"http://127.0.0.1:{port.number}", 0.2)))
    assert state["now"]["notices"] == []
    row = state["now"]["traffic"][0] | {"model": "other"}
    state["now"]["traffic"] = [row, row | {"target": "llama"}]
    for rate, words in ((0.0, "✓ all is well"), (0.9, "△ every endpoint answers, but 90.0% of the requests get 4xx")):
        state["now"]["totals"]["error_rate"] = rate
        console = Console(file=io.StringIO(), width=150)
        console.print(view(state, "name", 150))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert words in text
        assert "(names without metrics of their own) " in text
        assert "(names without metrics of their own) → llama" in text


@pytest.mark.parametrize("option", [(), ("--json",)])
async def test_names_from_outside_are_neither_obeyed_nor_markup(port: Port, option: tuple[str, ...]) -> None:
    name = "\x1b]0;PWNED\x07\x9b2J\u202e[/b][red]x"
    port.served.append(name)
    record = DecisionRecord(
        request=Request(id=9, arrived=port.now(), model=name),
        at=port.now(),
        policy="p",
        endpoint="server-2",
        address="x:1",
    )
    port.watch.on_decision(record, 1e-4)
    done = await call("--admin", f"127.0.0.1:{port.number}", "--once", *option, width=200)
    assert done.exit_code == 0, done.output
    assert "[/b][red]x" in done.output
    assert all(letter.isprintable() for letter in done.output.replace("\n", ""))


async def test_an_older_scheduler_does_not_say_how_long_it_runs(port: Port) -> None:
    done = await call("--admin", f"127.0.0.1:{port.number}", "--once", "--json")
    state = json.loads(done.stdout)
    del state["now"]["running_s"]
    state["about"]["started"] = state["now"]["at"] - 65.0
    shown = io.StringIO()
    Console(file=shown, width=150).print(view(state, "name", 150))
    assert "running for 65 s" in shown.getvalue()


async def test_other_schedulers_have_a_line(port: Port) -> None:
    port.replicas, port.schedulers = "2 others, heard 7 ms late", 3
    done = await call("--admin", f"127.0.0.1:{port.number}", "--once")
    assert "replicas 2 others, heard 7 ms late" in done.output
    assert "numbers of this scheduler, one of 3;" in done.output


async def test_an_outage_is_said_with_its_time_and_what_to_do(port: Port) -> None:
    for i in (10, 2):
        port.watch.on_silence(f"server-{i}", "cannot connect: Connection refused")
        for _ in range(3):
            port.fleet.scrape_failed(f"server-{i}", port.now())
    done = await call("--admin", f"127.0.0.1:{port.number}", "--once", width=80)
    words = " ".join(done.output.split())
    said = (
        r"! 2 of 3 endpoints \(server-10, server-2\) have been out of use since .*\d\d:\d\d: they refuse connections\. "
    )
    assert re.search(said + r"Requests go to the other 1\. \(docs/runbook\.md#fairleadendpointstale\)", words)
    assert words.count("connection refused") == 2
    assert max(map(len, done.output.splitlines())) <= 80 and "…" not in done.output


@pytest.mark.parametrize("role", ["", "prefill"])
async def test_roles_have_a_column_where_there_are_any(role: str, port: Port) -> None:
    port.fleet.up(Endpoint("server-3", "10.0.0.3:80", {"llm-d.ai/role": role}))
    output = (await call("--admin", f"127.0.0.1:{port.number}", "--once")).output
    assert (" role " in output, " prefill " in output) == (bool(role), bool(role))


async def test_the_order_and_the_width_can_be_chosen(port: Port) -> None:
    done = await call("--admin", f"127.0.0.1:{port.number}", "--once", "--sort", "waiting", width=80)
    lines = done.output.splitlines()
    assert next(line.split()[0] for line in lines if line.strip().startswith("server-")) == "server-10"
    assert max(map(len, lines)) <= 80
    assert "in band" not in done.output


async def test_all_traffic_is_shown_or_how_much_more_there_is(port: Port) -> None:
    port.served += [f"m{number}" for number in range(9)]
    for number in range(9):
        asked = Request(id=100 + number, arrived=port.now(), model=f"m{number}")
        bad = {"outcome": "rejected-no-endpoints", "status": 503} if number == 8 else {"endpoint": "server-2"}
        port.watch.on_decision(DecisionRecord(request=asked, at=port.now(), policy="p", **bad), 1e-4)
    done = await call("--admin", f"127.0.0.1:{port.number}", "--once")
    assert all(f" {name} " in done.output for name in port.served) and "more" not in done.output
    state = json.loads((await call("--admin", f"127.0.0.1:{port.number}", "--once", "--json")).stdout)
    shown = io.StringIO()
    Console(file=shown, width=150).print(view(state, "name", 150, height=24))
    assert "and 7 more, 1 of them with errors" in shown.getvalue()
    assert len(shown.getvalue().splitlines()) <= 24
    Console(file=shown, width=150).print(view(state, "name", 150, height=60))
    assert " m8 " in shown.getvalue()


async def test_long_names_cut_no_figure(port: Port) -> None:
    names = [f"inference/vllm-qwen3-32b-instruct-fp8-production-6c9d8b7f5d-{end}" for end in ("x2k4q", "9q4mz")]
    now = asyncio.get_running_loop().time()
    for name in names:
        port.watch.fleet.up(Endpoint(name, "10.0.0.7:80"))
        port.watch.fleet.sampled(name, now, now, Sample(waiting=12_345, running=23_456, kv_usage=0.87))
    for width in (60, 80, 100, 130, 150):
        done = await call("--admin", f"127.0.0.1:{port.number}", "--once", width=width)
        assert max(map(len, done.output.splitlines())) <= width
        rows = [line.split() for line in done.output.splitlines() if "…" in line]
        assert [row[0][-12:] for row in rows] == [name[-12:] for name in sorted(names)], "one line each, and its end"
        assert all({"12,345", "23,456", "87%"} <= {*row} for row in rows)
    done = await call("--admin", f"127.0.0.1:{port.number}", "--once", width=200)
    assert all(name in done.output for name in names)


async def test_one_moment_as_json(port: Port) -> None:
    done = await call("--admin", f"http://127.0.0.1:{port.number}/", "--once", "--json")
    told = json.loads(done.output)
    assert told["now"]["totals"]["requests"] == 5
    assert [row["id"] for row in told["now"]["endpoints"]] == ["server-10", "server-2", "server-1"]


async def test_what_does_not_answer_is_said(port: Port) -> None:
    await port.admin.close()
    done = await call("--admin", f"127.0.0.1:{port.number}", "--once")
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"error: http://127.0.0.1:{port.number} does not answer: " in done.stderr
    await port.start(debug=False)
    done = await call("--admin", f"127.0.0.1:{port.number}", "--once")
    assert (done.exit_code, "it has no dashboard (is admin.debug off?)" in done.stderr) == (1, True)


async def test_how_to_name_the_authority_of_a_certificate_is_said(tmp_path: Path) -> None:
    async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None: ...

    make_pair(tmp_path, "20200131235959Z", "20990131235959Z")
    async with TcpServer(nothing, ssl=ServerTls.from_directory(tmp_path).context) as server:
        done = await call("--admin", f"https://{server.address}", "--once")
    assert "certificate verify failed" in done.stderr and "SSL_CERT_FILE" in done.stderr
    assert "fairlead serve" not in done.stderr


async def test_a_wrong_order_names_the_right_ones() -> None:
    done = await call("--sort", "beauty")
    assert done.exit_code == 2
    assert "'beauty' is not one of name, waiting" in done.stderr


async def test_a_lost_connection_is_told_and_tried_again(port: Port) -> None:
    feed = follow(f"http://127.0.0.1:{port.number}", 0.1)

    async def following() -> tuple[dict[str, Any], str]:
        return await asyncio.wait_for(asyncio.to_thread(next, feed), 20.0)

    told, problem = await following()
    assert (problem, told["about"]["pool"]) == ("", "default")
    await port.admin.close()
    while not problem:
        told, problem = await following()
    assert problem.endswith("; trying again") and told["now"]["policy"] == "cost-model"
    await port.start()
    while problem:
        told, problem = await following()
    assert told["now"]["totals"]["requests"] == 5
    await asyncio.to_thread(feed.close)
