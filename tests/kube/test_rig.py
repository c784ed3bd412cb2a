"""The rig itself: what other tests take for granted about the API server is so."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kr_client import Refused
from kr_cluster import Cluster

LIST_PODS = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}}


def test_pods_get_addresses_and_readiness(kube: Cluster, namespace: str) -> None:
    kube.pod(namespace, "a", "127.0.0.5", ready=False, labels={"app": "x"})
    assert kube.set_ready(namespace, "a", True)["status"]["conditions"][0]["status"] == "True"
    assert kube.admin.get(POD, namespace)["status"]["podIP"] == "127.0.0.5"
    kube.delete_pod(namespace, "a", grace=30)
    assert "deletionTimestamp" in kube.admin.get(POD, namespace)["metadata"]
    kube.delete_pod(namespace, "a")
    with pytest.raises(Refused) as gone:
        kube.admin.get(POD, namespace)
    assert gone.value.status == 404


def test_an_account_may_do_what_its_role_says(kube: Cluster, namespace: str) -> None:
    client = kube.client(kube.account(namespace, "reader", LIST_PODS))
    pods = f"/api/v1/namespaces/{namespace}/pods"
    assert client.request("GET", pods)[0] == 200
    assert client.request("POST", pods, POD)[0] == 403
    assert client.request("GET", "/api/v1/namespaces/default/pods")[0] == 403
    assert kube.client("nonsense").request("GET", pods)[0] == 401


def test_the_crds_of_the_chart_are_installed(kube: Cluster) -> None:
    groups = {group["name"] for group in kube.admin.must("GET", "/apis")["groups"]}
    assert {"inference.networking.k8s.io", "inference.networking.x-k8s.io", "llm-d.ai"} <= groups


def watch(cluster: Cluster, version: str) -> tuple[int, Any]:
    return cluster.admin.request("GET", "/api/v1/pods", watch="1", resourceVersion=version, timeoutSeconds="1")


def test_history_ends_with_a_restart_after_compaction(own_kube: Callable[..., Cluster]) -> None:
    cluster = own_kube()
    old = cluster.pod("default", "a", "10.1.0.1")["metadata"]["resourceVersion"]
    cluster.pod("default", "b", "10.1.0.2")
    assert "10.1.0.2" in [event["object"]["status"].get("podIP") for event in watch(cluster, old)[1]]
    url = cluster.url
    assert cluster.compact() > int(old)
    cluster.restart(kill=True)
    assert cluster.url == url
    status, (event,) = watch(cluster, old)
    assert (status, event["type"], event["object"]["code"]) == (200, "ERROR", 410)
    assert [pod["metadata"]["name"] for pod in cluster.admin.must("GET", "/api/v1/pods")["items"]] == ["a", "b"]


def test_a_twin_sees_the_same_objects(own_kube: Callable[..., Cluster], tmp_path: Path) -> None:
    first = own_kube()
    twin = own_kube(twin_of=first)
    first.pod("default", "a", "10.1.0.1")
    assert twin.admin.get(POD, "default")["status"]["podIP"] == "10.1.0.1"
    assert first.url != twin.url
    kubeconfig = first.kubeconfig(tmp_path / "config").read_text()
    assert first.url in kubeconfig and "client-certificate" in kubeconfig


def test_its_end_leaves_no_process_behind(own_kube: Callable[..., Cluster]) -> None:
    cluster = own_kube()
    cluster.stop()
    assert not cluster.process.running
    with pytest.raises(OSError):
        cluster.admin.request("GET", "/readyz")
