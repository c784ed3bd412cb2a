"""What operators are given works as written: a run of the whole product, scraped by a real Prometheus.

Everything that adds metrics is on. The expressions of alerts, dashboards and documents are asked of Prometheus, and the
commands of the runbook are run, with this run's ports in the place of the documented ones.
"""

import asyncio
import json
import os
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
import yaml
from gw_processes import Child, Serve, Stub, sees_the_scheduler
from ports import free_ports

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy" / "alerts" / "fairlead.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "fairlead.json"
TEXTS = [ROOT / "docs" / "runbook.md", *sorted((ROOT / "deploy" / "autoscaling").glob("*.yaml"))]
WORDS = ("river", "stone", "cloud", "fire", "tree", "salt")
#: Of load, at least; and until each target was scraped so often, which a busy machine takes longer for.
SECONDS, SCRAPES = 14.0, 8
NAME = r"(?:fairlead|llm_d_epp|inference_\w+?|vllm|kv_cache|epp)[_:]\w+|index_size"
#: Names that nothing of this run can have: they need a Kubernetes API server, or are of the rules themselves.
ELSEWHERE = ("fairlead_kube_",)
#: On the page only where an indexer is asked, or where there are several schedulers.
WITH_OTHERS = ("fairlead_indexer_up", "fairlead_replicas_peers", "fairlead_replicas_unheard_seconds")
RECORDED = ("vllm_time_to_first_token_seconds_bucket", "vllm_queue_depth")
RECORDED += ("fairlead_excused_requests", "fairlead_gateway_refused")
#: Only the shape is promised: nothing of the kind happens while all is well.
QUIET = re.compile(
    r"fairlead_(fallback_requests|plugin_errors|lease_expired|kv_disagreements|kv_trust|shadow_cut_off"
    r"|kv_checked|all_overloaded|scheduler_answer|endpoint_out|model_out)"
)


def find(program: str, package: str) -> str:
    found = shutil.which(program)
    if not found:
        how = f"{program} is missing: on Debian and Ubuntu `apt-get install {package}`"
        if os.environ.get("FAIRLEAD_REQUIRE_ALL"):
            pytest.fail(how)
        pytest.skip(how)
    return found


class Prometheus(Child):
    """Scrapes every second, and evaluates the shipped rules."""

    def __init__(self, directory: Path) -> None:
        super().__init__("prometheus", directory / "prometheus.log")
        self._directory = directory
        (self.port,) = free_ports(1)

    def start(self, program: str, jobs: dict[str, list[str]]) -> "Prometheus":
        file = self._directory / "prometheus.yaml"
        scrapes = [{"job_name": job, "static_configs": [{"targets": targets}]} for job, targets in jobs.items()]
        every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "500ms"}
        file.write_text(yaml.safe_dump({"global": every, "rule_files": [str(ALERTS)], "scrape_configs": scrapes}))
        self.spawn(
            program,
            f"--config.file={file}",
            f"--storage.tsdb.path={self._directory / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--log.level=warn",
        )
        self.poll_until(lambda: self._get("/-/ready") is not None)
        return self

    def _get(self, path: str) -> bytes | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
                return bytes(answer.read())
        except OSError:
            return None

    def ask(self, expression: str, at: float = 0.0) -> list[tuple[dict[str, str], float]]:
        """An instant query; `at`: seconds since 1970, 0 = now."""
        query = {"query": expression} | ({"time": str(at)} if at else {})
        page = self._get("/api/v1/query?" + urllib.parse.urlencode(query))
        assert page is not None, f"Prometheus refuses {expression}"
        answer = json.loads(page)
        assert answer["status"] == "success", answer
        return [(one["metric"], float(one["value"][1])) for one in answer["data"]["result"]]

    def targets(self) -> dict[str, str]:
        page = self._get("/api/v1/targets")
        assert page is not None
        targets = json.loads(page)["data"]["activeTargets"]
        return {one["scrapeUrl"]: one["lastError"] or one["health"] for one in targets}

    def rules(self) -> list[dict[str, Any]]:
        page = self._get("/api/v1/rules")
        assert page is not None
        return [rule for group in json.loads(page)["data"]["groups"] for rule in group["rules"]]


class Site:
    """The run."""

    def __init__(self, serve: Serve, stub: Stub, prometheus: Prometheus) -> None:
        self.serve, self.stub, self.prometheus = serve, stub, prometheus
        #: A moment under load, and the page of metrics then.
        self.at = 0.0
        self.loaded = ""

    async def run(self) -> None:
        await sees_the_scheduler(self.serve.gateway)
        over = asyncio.Event()
        load = asyncio.create_task(traffic(self.serve.port, over))
        await asyncio.sleep(SECONDS - 2.0)
        async with asyncio.timeout(300):
            while not await asyncio.to_thread(self.prometheus.ask, f"min(sum_over_time(up[1h])) >= {SCRAPES}"):
                await asyncio.sleep(0.5)
        self.at = time.time()
        self.loaded = await self.serve.page("/metrics")
        await asyncio.sleep(2.0)
        over.set()
        assert await load > 50

    def page(self, url: str) -> str:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return str(answer.read().decode())


