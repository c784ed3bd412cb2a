"""What the chart gives those who watch: alert rules, dashboards, monitors, where spans go."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kr_helm import CHART, LABELS, Helm, of_kind, one

from fairlead.compat.load import load

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "alerts" / "fairlead.yaml"
DASHBOARD = DEPLOY / "grafana" / "fairlead.json"
WITH_RULES = (*LABELS, "--set", "monitoring.rules.enabled=true")
WITH_DASHBOARDS = (*LABELS, "--set", "monitoring.dashboards.enabled=true")
#: Before labels in braces and values in pipes, Helm would stumble.
BRACES = "{{ $labels.instance }}"


def names(rules: dict[str, Any]) -> set[str]:
    return {rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule}


def test_all_of_it_is_off_by_default(helm: Helm) -> None:
    objects = helm.render(*LABELS)
    kinds = {thing["kind"] for thing in objects}
    assert not kinds & {"PrometheusRule", "Rules", "ServiceMonitor", "PodMonitoring"}
    assert load(one(objects, "ConfigMap")["data"]["fairlead.yaml"]).tracing.endpoint == ""


def test_the_rules_are_those_of_the_file(helm: Helm) -> None:
    """With the templates in them that Prometheus fills in."""
    rendered = one(helm.render(*WITH_RULES, "--set", "monitoring.labels.release=prometheus"), "PrometheusRule")
    written = yaml.safe_load(RULES.read_text())
    assert rendered["spec"] == written
    assert BRACES in json.dumps(rendered)
    assert rendered["metadata"]["labels"]["release"] == "prometheus"


def test_labels_may_be_null(helm: Helm) -> None:
    unset = "monitoring.enabled=true,monitoring.labels=null,monitoring.dashboards.labels=null"
    objects = helm.render(*WITH_RULES, *WITH_DASHBOARDS, "--set", unset)
    for kind, name in (("ServiceMonitor", ""), ("PrometheusRule", ""), ("ConfigMap", "-dashboards")):
        assert one(objects, kind, name)["metadata"]["labels"]["app.kubernetes.io/instance"] == "one"


def test_the_dashboard_is_the_file_to_the_byte(helm: Helm) -> None:
    rendered = one(helm.render(*WITH_DASHBOARDS), "ConfigMap", "-dashboards")
    assert rendered["data"] == {DASHBOARD.name: DASHBOARD.read_text()}
    assert rendered["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert rendered["metadata"]["namespace"] == "default"
    more = ("monitoring.dashboards.namespace=grafana", "monitoring.dashboards.annotations.grafana_folder=LLM")
    elsewhere = one(helm.render(*WITH_DASHBOARDS, "--set", ",".join(more)), "ConfigMap", "-dashboards")["metadata"]
    assert (elsewhere["namespace"], elsewhere["annotations"]) == ("grafana", {"grafana_folder": "LLM"})


def test_the_dashboard_has_the_metrics_that_rules_record_for_it(helm: Helm) -> None:
    objects = helm.render(*WITH_DASHBOARDS, "--set", "monitoring.enabled=true")
    rules = [rule for group in one(objects, "PrometheusRule")["spec"]["groups"] for rule in group["rules"]]
    recorded = {rule.get("record") for rule in rules}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    wanted = {
        word for panel in panels for t in panel.get("targets", ()) for word in re.findall(r"\bvllm_\w+", t["expr"])
    }
    assert wanted and wanted <= recorded and None not in recorded
    alone = {thing["kind"] for thing in helm.render(*WITH_DASHBOARDS)}
    assert "PrometheusRule" not in alone, "without monitoring there may be no such resource"


def test_a_package_has_both(helm: Helm, tmp_path: Path) -> None:
    run = helm.run("package", str(CHART), "--destination", str(tmp_path))
    assert run.returncode == 0, run.stderr
    assert "WARN" not in run.stderr and "symlink" not in run.stderr
    (package,) = tmp_path.glob("*.tgz")
    more = ("--set", "monitoring.dashboards.enabled=true")
    run = helm.run("template", "one", str(package), "--namespace", "default", *WITH_RULES, *more)
    assert run.returncode == 0, run.stderr
    packed = [thing for thing in yaml.safe_load_all(run.stdout) if thing]
    assert one(packed, "PrometheusRule")["spec"] == yaml.safe_load(RULES.read_text())
    assert one(packed, "ConfigMap", "-dashboards")["data"] == {DASHBOARD.name: DASHBOARD.read_text()}


def test_alerts_can_be_left_out(helm: Helm) -> None:
    every = names(yaml.safe_load(RULES.read_text()))
    left = one(helm.render(*WITH_RULES, "--set", "monitoring.rules.disabled={HighTTFT,EPPPodDown}"), "PrometheusRule")
    assert every - names(left["spec"]) == {"HighTTFT", "EPPPodDown"}
    recorded = [rule for group in left["spec"]["groups"] for rule in group["rules"] if "record" in rule]
    assert len(recorded) == 4
    said = helm.refused(*WITH_RULES, "--set", "monitoring.rules.disabled={HighTTTF}")
    assert "there is no alert HighTTTF; there are" in said and "HighTTFT" in said


def test_google_s_rules_know_the_job_by_its_other_name(helm: Helm) -> None:
    """A PodMonitoring's job has its name; it cannot be given another one."""
    objects = helm.render(*WITH_RULES, "--set", "monitoring.provider=gmp,monitoring.enabled=true")
    rules = one(objects, "Rules")
    assert names(rules["spec"]) == names(yaml.safe_load(RULES.read_text()))
    job = one(objects, "PodMonitoring")["metadata"]["name"]
    assert f'job="{job}"' in json.dumps(rules).replace('\\"', '"')
    assert "inference-scheduler" not in json.dumps(rules["spec"])


