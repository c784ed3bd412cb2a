"""The shipped alert rules and dashboards: valid, tested both ways, explained, and made of metrics that exist."""

import json
import os
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from fairlead.server.observe.component_metrics import SPEED

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy" / "alerts"
RULES = sorted(path for path in ALERTS.glob("*.yaml") if not path.stem.endswith("_test"))
TESTS = sorted(ALERTS.glob("*_test.yaml"))
DASHBOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if not found:
        how = "promtool is missing: on Debian and Ubuntu `apt-get install prometheus`"
        if os.environ.get("FAIRLEAD_REQUIRE_ALL"):
            pytest.fail(how)
        pytest.skip(how)
    return found


def alerts() -> list[dict[str, Any]]:
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def run(*command: str) -> None:
    environment = {**os.environ, "GOGC": "400"}  # half of promtool's CPU time would be Go's collector
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules(promtool: str) -> None:
    assert RULES
    run(promtool, "check", "rules", *map(str, RULES))


def minutes(text: str) -> int:
    assert re.fullmatch(r"\d+[mh]", text), text
    return int(text[:-1]) * {"m": 1, "h": 60}[text[-1]]


def at_every_minute(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cases, and those that say nothing fires also for each minute before, unless the alert fired earlier."""
    fires = {case["alertname"]: minutes(case["eval_time"]) for case in reversed(cases) if case["exp_alerts"]}
    made = []
    for case in cases:
        last = minutes(case["eval_time"])
        quiet = not case["exp_alerts"] and last < fires.get(case["alertname"], last + 1)
        first = 0 if quiet else last
        made += [{**case, "eval_time": f"{minute}m"} for minute in range(first, last + 1)]
    return made


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_rules_fire_and_keep_silent_as_written(promtool: str, path: Path, tmp_path: Path) -> None:
    written = yaml.safe_load(path.read_text())
    written["rule_files"] = [str(ALERTS / name) for name in written["rule_files"]]
    for group in written["tests"]:
        group["alert_rule_test"] = at_every_minute(group["alert_rule_test"])
    expanded = tmp_path / path.name
    expanded.write_text(yaml.safe_dump(written))
    run(promtool, "test", "rules", str(expanded))


#: Alerts as published, those about damage that lasts, and two that say that something has not happened.
OTHERS = {"HighTTFT", "LowCacheHitRate", "EPPHighLatency", "FairleadJournalLoses", "FairleadKvEventsLost"}
OTHERS |= {"FairleadKvFeedSilent", "FairleadNoEndpoints", "FairleadGatewayCrashes"}


def test_windows_outlast_rare_events_and_missed_scrapes_and_end_before_the_alert_fires() -> None:
    windows = {rule["alert"]: {*map(int, re.findall(r"\[(\d+)m\]", rule["expr"]))} for rule in alerts()}
    shorter = {"FairleadErrorsCritical": {3}, "FairleadNoEndpoints": {2}}
    assert {alert: lengths for alert, lengths in windows.items() if lengths and min(lengths) < 5} == shorter
    assert not {
        rule["alert"]
        for rule in alerts()
        if rule["alert"] not in OTHERS and max(windows[rule["alert"]], default=0) >= minutes(rule.get("for", "0m"))
    }


def test_each_trouble_has_its_line_in_the_runbook() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "src" / "fairlead" / "server").rglob("*.py"))
    whats = {*re.findall(r"""troubles\.(?:watch|lately)\(\s*"([\w-]+)\"""", sources)}
    whats |= {SPEED, *re.findall(r"""self\._tls\("([\w-]+)\"""", sources)}
    (rule,) = [each for each in alerts() if each["alert"] == "FairleadTrouble"]
    left_out = re.compile(rule["expr"].partition('!~"')[2].partition('"')[0])
    section = (ROOT / "docs" / "runbook.md").read_text().partition("## FairleadTrouble\n")[2].partition("\n## ")[0]
    assert {*re.findall(r"`([\w-]+)`", re.sub(r"\|[^|]*\|\n", "|\n", section.partition("|---|---|\n")[2]))} == {
        what for what in whats if not left_out.fullmatch(what)
    }


def test_each_alert_is_tested_firing_and_silent() -> None:
    fired: dict[str, set[bool]] = defaultdict(set)
    for path in TESTS:
        for group in yaml.safe_load(path.read_text())["tests"]:
            for case in group["alert_rule_test"]:
                fired[case["alertname"]].add(bool(case["exp_alerts"]))
    assert {rule["alert"]: fired[rule["alert"]] for rule in alerts()} == {
        rule["alert"]: {True, False} for rule in alerts()
    }


