"""The rendered chart in front of a real API server: strict schemas, admission, and roles that suffice."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kr_client import Object, Refused
from kr_cluster import Cluster
from kr_helm import CHART, LABELS, Helm, of_kind, one
from kr_schemas import UNPUBLISHED, UPSTREAM, foreign_crds, upstream_pool_crd

VALUES = sorted((Path(__file__).parent / "values").glob("*.yaml"))
POOL: Object = {
    "apiVersion": "inference.networking.k8s.io/v1",
    "kind": "InferencePool",
    "metadata": {"name": "p"},
    "spec": {
        "selector": {"matchLabels": {"app": "vllm"}},
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": {"name": "epp", "port": {"number": 9002}},
    },
}
MODEL: Object = {
    "apiVersion": "inference.networking.x-k8s.io/v1alpha2",
    "kind": "InferenceModel",
    "metadata": {"name": "m"},
    "spec": {"modelName": "chat", "poolRef": {"name": "p"}, "targetModels": [{"name": "a", "weight": 1}]},
}

DEPLOYMENT: Object = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "one-epp"}}


@pytest.fixture(scope="module")
def equipped(kube: Cluster, go: str) -> Cluster:
    """The shared cluster with the definitions of the gateways' and monitors' kinds."""
    for crd in foreign_crds(go):
        kube.install_crd(crd)
    return kube


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_every_object_is_applied_strictly(equipped: Cluster, namespace: str, helm: Helm, values: Path) -> None:
    """Unknown fields, doubled keys and wrong types would be errors; applying it again changes nothing."""
    objects = helm.render("--values", str(values), namespace=namespace)
    checked = [thing for thing in objects if thing["kind"] not in UNPUBLISHED]
    assert len(checked) >= 6
    for thing in checked:
        first = equipped.admin.apply(thing)
        again = equipped.admin.apply(thing)
        assert again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"], thing["kind"]
        if thing["kind"] == "HTTPRoute":  # Argo CD compares the elements of lists whole
            assert first["spec"] == thing["spec"]


def test_a_field_that_does_not_exist_is_refused(kube: Cluster, namespace: str, helm: Helm) -> None:
    """Or the test above would prove nothing."""
    deployment = one(helm.render(*LABELS, namespace=namespace), "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(Refused, match="readynessProbe"):
        kube.admin.apply(deployment)


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_its_pods_may_run_where_only_restricted_ones_may(
    kube: Cluster, namespace: str, helm: Helm, values: Path
) -> None:
    label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    kube.admin.patch({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}, label)
    objects = helm.render("--values", str(values), namespace=namespace)
    for deployment in (*of_kind(objects, "Deployment"), *of_kind(objects, "StatefulSet")):
        pod = {"apiVersion": "v1", "kind": "Pod", **deployment["spec"]["template"]}
        pod["metadata"] = {**pod["metadata"], "name": deployment["metadata"]["name"]}
        created = kube.admin.create(pod, namespace)
        assert created["spec"]["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
        pod["metadata"]["name"] += "-open"
        pod["spec"]["containers"][0]["securityContext"] = {}
        with pytest.raises(Refused, match="restricted"):
            kube.admin.create(pod, namespace)


def install(cluster: Cluster, namespace: str, objects: list[Object]) -> str:
    """Give an account the rendered role; a token of it."""
    for kind in ("ServiceAccount", "Role", "RoleBinding"):
        for thing in of_kind(objects, kind):
            cluster.admin.apply(thing)
    return cluster.token(namespace, one(objects, "ServiceAccount")["metadata"]["name"])


def test_install_and_upgrade(kube: Cluster, namespace: str, helm: Helm, tmp_path: Path) -> None:
    """Helm itself, against the API server: the definitions are there already, and the certificate is kept."""
    access = ("--namespace", namespace, "--kubeconfig", str(kube.kubeconfig(tmp_path / "kubeconfig")), *LABELS)
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "one-epp-tls"}}
    revisions = []
    indexer = "inferenceExtension.kvcacheIndexer.enabled=true,inferenceExtension.kvcacheIndexer.mode=service"
    steps = ((), ("--set", "inferenceExtension.replicas=2"), ("--set", indexer), ("--set", "standalone.enabled=true"))
    for more in steps:
        run = helm.run("upgrade", "--install", "one", str(CHART), *access, *more)
        assert run.returncode == 0, run.stderr
        if not more or "replicas" in more[1]:
            revisions.append(kube.admin.get(secret, namespace)["data"]["tls.crt"])
    assert len({*revisions}) == 1
    with pytest.raises(Refused, match="not found"):
        kube.admin.get(secret, namespace)
    run = helm.run("uninstall", "one", *access[:4])
    assert run.returncode == 0, run.stderr
    assert kube.admin.must("GET", f"{GROUP}inferencepools".format(namespace))["items"] == []


def test_the_name_in_the_selectors_stays(kube: Cluster, namespace: str, helm: Helm, tmp_path: Path) -> None:
    """The API server would refuse the Deployment, after other objects were changed."""
    access = ("--namespace", namespace, "--kubeconfig", str(kube.kubeconfig(tmp_path / "kubeconfig")), *LABELS)
    command = ("upgrade", "--install", "one", str(CHART), "--skip-crds", *access, "--set")
    assert helm.run(*command, "nameOverride=picker").returncode == 0
    assert helm.run(*command, "nameOverride=picker,inferenceExtension.podLabels.team=a").returncode == 0
    refused = helm.run(*command, "nameOverride=scheduler").stderr
    assert "nameOverride: " in refused and '"picker"' in refused and "immutable" not in refused, refused
    assert helm.run(*command, "nameOverride=scheduler,fullnameOverride=two").returncode == 0


@pytest.mark.parametrize("more", [{}, {"app.kubernetes.io/name": "theirs"}])
def test_a_deployment_of_somebody_else_is_named(
    kube: Cluster, namespace: str, helm: Helm, tmp_path: Path, more: dict[str, str]
) -> None:
    labels = {"app": "theirs", **more}
    container = {"name": "theirs", "image": "theirs"}
    theirs = {"selector": {"matchLabels": labels}}
    theirs["template"] = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    body = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "one-epp"}, "spec": theirs}
    kube.admin.must("POST", f"/apis/apps/v1/namespaces/{namespace}/deployments", body)
    access = ("--namespace", namespace, "--kubeconfig", str(kube.kubeconfig(tmp_path / "kubeconfig")), *LABELS)
    refused = helm.run("install", "one", str(CHART), "--skip-crds", *access).stderr
    assert "fullnameOverride: the Deployment one-epp, which is not of this release, is in the way" in refused


def test_who_installs_needs_no_right_to_list_replica_sets(
    kube: Cluster, namespace: str, helm: Helm, tmp_path: Path
) -> None:
    """Helm asks for those of a Deployment that is there."""
    kinds = {
        "": ["configmaps", "secrets", "services", "serviceaccounts"],
        "apps": ["deployments"],
        "networking.k8s.io": ["networkpolicies"],
        "inference.networking.k8s.io": ["inferencepools"],
    }
    verbs = ["get", "list", "watch", "create", "update", "patch", "delete"]
    rules = [{"apiGroups": [group], "resources": names, "verbs": verbs} for group, names in kinds.items()]
    roles = ["roles", "rolebindings"]
    rules += [{"apiGroups": ["rbac.authorization.k8s.io"], "resources": roles, "verbs": [*verbs, "escalate", "bind"]}]
    access = kube.kubeconfig(tmp_path / "kubeconfig", kube.account(namespace, "deployer", rules), namespace)
    command = ("upgrade", "--install", "one", str(CHART), "--skip-crds", "--namespace", namespace)
    run = helm.run(*command, "--kubeconfig", str(access), *LABELS)
    assert run.returncode == 0, run.stderr
    again = helm.run(*command, "--kubeconfig", str(access), *LABELS)
    assert 'cannot list resource "replicasets"' in again.stderr  # documented


@pytest.mark.parametrize("version", UPSTREAM)
def test_installed_beside_the_definition_of_upstream(
    own_kube: Callable[..., Cluster], helm: Helm, go: str, tmp_path: Path, version: str
) -> None:
    """With `--skip-crds`, as documented: Helm 4 would stop with a conflict, or replace it."""
    cluster, upstream = own_kube(), upstream_pool_crd(go, version)
    cluster.install_crd(upstream)
    access = ("--kubeconfig", str(cluster.kubeconfig(tmp_path / "kubeconfig")), *LABELS)
    command = ("upgrade", "--install", "one", str(CHART), "--skip-crds", *access)
    run = helm.run(*command)
    assert run.returncode == 0, run.stderr
    cluster.install_crd_file(CHART / "crds" / "llm-d.ai_inferenceobjectives.yaml")
    run = helm.run(*command, "--set", "inferenceObjectives[0].name=chat")
    assert run.returncode == 0, run.stderr
    annotations = cluster.admin.get(upstream)["metadata"]["annotations"]
    assert annotations["inference.networking.k8s.io/bundle-version"] == version
    assert (
        cluster.admin.must("GET", f"{GROUP}inferencepools".format("default"))["items"][0]["metadata"]["name"] == "one"
    )


def test_the_documented_command_brings_the_definitions_up_to_date(own_kube: Callable[..., Cluster], helm: Helm) -> None:
    """`helm show crds | kubectl apply --server-side`, over older ones."""
    cluster = own_kube()
    cluster.install_crds()
    shown = helm.run("show", "crds", str(CHART)).stdout
    for crd in yaml.load_all(shown, yaml.CSafeLoader):
        older = copy.deepcopy(crd["spec"]["versions"])
        older[0]["schema"]["openAPIV3Schema"]["description"] = "old"
        cluster.admin.patch(crd, {"spec": {"versions": older}})
        applied = cluster.admin.apply(crd)["spec"]["versions"]
        assert applied[0]["schema"] == crd["spec"]["versions"][0]["schema"]
    assert shown.count("kind: CustomResourceDefinition") == len([*(CHART / "crds").iterdir()])


def test_an_upgrade_leaves_the_files_of_running_pods_alone(
    kube: Cluster, namespace: str, helm: Helm, tmp_path: Path
) -> None:
    """What new pods cannot start with does not reach the old ones, which may be made again meanwhile."""
    access = ("--namespace", namespace, "--kubeconfig", str(kube.kubeconfig(tmp_path / "kubeconfig")), *LABELS)

    def files(level: str, *more: str) -> dict[str, str]:
        run = helm.run("upgrade", "--install", "one", str(CHART), *access, "--set", f"config.log.level={level}", *more)
        assert run.returncode == 0, run.stderr
        found = kube.admin.must("GET", f"/api/v1/namespaces/{namespace}/configmaps")["items"]
        return {one["metadata"]["name"]: one["data"]["fairlead.yaml"] for one in found}

    first = files("info")
    second = files("debug")
    assert len(first) == 1 and first.items() <= second.items() and len(second) == 2
    third = files("debug")
    assert third.keys() == second.keys() - first.keys()
    # A rollout that has not ended: pods of an older ReplicaSet run, and the Deployment names the newest file only.
    made = kube.admin.get(DEPLOYMENT, namespace)
    owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "one-epp", "uid": made["metadata"]["uid"]}
    older: Object = {"apiVersion": "apps/v1", "kind": "ReplicaSet"}
    older["metadata"] = {"name": "older", "ownerReferences": [owner]}
    older["spec"] = {key: made["spec"][key] for key in ("selector", "template")}
    kube.admin.create(older, namespace)
    for pods, level in ((1, "warning"), (1, "error"), (0, "info")):
        kube.admin.patch(older, {"status": {"replicas": pods}}, namespace, "status")
        assert (third.keys() < files(level).keys()) == bool(pods)
    assert len(files("debug", "--set", "restartOnConfigChange=false")) == 2
    assert [*files("error", "--set", "restartOnConfigChange=false")] == ["one-epp"]


def test_an_autoscaler_keeps_its_number(kube: Cluster, namespace: str, helm: Helm, tmp_path: Path) -> None:
    access = ("--namespace", namespace, "--kubeconfig", str(kube.kubeconfig(tmp_path / "kubeconfig")), *LABELS)

    def replicas(*more: str) -> int:
        shared = ("--set", "inferenceExtension.valkey.enabled=true,inferenceExtension.replicas=3")
        run = helm.run("upgrade", "--install", "one", str(CHART), *access, *shared, *more)
        assert run.returncode == 0, run.stderr
        return int(kube.admin.get(DEPLOYMENT, namespace)["spec"]["replicas"])

    assert replicas() == 3
    assert replicas("--set", "autoscaling.enabled=true") == 3
    kube.admin.patch(DEPLOYMENT, {"spec": {"replicas": 4}}, namespace, "scale")
    assert replicas("--set", "autoscaling.enabled=true,config.log.level=debug") == 4
    assert replicas("--set", "autoscaling.enabled=true") == 4


LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"
GROUP = "/apis/inference.networking.k8s.io/v1/namespaces/{}/"
LLM_D = "/apis/llm-d.ai/v1alpha2/namespaces/{}/"
LEGACY = "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/{}/"


def test_the_role_suffices_and_gives_no_more(kube: Cluster, namespace: str, helm: Helm) -> None:
    objects = helm.render(*LABELS, "--set", "inferenceExtension.replicas=2", namespace=namespace)
    client = kube.client(install(kube, namespace, objects))

    def status(method: str, path: str, body: Any = None, **query: str) -> int:
        return client.request(method, path.format(namespace), body, **query)[0]

    for path in (
        "/api/v1/namespaces/{}/pods",
        f"{GROUP}inferencepools",
        f"{LLM_D}inferenceobjectives",
        f"{LLM_D}inferencemodelrewrites",
        f"{LEGACY}inferencemodels",
        f"{LEGACY}inferencepools",
    ):
        assert status("GET", path) == 200, path
        assert status("GET", path, watch="1", timeoutSeconds="1") == 200, path
        assert status("DELETE", f"{path}/x") == 403, path
    assert status("GET", "/api/v1/namespaces/{}/secrets") == 403
    assert status("GET", "/api/v1/namespaces/default/pods") == 403
    lease = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "one-epp"},
        "spec": {"holderIdentity": "a"},
    }
    made = client.create(lease, namespace)
    assert status("PUT", f"{LEASES}/one-epp", made) == 200
    named = "metadata.name=one-epp"
    assert status("GET", LEASES, fieldSelector=named, watch="1", timeoutSeconds="1") == 200
    assert status("GET", LEASES) == 403
    assert status("PUT", f"{LEASES}/other", {**lease, "metadata": {"name": "other"}}) == 403


def test_the_role_lets_conditions_be_written_and_nothing_else(kube: Cluster, namespace: str, helm: Helm) -> None:
    client = kube.client(install(kube, namespace, helm.render(*LABELS, namespace=namespace)))
    kube.admin.create(MODEL, namespace)
    condition = {
        "type": "Accepted",
        "status": "True",
        "reason": "Accepted",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    written = client.patch(MODEL, {"status": {"conditions": [condition]}}, namespace, "status")
    assert written["status"]["conditions"][0]["reason"] == "Accepted"
    with pytest.raises(Refused) as refused:
        client.patch(MODEL, {"spec": {"criticality": "Critical"}}, namespace)
    assert refused.value.status == 403


def changed(thing: Object, **spec: Any) -> Object:
    return {**thing, "spec": {**thing["spec"], **spec}}


def test_the_definitions_fill_in_defaults(kube: Cluster, namespace: str) -> None:
    pool = kube.admin.create(POOL, namespace)["spec"]
    assert pool["appProtocol"] == "http"
    assert {"kind": "Service", "group": "", "failureMode": "FailClose"}.items() <= pool["endpointPickerRef"].items()
    model = kube.admin.create(MODEL, namespace)
    assert model["spec"]["poolRef"]["group"] == "inference.networking.x-k8s.io"
    assert model["metadata"]["generation"] == 1


@pytest.mark.parametrize(
    ("thing", "said"),
    [
        (changed(POOL, targetPorts=[{"number": 1}, {"number": 1}]), "port number must be unique"),
        (changed(POOL, targetPorts=[]), "should have at least 1 items"),
        (changed(POOL, targetPorts=[{"number": n} for n in range(1, 10)]), "must have at most 8 items"),
        (changed(POOL, endpointPickerRef={"name": "epp"}), "port is required when kind is 'Service'"),
        (changed(POOL, selector={"matchLabels": {}}), "should have at least 1 properties"),
        (changed(POOL, appProtocol="grpc"), "Unsupported value"),
        (changed(MODEL, targetModels=[{"name": "a", "weight": 1}, {"name": "b"}]), "Weights should be set for all"),
        (changed(MODEL, criticality="Urgent"), "Unsupported value"),
        (changed(MODEL, targetModels=[{"name": "a", "weight": 0}]), "should be greater than or equal to 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_definitions_refuse(kube: Cluster, namespace: str, thing: Object, said: str) -> None:
    with pytest.raises(Refused, match=said) as refused:
        kube.admin.create(thing, namespace)
    assert refused.value.status == 422


def test_a_models_name_cannot_be_changed(kube: Cluster, namespace: str) -> None:
    kube.admin.create(MODEL, namespace)
    with pytest.raises(Refused, match="modelName is immutable"):
        kube.admin.patch(MODEL, {"spec": {"modelName": "other"}}, namespace)


def test_an_empty_cluster_takes_all_definitions(own_kube: Callable[..., Cluster]) -> None:
    """As `helm install` sends them. A pool's group is filled in, in both groups of the kind."""
    cluster = own_kube()
    assert cluster.admin.request("GET", "/apis/llm-d.ai/v1alpha2")[0] == 404
    cluster.install_crds()
    target = {"modelRewrite": "b"}
    for version in ("llm-d.ai/v1alpha2", "inference.networking.x-k8s.io/v1alpha2"):
        rewrite = {
            "apiVersion": version,
            "kind": "InferenceModelRewrite",
            "metadata": {"name": "r"},
            "spec": {
                "poolRef": {"name": "p"},
                "rules": [{"matches": [{"model": {"value": "a"}}], "targets": [target]}],
            },
        }
        created = cluster.admin.apply(rewrite)["spec"]
        assert created["poolRef"]["group"] == "inference.networking.k8s.io"
        assert created["rules"][0]["matches"][0]["model"]["type"] == "Exact"