@pytest.mark.parametrize("name", ["indexer", "indexer-dialled"])
def test_each_part_is_monitored_at_a_port_that_it_has(helm: Helm, name: str) -> None:
    objects = helm.render("--values", str(Path(__file__).parent / "values" / f"{name}.yaml"))
    for part, job in (("-epp", "inference-scheduler"), ("-indexer", "kv-cache-indexer")):
        pod = one(objects, "Deployment", part)["spec"]["template"]
        if of_kind(objects, "PodMonitoring"):
            spec = one(objects, "PodMonitoring", part)["spec"]
            ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
            assert spec["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        else:
            spec = one(objects, "ServiceMonitor", part)["spec"]
            chosen = spec["selector"]["matchLabels"].items()
            services = [one for one in of_kind(objects, "Service") if chosen <= one["metadata"]["labels"].items()]
            assert {one["metadata"]["labels"][spec["jobLabel"]] for one in services} == {job}
            ports = {port["name"] for one in services for port in one["spec"]["ports"]}
        assert spec["endpoints"][0]["port"] in ports


ADMIN = {
    "tls": {"certDir": "/etc/fairlead-admin"},
    "tokenFile": "/etc/fairlead-admin/token",
    "host": "127.0.0.1",
    "port": 9091,
    "metricsHost": "0.0.0.0",
    "metricsPort": 9090,
}


def test_pages_of_an_own_port_with_tls_and_a_token_are_asked_as_they_answer(helm: Helm) -> None:
    """The settings of docs/operations.md."""
    token = {"credentials": {"name": "admin", "key": "token"}}
    more = (*LABELS, "--set-json", f"config.admin={json.dumps(ADMIN)}", "--set", "monitoring.enabled=true")
    authorized = (*more, "--set-json", f"monitoring.endpoint.authorization={json.dumps(token)}")
    objects = helm.render(*authorized, "--set", "standalone.enabled=true")
    container = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert {port["name"]: port["containerPort"] for port in container["ports"]}["metrics"] == 9090
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"
    (endpoint,) = one(objects, "ServiceMonitor")["spec"]["endpoints"]
    assert (endpoint["scheme"], endpoint["path"], endpoint["authorization"]) == ("https", "/metrics", token)
    assert "monitoring.endpoint.authorization" in helm.refused(*more)
    older = ("--set", "monitoring.endpoint.bearerTokenSecret.name=admin")
    assert one(helm.render(*more, *older), "ServiceMonitor")["spec"]["endpoints"][0]["bearerTokenSecret"]


@pytest.mark.parametrize("asked", ["standalone.enabled=true", "monitoring.enabled=true"])
def test_pages_that_nobody_can_ask_are_refused(helm: Helm, asked: str) -> None:
    lonely = "config.admin.host=127.0.0.1"
    assert "config.admin.host" in helm.refused(*LABELS, "--set", f"{asked},{lonely}")
    assert helm.render(*LABELS, "--set", lonely)


def test_an_indexer_serves_the_port_of_its_configuration(helm: Helm) -> None:
    values = "enabled=true,mode=service,config.admin.port=9191".replace(",", ",inferenceExtension.kvcacheIndexer.")
    objects = helm.render(*LABELS, "--set", f"inferenceExtension.kvcacheIndexer.{values}")
    container = one(objects, "Deployment", "-indexer")["spec"]["template"]["spec"]["containers"][0]
    assert container["ports"][0] == {"name": "http", "containerPort": 9191, "protocol": "TCP"}


def test_notes_say_when_the_rules_have_nothing_to_go_by(helm: Helm) -> None:
    assert "monitoring.enabled is false" in helm.notes(*WITH_RULES)
    assert "monitoring.enabled" not in helm.notes(*WITH_RULES, "--set", "monitoring.enabled=true")


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("http://otel-collector.observability:4318/v1/traces", 4318),
        ("https://collector.example.com/v1/traces", 443),
        ("http://collector/v1/traces", 80),
        ("http://[fd00::1]:4318/v1/traces", 4318),
    ],
)
@pytest.mark.parametrize("place", ["tracing", "config.tracing"])
def test_spans_reach_their_collector(helm: Helm, endpoint: str, port: int, place: str) -> None:
    objects = helm.render(*LABELS, "--set", f"{place}.endpoint={endpoint}", "--set", "networkPolicy.egress=true")
    tracing = load(one(objects, "ConfigMap")["data"]["fairlead.yaml"]).tracing
    assert (tracing.endpoint, tracing.sample) == (endpoint, 0.1)
    egress = one(objects, "NetworkPolicy")["spec"]["egress"]
    assert {"ports": [{"port": port, "protocol": "TCP"}]} in egress


def test_the_configuration_wins_over_the_value(helm: Helm) -> None:
    more = ("--set", "tracing.endpoint=http://a:4318/v1/traces", "--set", "config.tracing.maxRate=7")
    objects = helm.render(*LABELS, *more, "--set", "tracing.sample=0.25")
    tracing = load(one(objects, "ConfigMap")["data"]["fairlead.yaml"]).tracing
    assert (tracing.endpoint, tracing.max_rate, tracing.sample) == ("http://a:4318/v1/traces", 7, 0.25)
    assert "does not match pattern" in helm.refused(*LABELS, "--set", "tracing.sample=1.5")