def test_each_alert_has_its_runbook_section_and_layer() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    for rule in alerts():
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert page == "docs/runbook.md"
        assert anchor in anchors, rule["alert"]
        assert rule["labels"]["layer"] in ("business", "application", "resource", "infrastructure")
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
    named = {rule["annotations"]["runbook"].partition("#")[2] for rule in alerts()}
    assert anchors - named == {"load-is-uneven"}, "a symptom without an alert"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_are_what_grafana_reads(promtool: str, path: Path, tmp_path: Path) -> None:
    dashboard = json.loads(path.read_text())
    assert dashboard["uid"]
    assert dashboard["title"]
    assert dashboard["schemaVersion"] >= 36
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies on another panel"
        assert place["x"] + place["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["targets"], panel["title"]
            assert panel["description"], panel["title"]
    rules = [{"record": f"panel:{i}", "expr": expr} for i, expr in enumerate(expressions(dashboard))]
    parsed = tmp_path / "panels.yaml"
    parsed.write_text(yaml.safe_dump({"groups": [{"name": path.stem, "rules": rules}]}))
    run(promtool, "check", "rules", str(parsed))


QUIET = {"llm_d_epp_request_total": "0+60x20", "fairlead_flow_waiting_requests": "0x20"}
READY = {"llm_d_epp_ready_endpoints": "3x20"}
BYPASS = "Served without asking, refused, failed plugins"
FALLBACKS = 'fairlead_fallback_requests_total{endpoint="a"}'


def by_two(series: str, *values: str) -> dict[str, str]:
    """A series, its last brace open, as two schedulers show it."""
    return {f'{series},instance="{i}"}}'.replace("{,", "{"): each for i, each in enumerate(values)}


HITS = {
    'kv_cache_lookup_total{instance="0"}': "0+600x20",
    'kv_cache_lookup_total{model_name="m"}': "0+600x20",
    'kv_cache_lookup_total{model_name="other"}': "0+600x20",
    'kv_cache_hit_total{model_name="m"}': "0+300x20",
    'kv_cache_hit_total{model_name="other"}': "0x20",
}
TTFT = {
    f'llm_d_epp_request_ttft_seconds_bucket{{streaming="{streaming}",le="{le}"}}': values
    for streaming, le, values in (("true", 1, "0+60x20"), ("true", "+Inf", "0+60x20"), ("false", "+Inf", "0+60x20"))
}
PANELS: list[tuple[str, dict[str, str], float | dict[str, float]]] = [
    # Without any scheduler nobody knows of errors.
    ("Errors", {}, {}),
    ("Errors", READY, 0.0),
    ("Errors", READY | {"llm_d_epp_request_total": "0x20", "llm_d_epp_request_error_total": "0x20"}, 0.0),
    ("Errors", READY | QUIET, 0.0),
    ("Errors", QUIET | {"llm_d_epp_request_error_total": "0+30x20"}, 0.5),
    ("Waiting by priority", QUIET, 0.0),
    ("Waiting by priority", QUIET | {'llm_d_epp_flow_control_queue_size{priority="0"}': "7x20"}, 7.0),
    # Requests served while the scheduler hung: the count per endpoint begins with them.
    (BYPASS, {"fairlead_unscheduled_requests_total": "0x5 300x15", FALLBACKS: "_x5 300x15"}, 1.0),
    (BYPASS, {FALLBACKS: "0+60x20"}, 1.0),
    # An unstreamed answer's first byte comes when all of it is done.
    ("Time to first token", TTFT, 0.5),
    ("Queue limits in use", {'llm_d_epp_flow_control_capacity_utilization_requests{priority="0"}': "0.5x20"}, 0.5),
    # `fairlead indexer` counts blocks under the same names, and `other` are names that clients make up.
    ("Prefix cache hit rate", by_two("kv_cache_hit_total{", "0x20") | HITS, 0.5),
    (
        "Hit rate by model",
        by_two('kv_cache_lookup_total{model_name="m"', "0+60x20", "0+180x20")
        | by_two('kv_cache_hit_total{model_name="m"', "0+60x20", "0x20"),
        {'{model_name="m"}': 0.25},
    ),
    # What several schedulers say of the pool is said once; a feed counts if it is connected to all of them.
    ("Endpoints with fresh metrics", by_two('llm_d_epp_ready_endpoints{name="p"', "3x20", "2x20"), 3.0),
    ("Feeds connected", by_two('fairlead_kv_feed_connected{endpoint="a",rank="0"', "1x20", "1x20"), 1.0),
    ("Feeds connected", by_two('fairlead_kv_feed_connected{endpoint="a",rank="0"', "1x20", "0x20"), 0.0),
    ("Desired replicas", by_two("fairlead_desired_replicas{", "3x20", "2x20"), 3.0),
    (
        "Desired replicas",
        by_two('fairlead_desired_replicas{inference_pool="a"', "3x20", "2x20")
        | {'fairlead_desired_replicas{inference_pool="b"}': "7x20"},
        {'{inference_pool="a"}': 3.0, '{inference_pool="b"}': 7.0},
    ),
    (
        "Desired replicas",
        by_two('fairlead_desired_replicas{role="prefill"', "3x20", "2x20")
        | {'fairlead_desired_replicas{role="decode"}': "7x20"},
        {'{role="prefill"}': 3.0, '{role="decode"}': 7.0},
    ),
    ("Queue by endpoint", by_two('llm_d_epp_per_endpoint_queue_size{name="p"', "4x20", "5x20"), 5.0),
    ("Requests in flight by endpoint", by_two("fairlead_endpoint_leases{", "4x20", "5x20"), 5.0),
]  # fmt: skip


@pytest.mark.parametrize(("title", "series", "value"), PANELS, ids=lambda one: str(one)[:40])
def test_panels_show_what_happened(
    promtool: str, title: str, series: dict[str, str], value: float | dict[str, float], tmp_path: Path
) -> None:
    dashboard = json.loads(DASHBOARDS[0].read_text())
    panel = next(panel for panel in dashboard["panels"] if panel["title"] == title)
    if not isinstance(value, dict):
        value = {'{priority="0"}' if "priority" in str(series) else "{}": value}
    samples = [{"labels": labels, "value": each} for labels, each in value.items()]
    check = {"expr": f"({panel['targets'][0]['expr']}) + 0", "eval_time": "8m", "exp_samples": samples}
    given = [{"series": name, "values": values} for name, values in series.items()]
    tests = [{"interval": "1m", "input_series": given, "promql_expr_test": [check]}]
    written = tmp_path / "panel_test.yaml"
    written.write_text(yaml.safe_dump({"tests": tests}))
    run(promtool, "test", "rules", str(written))
