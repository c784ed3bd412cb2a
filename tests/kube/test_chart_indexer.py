"""The indexer of the chart: a deployment of its own, which the schedulers ask."""

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from kr_cluster import Cluster
from kr_helm import LABELS, Helm, of_kind, one
from kr_runs import Children, get, installed, stub_port, until
from ports import free_ports

from fairlead.cli.app import load_command
from fairlead.cli.commands import COMMANDS
from fairlead.compat.load import load
from fairlead.config.schema import Config

HERE = Path(__file__).parent
WITHIN = (*LABELS, "--set", "inferenceExtension.kvcacheIndexer.enabled=true")
OWN = (*WITHIN, "--set", "inferenceExtension.kvcacheIndexer.mode=service")
both = pytest.mark.parametrize("name", ["indexer", "indexer-dialled"])


def rendered(helm: Helm, name: str) -> list[dict[str, Any]]:
    return helm.render("--values", str(HERE / "values" / f"{name}.yaml"))


def configured(objects: list[dict[str, Any]], part: str) -> Config:
    return load(one(objects, "ConfigMap", part)["data"]["fairlead.yaml"])


def template(objects: list[dict[str, Any]], part: str) -> dict[str, Any]:
    return dict(one(objects, "Deployment", part)["spec"]["template"])


def container(objects: list[dict[str, Any]], part: str) -> dict[str, Any]:
    return dict(template(objects, part)["spec"]["containers"][0])


