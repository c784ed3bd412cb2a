"""CRDs of projects that the chart makes objects for, as those projects publish them in their Go modules.

Nothing of them lies in the tree. `go mod download` fetches a module; the sums are checked here and by Go's database.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

#: (module, version, sum, files with CRDs, kinds wanted)
MODULES = (
    (
        "sigs.k8s.io/gateway-api",
        "v1.4.1",
        "h1:NPxFutNkKNa8UfLd2CMlEuhIPMQgDQ6DXNKG9sHbJU8=",
        "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",
        ("HTTPRoute",),
    ),
    (
        "istio.io/api",
        "v1.31.1",
        "h1:5Yb5ihcz4YQsCkciusK7DnFpBMwRB6EFWeUKH1Atuyk=",
        "kubernetes/customresourcedefinitions.gen.yaml",
        ("DestinationRule",),
    ),
    (
        "github.com/prometheus-operator/prometheus-operator",
        "v0.85.0",
        "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s=",
        "example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml",
        ("ServiceMonitor",),
    ),
    (
        "github.com/prometheus-operator/prometheus-operator",
        "v0.85.0",
        "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s=",
        "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
        ("PrometheusRule",),
    ),
    (
        "github.com/kedacore/keda/v2",
        "v2.17.2",
        "h1:xlrcK5TKABJF9PebK79sgL07s/csGjL3H4m72OkZXxk=",
        "config/crd/bases/keda.sh_scaledobjects.yaml",
        ("ScaledObject",),
    ),
    (
        "github.com/cert-manager/cert-manager",
        "v1.18.2",
        "h1:H2P75ycGcTMauV3gvpkDqLdS3RSXonWF2S49QGA1PZE=",
        "deploy/crds/crd-certificates.yaml",
        ("Certificate",),
    ),
)
#: Sums of upstream's module of InferencePools, by version.
UPSTREAM = {
    "v1.0.0": "h1:GsHvlu1Cn1t6+vrHoPdNNlpwKxf/y1HuQSlUjd58Ds8=",
    "v1.6.0": "h1:cjtwMJYcTnLXBYE5ffR1/hHhn7U1aIFfe2RITYmOXVA=",
}
#: Objects of kinds whose definition is published nowhere as a module; they are rendered, not checked against a schema.
UNPUBLISHED = ("HealthCheckPolicy", "GCPBackendPolicy", "PodMonitoring", "Rules")


def foreign_crds(go: str, only: str = "") -> Iterator[dict[str, Any]]:
    """`only`: this kind. Raises as `_published` does."""
    for module in MODULES:
        if not only or only in module[4]:
            yield from _published(go, *module)


def upstream_pool_crd(go: str, version: str) -> dict[str, Any]:
    """Upstream's definition of InferencePools in this version. Raises as `_published` does."""
    module, path = "sigs.k8s.io/gateway-api-inference-extension", "inference.networking.k8s.io_inferencepools.yaml"
    return next(_published(go, module, version, UPSTREAM[version], f"config/crd/bases/{path}", ("InferencePool",)))


def _published(
    go: str, module: str, version: str, expected: str, path: str, kinds: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """Raises `AssertionError` when a module has another sum, `OSError` when it cannot be fetched."""
    environment = {**os.environ, "GOFLAGS": "-mod=mod", "GO111MODULE": "on"}
    command = [go, "mod", "download", "-json", f"{module}@{version}"]
    run = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True)
    said = json.loads(run.stdout or "{}")
    if "Dir" not in said:
        raise OSError(f"{module} cannot be fetched: {said.get('Error') or run.stderr}")
    assert said["Sum"] == expected, f"{module} {version} has another sum: {said['Sum']}"
    # cert-manager's files are templates of its chart; the definitions themselves hold no template.
    lines = (Path(said["Dir"]) / path).read_text().splitlines()
    plain = "\n".join(line for line in lines if "{{" not in line)
    for document in yaml.load_all(plain, yaml.CSafeLoader):
        if document and document["spec"]["names"]["kind"] in kinds:
            document["metadata"] = {
                "name": document["metadata"]["name"],
                "annotations": document["metadata"].get("annotations", {}),
            }
            yield document
