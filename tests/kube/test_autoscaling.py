"""The examples of deploy/autoscaling: objects that an API server takes, and what they would make of a pool."""

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
#: What each scheduler desires (`None` = it does not know yet) → replicas (`None` = they stay).
CASES = {
    "idle": ([0, 0], 2),
    "one decides": ([8, 0], 8),
    "a new one does not know": ([8, None], 8),
    "all publish the pool's": ([7, 8], 8),
    "overrun": ([32, 0], 16),
    "nobody knows": ([None, None], None),
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


def test_the_tolerance_that_the_comment_names_is_kept(kube: Cluster, namespace: str) -> None:
    """Without it 11 of 10 replicas are within 10 %, which counts as no difference."""
    assert '`tolerance: "0"`' in (FOLDER / "hpa.yaml").read_text(encoding="utf-8")
    behavior = {way: {**rules, "tolerance": "0"} for way, rules in HPA["spec"]["behavior"].items()}
    metadata = {**HPA["metadata"], "namespace": namespace}
    created = kube.admin.apply({**HPA, "metadata": metadata, "spec": {**HPA["spec"], "behavior": behavior}})
    assert [created["spec"]["behavior"][way]["tolerance"] for way in ("scaleUp", "scaleDown")] == ["0", "0"]


def test_both_shrink_alike() -> None:
    hpa, keda = HPA["spec"], KEDA["spec"]
    assert keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == hpa["behavior"]
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == (hpa["minReplicas"], hpa["maxReplicas"])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["hpa.yaml", "keda.yaml"])
def test_replicas_grow_and_shrink(name: str, case: str, tmp_path: Path) -> None:
    """Prometheus takes the largest; an autoscaler divides it by its target, within its limits."""
    promtool = shutil.which("promtool")
    if not promtool:
        how = "promtool is missing: on Debian and Ubuntu `apt-get install prometheus`"
        (pytest.fail if os.environ.get("FAIRLEAD_REQUIRE_ALL") else pytest.skip)(how)
    desired, replicas = CASES[case]
    series = [
        {"series": f'fairlead_desired_replicas{{pod="{pod}"}}', "values": str(value)}
        for pod, value in enumerate(desired)
        if value is not None
    ]
    known = [value for value in desired if value is not None]
    ((expression, target),) = queries(name)
    assert target == 1.0
    expected = [{"labels": "{}", "value": float(max(known))}] if known else []
    if known:
        assert min(max(*known, HPA["spec"]["minReplicas"]), HPA["spec"]["maxReplicas"]) == replicas
    elif name == "keda.yaml":
        (trigger,) = KEDA["spec"]["triggers"]
        assert trigger["metadata"]["ignoreNullValues"] == "false", "by default KEDA takes no number for 0"
    tests = [{"expr": expression, "eval_time": "0m", "exp_samples": expected}]
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"tests": [{"input_series": series, "promql_expr_test": tests}]}))
    run = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