def service(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """The only one whose pods are the indexer's."""
    labels = template(objects, "-indexer")["metadata"]["labels"].items()
    (found,) = (one for one in of_kind(objects, "Service") if one["spec"].get("selector", {"": ""}).items() <= labels)
    return dict(found)


def selects(policy: dict[str, Any], labels: dict[str, str]) -> bool:
    return bool(policy["podSelector"].get("matchLabels", {}).items() <= labels.items())


@both
def test_schedulers_ask_it_at_its_service(helm: Helm, name: str) -> None:
    objects = rendered(helm, name)
    found = service(objects)
    (port,) = (port for port in found["spec"]["ports"] if port["name"] == "http-indexer")
    asked = configured(objects, "-epp").kv_events
    assert asked.enabled and not asked.bind and not asked.port
    assert asked.indexer.url == f"http://{found['metadata']['name']}:{port['port']}"
    ports = {one["name"]: one["containerPort"] for one in container(objects, "-indexer")["ports"]}
    config = configured(objects, "-indexer")
    assert {one["targetPort"] for one in found["spec"]["ports"]} == set(ports)
    assert (config.admin.host, config.admin.port) == ("::", ports["http"])
    assert config.kv_events.bind == (f"tcp://*:{ports['kv-events']}" if "kv-events" in ports else "")
    assert config.kv_events.enabled and not config.kv_events.indexer.url


@both
def test_it_finds_the_pods_that_its_schedulers_find(helm: Helm, name: str) -> None:
    objects = rendered(helm, name)
    wanted, found = (configured(objects, part).kubernetes for part in ("-epp", "-indexer"))
    assert found.on and not found.leader_election.enabled
    assert (found.pool, found.namespace, found.selector, found.target_ports) == (
        (wanted.pool, wanted.namespace, wanted.selector, wanted.target_ports)
    )


def test_what_is_configured_of_kv_events_goes_where_it_counts(helm: Helm) -> None:
    objects = rendered(helm, "indexer")
    scheduler, indexer = (configured(objects, part).kv_events for part in ("-epp", "-indexer"))
    assert (indexer.port, indexer.replay_port, indexer.max_blocks) == (5557, 5558, 1_000_000)
    assert (scheduler.check, scheduler.indexer.budget) == (0.1, 0.008)
    alone = helm.render(*OWN, "--set", "inferenceExtension.kvcacheIndexer.config.kvEvents.port=5559")
    assert configured(alone, "-indexer").kv_events.port == 5559


def test_the_documented_address_can_be_its_own(helm: Helm) -> None:
    """Values of earlier documents name the indexer and make the engines dial in; nothing in them need be changed."""
    settings = "inferenceExtension.kvcacheIndexer.mode=service,inferenceExtension.kvcacheIndexer.serviceName="
    more = ("--set", f"{settings}kv-cache-indexer")
    objects = helm.render("--values", str(HERE / "values" / "documented.yaml"), *more)
    config = configured(objects, "-epp")
    (named,) = {getattr(one.parameters, "cache_indexer_url", "") for one in config.policy.scorers} - {""}
    assert config.kv_events.indexer.url == named == "http://kv-cache-indexer:9090"
    assert "tcp-kv-events" in {port["name"] for port in service(objects)["spec"]["ports"]}
    leaders = [one for one in of_kind(objects, "Service") if one["metadata"]["name"].endswith("-epp-leader")]
    assert [port["name"] for one in leaders for port in one["spec"]["ports"]] == ["grpc-ext-proc"]


def test_a_change_of_mode_is_one_value(helm: Helm) -> None:
    """Nothing of the scheduler's objects that cannot be changed in a cluster is another one."""
    settings = ("--set", "config.kvEvents.port=5557", "--set", "config.kvEvents.maxBlocks=50000")
    before, after = helm.render(*WITHIN, *settings), helm.render(*OWN, *settings)
    assert configured(before, "-epp").kv_events.port == configured(after, "-indexer").kv_events.port == 5557
    old, new = (one(objects, "Deployment", "-epp")["spec"]["selector"] for objects in (before, after))
    assert old == new
    assert {thing["kind"] for thing in after if thing not in before} >= {"Deployment", "Service", "ConfigMap", "Role"}
    assert not [thing for thing in before if "indexer" in thing["metadata"]["name"]]


@both
def test_the_scheduler_s_objects_choose_none_of_its_pods(helm: Helm, name: str) -> None:
    objects = rendered(helm, name)
    labels = template(objects, "-indexer")["metadata"]["labels"]
    for kind in ("Deployment", "Service", "ServiceMonitor", "PodMonitoring", "NetworkPolicy"):
        for thing in of_kind(objects, kind):
            chosen = thing["spec"].get("podSelector") or thing["spec"].get("selector")
            if chosen is not None:
                chosen = chosen.get("matchLabels", chosen)
                own = "indexer" in thing["metadata"]["name"]
                assert (chosen.items() <= labels.items()) == own, (kind, thing["metadata"]["name"])


@both
def test_its_command_line_and_probes_exist(helm: Helm, name: str) -> None:
    pod = container(rendered(helm, name), "-indexer")
    command, file, *flags = pod["args"]
    assert (command, file) == ("indexer", "/etc/fairlead/fairlead.yaml")
    known = {option for one in load_command("indexer", COMMANDS["indexer"]).params for option in one.opts}
    assert {flag.partition("=")[0] for flag in flags} <= known
    pages = {kind: pod[kind]["httpGet"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {page["path"] for page in pages.values()} == {"/healthz", "/readyz"}
    assert pages["readinessProbe"]["path"] == "/readyz"
    assert {page["port"] for page in pages.values()} <= {port["name"] for port in pod["ports"]}


@both
def test_it_is_confined_like_the_scheduler(helm: Helm, name: str) -> None:
    objects = rendered(helm, name)
    scheduler, indexer = container(objects, "-epp"), container(objects, "-indexer")
    for key in ("image", "imagePullPolicy", "securityContext"):
        assert indexer[key] == scheduler[key]
    assert indexer["securityContext"]["readOnlyRootFilesystem"] is True
    assert template(objects, "-indexer")["spec"]["securityContext"]["runAsNonRoot"] is True
    # The snapshot is written where something may be.
    snapshot = configured(objects, "-indexer").kv_events.snapshot
    mounts = {mount["mountPath"] for mount in indexer["volumeMounts"] if not mount.get("readOnly")}
    assert not snapshot or str(Path(snapshot).parent) in mounts


def test_its_role_is_smaller_than_the_scheduler_s(helm: Helm) -> None:
    objects = rendered(helm, "indexer")
    rules = one(objects, "Role", "-indexer")["rules"]
    assert {resource for rule in rules for resource in rule["resources"]} == {"pods", "inferencepools"}
    assert {verb for rule in rules for verb in rule["verbs"]} == {"get", "list", "watch"}
    account = template(objects, "-indexer")["spec"]["serviceAccountName"]
    assert account == one(objects, "ServiceAccount", "-indexer")["metadata"]["name"]
    assert one(objects, "RoleBinding", "-indexer")["subjects"][0]["name"] == account
    assert template(rendered(helm, "indexer-dialled"), "-indexer")["spec"]["serviceAccountName"] == "existing"


def test_policies_let_through_what_is_needed(helm: Helm) -> None:
    objects = rendered(helm, "indexer")
    scheduler, indexer = (template(objects, part)["metadata"]["labels"] for part in ("-epp", "-indexer"))
    out, into = one(objects, "NetworkPolicy", "-epp")["spec"], one(objects, "NetworkPolicy", "-indexer")["spec"]
    (indexer_rule,) = (rule for rule in out["egress"] if any(selects(peer, indexer) for peer in rule.get("to", ())))
    assert indexer_rule["ports"] == [{"port": "http", "protocol": "TCP"}]
    (answering,) = into["ingress"]
    for labels in (scheduler, indexer):
        assert [peer for peer in answering["from"] if "podSelector" in peer and selects(peer, labels)]
    assert {"namespaceSelector"} < {key for peer in answering["from"] for key in peer}
    reached = [peer for rule in into["egress"] for peer in rule.get("to", ())]
    assert [peer for peer in reached if selects(peer, {"app": "vllm"})]
    assert [peer for peer in reached if selects(peer, indexer)]
    (events,) = one(rendered(helm, "indexer-dialled"), "NetworkPolicy", "-indexer")["spec"]["ingress"][1:]
    assert events["ports"][0]["port"] == "kv-events" and selects(events["from"][0], {"app": "vllm"})


def test_one_that_begins_asks_one_that_runs(helm: Helm) -> None:
    """But for engines that dial in, of which nothing can be told afterwards."""
    objects = rendered(helm, "indexer")
    indexer, scheduler = (configured(objects, part).kv_events.indexer for part in ("-indexer", "-epp"))
    assert indexer.warm_from == scheduler.url != ""
    dialled = configured(rendered(helm, "indexer-dialled"), "-indexer").kv_events
    assert (dialled.indexer.warm_from, dialled.snapshot) == ("", "")


def test_notes_tell_how_to_ask_it(helm: Helm) -> None:
    values = ("--values", str(HERE / "values" / "indexer.yaml"))
    assert "kv-cache-indexer:9090" in helm.notes(*values)
    assert "indexer" not in helm.notes(*LABELS)


@pytest.mark.parametrize(
    ("url", "more", "asked"),
    [
        ("http://kv-cache-indexer:9090", "", "kv-cache-indexer 9090"),
        ("http://index.default:8080", "", "index 8080"),
        ("http://index.default.svc.cluster.local", "", "index 80"),
        ("http://kv-cache-indexer:9090", "inferenceExtension.kvcacheIndexer.mode=embedded", None),
        ("http://kv-cache-indexer:9090", "inferenceExtension.kvcacheIndexer.serviceName=other", None),
        ("http://index.other:9090", "", None),
        ("http://10.0.0.1:9090", "", None),
        ("http://localhost:9090", "", None),
    ],
)
def test_a_scorer_that_names_an_indexer_gets_it(helm: Helm, url: str, more: str, asked: str | None) -> None:
    """Where it can be in this release; what a scorer says is not overruled otherwise."""
    scorers = f'config.scorers=[{{"type":"prefix-aware","parameters":{{"cacheIndexerURL":"{url}"}}}}]'
    objects = helm.render(*WITHIN, "--set-json", scorers, *(("--set", more) if more else ()))
    if asked is None:
        assert len(of_kind(objects, "Deployment")) == 1
        return
    found = service(objects)
    assert f"{found['metadata']['name']} {found['spec']['ports'][0]['port']}" == asked
    assert configured(objects, "-epp").kv_events.indexer.url == url


def test_notes_say_that_token_ids_are_missing(helm: Helm) -> None:
    assert "config.tokens.models is missing" in helm.notes(*WITHIN)
    assert "tokens" not in helm.notes(*WITHIN, "--set-json", 'config.tokens={"models":{"*":{"render":"engine"}}}')
    assert "tokens" not in helm.notes(*LABELS)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("inferenceExtension.kvcacheIndexer.mode=beside", "value must be one of"),
        ("config.kvEvents.indexer.url=http://other:9090", "makes an indexer and points the scheduler at it"),
        (
            "inferenceExtension.kvcacheIndexer.replicas=2,inferenceExtension.kvcacheIndexer.zmqSubscriberURL=tcp://*:5555",
            "reach one replica only",
        ),
        ("inferenceExtension.kvcacheIndexer.zmqSubscriberURL=tcp://*", "a port is missing"),
        ("inferenceExtension.kvcacheIndexer.serviceName=9090", "want string"),
    ],
)
def test_what_cannot_work_is_refused(helm: Helm, more: str, said: str) -> None:
    assert said in helm.refused(*OWN, "--set", more)


def test_a_scheduler_s_prompts_are_found_in_the_index(
    kube: Cluster, namespace: str, helm: Helm, start: Children, tmp_path: Path
) -> None:
    """Both run with what the chart writes for them; then another indexer begins with the index of the first."""
    port = stub_port(start, "--kv-events", "--kv-events-port", "0")
    both_run(kube, namespace, helm, start, tmp_path, port, *OWN)
    (other,) = free_ports(1)
    start("indexer", str(tmp_path / "indexer.yaml"), "--listen", f"127.0.0.1:{other}")
    until(lambda: sample(metrics(other), "index_size") >= 40, "the index of the other one")
    assert "warm start from another indexer" in start.log(3).read_text()


def test_the_guide_s_values_give_an_indexer_that_is_asked(
    kube: Cluster, namespace: str, helm: Helm, start: Children, tmp_path: Path
) -> None:
    """Engines dial in at the name that the guide has for it; `/query` answers there."""
    (events,) = free_ports(1)
    port = stub_port(start, "--kv-events", "--kv-events-connect", f"tcp://127.0.0.1:{events}")
    values = ("--values", str(HERE / "values" / "documented.yaml"))
    listens = ("--set", f"inferenceExtension.kvcacheIndexer.zmqSubscriberURL=tcp://*:{events}")
    answers = both_run(
        kube, namespace, helm, start, tmp_path, port, *values, *listens, "--set", "inferenceExtension.replicas=1"
    )
    body = json.dumps({"token_ids": [*range(1000, 1640)]}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{answers}/query", body)

    def found() -> bool:
        with urllib.request.urlopen(request, timeout=10) as response:
            (pod,) = json.loads(response.read())["pods"].values()
        return bool(pod["hit_rate"] > 0.9)

    assert until(found, "the prompt in the answer")


def both_run(
    kube: Cluster, namespace: str, helm: Helm, start: Children, tmp_path: Path, port: int, *arguments: str
) -> int:
    """Scheduler and indexer as rendered, until the one has asked the other about a prompt; the indexer's port."""
    gateway, admin, picker, answers = free_ports(4)
    objects = helm.render(
        *arguments,
        *("--set", "standalone.enabled=true", "--set", f"inferencePool.targetPorts[0].number={port}"),
        *("--set", f"config.gateway.port={gateway}", "--set", f"config.admin.port={admin}"),
        *("--set", f"config.extProc.port={picker}", "--set", f"config.kvEvents.snapshot={tmp_path}/index.kv"),
        *("--set", f"config.kubernetes.kubeconfig={tmp_path}/scheduler"),
        *("--set", f"inferenceExtension.kvcacheIndexer.config.kubernetes.kubeconfig={tmp_path}/indexer"),
        namespace=namespace,
    )
    name = service(objects)["metadata"]["name"]
    for part in ("scheduler", "indexer"):
        ending = "-epp" if part == "scheduler" else "-indexer"
        installed(kube, namespace, objects, tmp_path / part, ending)
        text = one(objects, "ConfigMap", ending)["data"]["fairlead.yaml"]
        (tmp_path / f"{part}.yaml").write_text(text.replace(f"http://{name}:9090", f"http://127.0.0.1:{answers}"))
    kube.pod(namespace, "vllm-0", "127.0.0.1", labels={"app": "vllm"})

    start("indexer", str(tmp_path / "indexer.yaml"), "--listen", f"127.0.0.1:{answers}")
    ready = container(objects, "-indexer")["readinessProbe"]["httpGet"]["path"]
    until(lambda: get(f"http://127.0.0.1:{answers}{ready}"), "readiness of the indexer")
    start("serve", str(tmp_path / "scheduler.yaml"))
    until(lambda: get(f"http://127.0.0.1:{admin}/readyz"), "readiness of the scheduler")
    until(lambda: sample(metrics(admin), "fairlead_indexer_up") == 1, "the scheduler asks")

    def found() -> bool:
        complete(gateway, [*range(1000, 1640)])
        answered = sample(metrics(admin), 'fairlead_indexer_questions_total{result="answered"}')
        return answered > 0 and sample(metrics(answers), "kv_cache_hit_total") >= 40

    until(found, "an answer in time that has the prompt's blocks")
    assert sample(metrics(answers), "index_size") >= 40
    return answers


def metrics(port: int) -> str:
    return get(f"http://127.0.0.1:{port}/metrics")


def sample(page: str, name: str) -> float:
    """The sum over labels, 0 where there is none."""
    found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE)
    return sum(map(float, found))


def complete(gateway: int, ids: list[int]) -> None:
    body = json.dumps({"model": "Qwen/Qwen3-32B", "prompt": ids, "max_tokens": 2}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{gateway}/v1/completions", body, headers)

    def answered() -> bool:
        with urllib.request.urlopen(request, timeout=10) as response:
            return "choices" in json.loads(response.read())

    assert until(answered, "an answer through the gateway")
