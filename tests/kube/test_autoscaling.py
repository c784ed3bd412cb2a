"""The examples of deploy/autoscaling: objects that an API server takes, and what they would make of a pool."""

import math
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kr_cluster import Cluster
from kr_schemas import foreign_crds

FOLDER = Path(__file__).parents[2] / "deploy" / "autoscaling"
HPA, KEDA = (yaml.safe_load((FOLDER / name).read_text()) for name in ("hpa.yaml", "keda.yaml"))
#: (endpoints, what Fairlead desires, requests that wait, requests that run by replica of it) → replicas.
CASES = {
    "idle": (8, 8, 0, [0, 0], 2),
    "half-loaded": (8, 8, 0, [100, 0], 4),
    "loaded": (8, 8, 0, [256, 0], 8),
    "waiting": (8, 11, 5, [250, 0], 11),
    "independent-schedulers": (8, 8, 0, [100, 92], 6),
    "overrun": (8, 32, 500, [256, 0], 16),
}


def adapter_queries() -> dict[str, str]:
    """By external metric, as prometheus-adapter would ask for the example, without label matchers."""
    text = "\n".join(re.findall(r"^#   (.*)$", (FOLDER / "hpa.yaml").read_text(), re.MULTILINE))
    rules = yaml.safe_load(text)["rules"]["external"]
    return {rule["name"]["as"]: rule["metricsQuery"].replace("<<.LabelMatchers>>", "") for rule in rules}


def queries(name: str) -> list[tuple[str, float]]:
    """(expression, target of its average value)"""
    if name == "hpa.yaml":
        asked = adapter_queries()
        metrics = [metric["external"] for metric in HPA["spec"]["metrics"]]
        assert {metric["target"]["type"] for metric in metrics} == {"AverageValue"}
        return [(asked[metric["metric"]["name"]], float(metric["target"]["averageValue"])) for metric in metrics]
    triggers = KEDA["spec"]["triggers"]
    assert {trigger["metricType"] for trigger in triggers} == {"AverageValue"}
    return [(trigger["metadata"]["query"], float(trigger["metadata"]["threshold"])) for trigger in triggers]


@pytest.mark.parametrize("thing", [HPA, KEDA], ids=lambda thing: str(thing["kind"]))
def test_they_are_applied_strictly(kube: Cluster, namespace: str, go: str, thing: dict[str, Any]) -> None:
    for crd in foreign_crds(go, "ScaledObject"):
        kube.install_crd(crd)
    created = kube.admin.apply({**thing, "metadata": {**thing["metadata"], "namespace": namespace}})
    assert created["spec"]["scaleTargetRef"]["name"] == "vllm"


def test_both_shrink_alike() -> None:
    hpa, keda = HPA["spec"], KEDA["spec"]
    assert keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == hpa["behavior"]
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == (hpa["minReplicas"], hpa["maxReplicas"])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["hpa.yaml", "keda.yaml"])
def test_replicas_grow_and_shrink(name: str, case: str, tmp_path: Path) -> None:
    """Prometheus computes totals; an autoscaler divides each by its target and takes the larger, within its limits."""
    promtool = shutil.which("promtool")
    if not promtool:
        how = "promtool is missing: on Debian and Ubuntu `apt-get install prometheus`"
        (pytest.fail if os.environ.get("FAIRLEAD_REQUIRE_ALL") else pytest.skip)(how)
    endpoints, desired, waiting, running, replicas = CASES[case]
    values = {"fairlead_desired_replicas": [desired, endpoints], "fairlead_flow_waiting_requests": [waiting, 0]}
    series = [
        {"series": f'{metric}{{pod="{pod}"}}', "values": str(value)}
        for metric, found in (*values.items(), ("fairlead_leases", running))
        for pod, value in enumerate(found)
    ]
    wanted = max(desired if waiting else 0, math.ceil(sum(running) / 32))
    assert min(max(wanted, HPA["spec"]["minReplicas"]), HPA["spec"]["maxReplicas"]) == replicas
    expected = [float(desired if waiting else 0), float(sum(running))]
    (by_queue, one), (by_load, each) = queries(name)
    assert (one, each) == (1.0, 32.0)
    tests = [
        {"expr": expression, "eval_time": "0m", "exp_samples": [{"labels": "{}", "value": value}]}
        for expression, value in zip((by_queue, by_load), expected, strict=True)
    ]
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"tests": [{"input_series": series, "promql_expr_test": tests}]}))
    run = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
