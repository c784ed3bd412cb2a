"""What the chart writes, run: its configuration, role, certificate and probes, against a real API server."""

import subprocess
from base64 import b64decode
from pathlib import Path

import grpc
import pytest
from kr_cluster import Cluster
from kr_helm import LABELS, Helm, of_kind, one
from kr_runs import Children, check, get, installed, stub_port, until
from ports import free_ports


def test_standalone_serves_the_pods_of_its_pool(
    kube: Cluster, namespace: str, helm: Helm, start: Children, tmp_path: Path
) -> None:
    port = stub_port(start)
    gateway, admin, picker = free_ports(3)
    objects = helm.render(
        *LABELS,
        *("--set", "standalone.enabled=true", "--set", f"inferencePool.targetPorts[0].number={port}"),
        *("--set", "inferenceObjectives[0].name=chat", "--set", "inferenceObjectives[0].priority=1"),
        *("--set", f"config.gateway.port={gateway}", "--set", f"config.admin.port={admin}"),
        *("--set", f"config.extProc.port={picker}", "--set", f"config.kubernetes.kubeconfig={tmp_path}/kubeconfig"),
        namespace=namespace,
    )
    installed(kube, namespace, objects, tmp_path / "kubeconfig")
    (tmp_path / "fairlead.yaml").write_text(one(objects, "ConfigMap")["data"]["fairlead.yaml"])
    kube.pod(namespace, "vllm-0", "127.0.0.1", labels={"app": "vllm"})
    kube.pod(namespace, "other", "127.0.0.9", labels={"app": "other"})
    start("serve", str(tmp_path / "fairlead.yaml"))
    ready = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"]
    until(lambda: get(f"http://127.0.0.1:{admin}{ready['path']}"), "readiness")
    assert "data" in until(lambda: get(f"http://127.0.0.1:{gateway}/v1/models"), "an answer through Envoy")
    assert 'llm_d_epp_ready_endpoints{name="one"} 1' in get(f"http://127.0.0.1:{admin}/metrics")

    def accepted() -> bool:
        objective = kube.admin.get(one(objects, "InferenceObjective"))
        conditions = objective.get("status", {}).get("conditions", [])
        return any(one["type"] == "Accepted" and one["status"] == "True" for one in conditions)

    until(accepted, "the objective's condition")


@pytest.mark.parametrize("mode", ["generated", "pod"])
def test_the_picker_serves_tls_and_answers_its_probes(
    kube: Cluster, namespace: str, helm: Helm, start: Children, tmp_path: Path, mode: str
) -> None:
    picker, health, admin = free_ports(3)
    objects = helm.render(
        *LABELS,
        *("--set", f"config.extProc.port={picker}", "--set", f"config.extProc.healthPort={health}"),
        *("--set", f"config.extProc.tls.certDir={tmp_path}", "--set", f"config.admin.port={admin}"),
        *("--set", "inferenceExtension.replicas=2", "--set", f"config.kubernetes.kubeconfig={tmp_path}/kubeconfig"),
        *("--set", f"tls.mode={mode}"),
        namespace=namespace,
    )
    installed(kube, namespace, objects, tmp_path / "kubeconfig")
    (tmp_path / "fairlead.yaml").write_text(one(objects, "ConfigMap")["data"]["fairlead.yaml"])
    if mode == "generated":
        for name, value in one(objects, "Secret")["data"].items():
            (tmp_path / name).write_bytes(b64decode(value))
    else:
        (init,) = one(objects, "Deployment")["spec"]["template"]["spec"]["initContainers"]
        command = [word.replace("/etc/fairlead-tls", str(tmp_path)) for word in init["command"]]
        subprocess.run(command, check=True, capture_output=True)
    kube.pod(namespace, "vllm-0", "127.0.0.9", labels={"app": "vllm"})
    start("serve", str(tmp_path / "fairlead.yaml"), POD_IP="10.244.0.7", POD_NAME="epp-a")
    pod = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    with grpc.insecure_channel(f"127.0.0.1:{health}") as channel:
        for probe in (pod["livenessProbe"], pod["readinessProbe"]):
            until(lambda service=probe["grpc"]["service"]: check(channel, service), probe["grpc"]["service"])
    name = of_kind(objects, "Service")[0]["metadata"]["name"]
    trusted = grpc.ssl_channel_credentials((tmp_path / "tls.crt").read_bytes())
    options = [("grpc.ssl_target_name_override", f"{name}.{namespace}.svc")]
    with grpc.secure_channel(f"127.0.0.1:{picker}", trusted, options) as channel:
        assert check(channel, "envoy.service.ext_proc.v3.ExternalProcessor")
    lease = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": one(objects, "Deployment")["metadata"]["name"]},
    }
    assert kube.admin.get(lease, namespace)["spec"]["holderIdentity"]
    leads_to = of_kind(objects, "InferencePool")[0]["spec"]["endpointPickerRef"]["name"]
    found = {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": {"name": f"{leads_to}-ipv4"}}

    def told() -> bool:
        slice_ = kube.admin.get(found, namespace)
        ports = {one["name"]: one["port"] for one in slice_["ports"]}
        return bool(slice_["endpoints"][0]["addresses"] == ["10.244.0.7"] and ports == {"grpc-ext-proc": picker})

    assert until(told, "the slice that gateways read")