def configuration(stub: Stub, directory: Path) -> dict[str, Any]:
    (nobody,) = free_ports(1)
    return {
        "endpoints": [{"name": f"vllm-{i}", "address": address} for i, address in enumerate(stub.addresses)],
        # One request at a time per endpoint: there is always somebody who waits.
        "flowControl": {"saturation": {"type": "concurrency-detector", "parameters": {"maxConcurrency": 1}}},
        "kvEvents": {"enabled": True},
        "journal": {"path": str(directory / "journal")},
        "replicas": {"via": f"file://{directory / 'shared'}", "pool": "p"},
        "shadows": {"policies": [{"policy": "round-robin", "name": "rr"}]},
        "scheduler": {"address": f"127.0.0.1:{nobody}"},
        "inspect": {"usageSampling": 1.0},
    }


async def traffic(port: int, over: asyncio.Event) -> int:
    """Conversations that share system prompts, streamed and not; returns how many were answered."""
    chance, done = Random(1), 0
    systems = [" ".join(chance.choice(WORDS) for _ in range(800)) for _ in range(12)]

    async def client(number: int, session: aiohttp.ClientSession) -> None:
        nonlocal done
        while not over.is_set():
            messages = [
                {"role": "system", "content": chance.choice(systems)},
                {"role": "user", "content": f"{number} {done}"},
            ]
            body: dict[str, Any] = {"model": "Qwen/Qwen3-32B", "messages": messages, "max_tokens": 60}
            if done % 2:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            headers = {"x-llm-d-slo-ttft-ms": "1"}
            async with session.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, headers=headers) as got:
                assert got.status == 200, await got.text()
                await got.read()
            done += 1
            await asyncio.sleep(0.02)

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(client(number, session) for number in range(9)))
    return done


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("operations")
    prometheus = Prometheus(directory)
    program = find("prometheus", "prometheus")
    stub, serve = Stub(directory / "stub.log"), Serve(directory)
    try:
        stub.start(3, "--time-ratio", "20", "--engine", "qwen3-32b-h100", "--kv-events", "--kv-events-port", "0")
        serve.start(configuration(stub, directory))
        jobs = {"inference-scheduler": [serve.admin.removeprefix("http://")], "vllm": stub.addresses}
        prometheus.start(program, jobs)
        made = Site(serve, stub, prometheus)
        asyncio.run(made.run())
        yield made
    finally:
        for child in (prometheus, serve, stub):
            child.end()


def alerts() -> list[tuple[str, str]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [(rule["alert"], rule["expr"].strip()) for group in groups for rule in group["rules"] if "alert" in rule]


def panels() -> list[tuple[str, str]]:
    found = json.loads(DASHBOARD.read_text())["panels"]
    return [(panel["title"], target["expr"]) for panel in found for target in panel.get("targets", ())]


def test_every_metric_that_operators_are_told_of_is_there(site: Site) -> None:
    texts = [expression for _, expression in (*alerts(), *panels())]
    named = {name for text in texts for name in re.findall(rf"\b(?:{NAME})\b", text)}
    for path in TEXTS:
        text = path.read_text()
        text = "\n".join(re.findall(r"`([^`\n]+)`", text)) if path.suffix == ".md" else text
        named |= {*re.findall(rf"\b(?:{NAME})\b", text)}
    assert len(named) > 60
    page = site.loaded + site.page(f"http://{site.stub.addresses[0]}/metrics")
    typed = {*re.findall(r"^# TYPE (\S+)", page, re.MULTILINE)}
    sampled = {*re.findall(r"^([a-zA-Z_:][\w:]*)(?:\{| )", page, re.MULTILINE)}
    shown = {name for name in named if name not in (*RECORDED, *WITH_OTHERS)}
    absent = [name for name in shown if name not in typed and re.sub(r"_(bucket|sum|count)$", "", name) not in typed]
    assert absent == []
    silent = {name for name in shown if name not in sampled and f"{name}_count" not in sampled}
    assert {name for name in silent if not name.startswith(ELSEWHERE) and not QUIET.search(name)} == set()


def test_everything_on_the_page_is_in_the_reference(site: Site) -> None:
    listed = {*re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)}
    assert {*re.findall(r"^# TYPE (\S+)", site.loaded, re.MULTILINE)} - listed == set()


def test_prometheus_reads_all_pages(site: Site) -> None:
    targets = site.prometheus.targets()
    assert set(targets.values()) == {"up"}, targets
    assert len(targets) == 4


@pytest.mark.parametrize(("title", "expression"), panels(), ids=lambda text: re.sub(r"\W+", "-", text)[:60])
def test_every_panel_has_something_to_show(site: Site, title: str, expression: str) -> None:
    found = site.prometheus.ask(expression, site.at)
    assert found or QUIET.search(expression) or any(name in expression for name in ELSEWHERE)


def test_no_rule_fails_and_only_the_expected_alerts_stir(site: Site) -> None:
    rules = site.prometheus.rules()
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] == "err"} == {}
    stirring = {rule["name"] for rule in rules if rule.get("state") in ("pending", "firing")}
    # The scheduler in another process is not there, and prompts have no token ids: this run has no tokeniser.
    expected = {"FairleadSchedulerDown", "FairleadPromptsWithoutTokens"}
    assert expected <= stirring
    # Two policies that differ in everything may agree seldom; a busy machine may be late; the pool is kept full.
    may = {"ShadowDisagrees", "LoopLate", "ForecastsOff", "Saturated", "SchedulerFallback"}
    assert stirring - expected <= {"HighTTFT", *(f"Fairlead{name}" for name in may)}


#: The published expressions, without what they are compared with, and where their values must lie.
PUBLISHED = [
    ("histogram_quantile(0.95,\n  rate(vllm_time_to_first_token_seconds_bucket[5m])\n)", 0.0005, 60.0, 3),
    ("rate(kv_cache_hit_total[10m]) /\nrate(kv_cache_lookup_total[10m])", 0.3, 1.0, 1),
    ("rate(kv_cache_hit_total[5m]) / rate(kv_cache_lookup_total[5m])", 0.3, 1.0, 1),
    ("histogram_quantile(0.95,\n  rate(epp_scheduling_duration_seconds_bucket[5m])\n)", 0.00001, 0.05, 1),
    ("histogram_quantile(0.95, rate(epp_scheduling_duration_seconds_bucket[5m]))", 0.00001, 0.05, 1),
    ("vllm_queue_depth", 0.0, 1000.0, 3),
    ('up{job="inference-scheduler"}', 1.0, 1.0, 1),
    ("llm_d_epp_ready_endpoints", 3.0, 3.0, 1),
    ("max(fairlead_desired_replicas)", 1.0, 12.0, 1),
    ("sum(rate(llm_d_epp_request_total[5m]))", 0.5, 1000.0, 1),
    ("topk(5, llm_d_epp_flow_control_queue_size)", 1.0, 1000.0, 1),
]


@pytest.mark.parametrize(("expression", "low", "high", "series"), PUBLISHED, ids=lambda one: str(one)[:50])
def test_published_expressions(site: Site, expression: str, low: float, high: float, series: int) -> None:
    found = site.prometheus.ask(expression, site.at)
    assert len(found) >= series, f"{expression} found nothing"
    values = [value for _, value in found if value == value]  # NaN: nothing happened there
    assert values
    assert all(low <= value <= high for value in values), found


#: Commands of the documents, and what their answer must have in it.
COMMANDS = [
    ("curl -s localhost:9090/readyz", r"^ready$"),
    ("curl -s localhost:9090/debug/endpoints", r'"id":"default/vllm-0".*"fresh":true'),
    ('curl -s "localhost:9090/debug/decisions?last=20"', r'"endpoint"'),
    ("curl -s localhost:9090/metrics | grep index_size", r"^index_size [1-9]"),
    ("curl -s localhost:9090/metrics | grep ready_endpoints", r'llm_d_epp_ready_endpoints\{name="default"\} 3'),
    ("curl -s http://vllm:8000/metrics | grep prefix_cache", r"vllm:prefix_cache_hits_total\{.*\} [1-9]"),
    ("curl -s http://vllm:8000/metrics | grep num_requests_waiting", r"vllm:num_requests_waiting\{"),
    ("curl -so /dev/null -w '%{time_total}' http://vllm:8000/metrics", r"^0\.\d+$"),
]


@pytest.mark.parametrize(("command", "answer"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_commands_answer_as_described(site: Site, command: str, answer: str) -> None:
    find("curl", "curl")
    here = command.replace("localhost:9090", site.serve.admin.removeprefix("http://"))
    here = here.replace("vllm:8000", site.stub.addresses[0])
    shell = ["bash", "-o", "pipefail", "-c", here]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(answer, done.stdout, re.MULTILINE), done.stdout[:500]


def test_the_runbook_s_commands_are_among_them() -> None:
    blocks = re.findall(r"^```\w*\n(.*?)^```", TEXTS[0].read_text(), re.MULTILINE | re.DOTALL)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    commands = {line for line in lines if line.startswith("curl ")}
    assert commands
    assert commands <= {command for command, _ in COMMANDS}


def test_a_scheduler_that_is_gone_is_noticed(site: Site, tmp_path: Path) -> None:
    serve, prometheus = Serve(tmp_path), Prometheus(tmp_path)
    try:
        serve.start(configuration(site.stub, tmp_path))
        jobs = {"inference-scheduler": [serve.admin.removeprefix("http://")]}
        prometheus.start(find("prometheus", "prometheus"), jobs)
        prometheus.poll_until(lambda: bool(prometheus.ask('up{job="inference-scheduler"} == 1')))
        serve.end()
        # A busy machine can miss a scrape of the scheduler while it runs, so the alert alone says too little.
        prometheus.poll_until(lambda: bool(prometheus.ask('up{job="inference-scheduler"} == 0')))
        prometheus.poll_until(lambda: bool(prometheus.ask('ALERTS{alertname="EPPPodDown"}')))
    finally:
        prometheus.end()
        serve.end()
