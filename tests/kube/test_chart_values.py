"""The Helm chart, rendered: what it writes for each set of values, and what it refuses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kr_helm import CHART, LABELS, Helm, of_kind, one

from fairlead.cli.app import load_command
from fairlead.cli.commands import COMMANDS
from fairlead.compat.load import load
from fairlead.config.plugins import build_policy
from fairlead.config.schema import Config
from fairlead.gateway.health import LIVENESS, READINESS, WARM

VALUES = sorted((Path(__file__).parent / "values").glob("*.yaml"))
every_set = pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)


def rendered(helm: Helm, values: Path) -> list[dict[str, Any]]:
    return helm.render("--values", str(values))


def by_name(helm: Helm, name: str) -> list[dict[str, Any]]:
    return rendered(helm, next(path for path in VALUES if path.stem == name))


def named(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = (thing for thing in of_kind(objects, kind) if thing["metadata"]["name"] == name)
    return found


def container(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return dict(one(objects, "Deployment", "-epp")["spec"]["template"]["spec"]["containers"][0])


def configured(objects: list[dict[str, Any]]) -> Config:
    return load(one(objects, "ConfigMap", "-epp")["data"]["fairlead.yaml"])


@every_set
def test_lint(helm: Helm, values: Path) -> None:
    run = helm.lint("--values", str(values))
    assert run.returncode == 0, run.stdout + run.stderr


@every_set
def test_the_configuration_is_one_that_fairlead_takes(helm: Helm, values: Path) -> None:
    config = configured(rendered(helm, values))
    build_policy(config)
    assert config.kubernetes.on
    assert config.kubernetes.namespace == "default"


@every_set
def test_the_pod_serves_the_ports_that_the_configuration_opens(helm: Helm, values: Path) -> None:
    objects = rendered(helm, values)
    config = configured(objects)
    open_ports = {port["containerPort"] for port in container(objects)["ports"]}
    wanted = {config.admin.port}
    if config.gateway.mode == "embedded":
        wanted.add(config.gateway.port)
    else:
        wanted |= {config.ext_proc.port, config.ext_proc.health_port}
    if config.kv_events.bind:
        wanted.add(int(config.kv_events.bind.rpartition(":")[2]))
    assert open_ports == wanted
    # A pod may have only an IPv6 address.
    assert config.admin.host == "::"
    assert (config.gateway if config.gateway.mode == "embedded" else config.ext_proc).host == "::"


@every_set
def test_probes_ask_what_is_answered(helm: Helm, values: Path) -> None:
    objects = rendered(helm, values)
    pod = container(objects)
    named = {port["name"] for port in pod["ports"]}
    leads = configured(objects).kubernetes.leader_election.enabled
    for probe, service, page in (
        (pod["livenessProbe"], LIVENESS, "/healthz"),
        (pod["startupProbe"], LIVENESS, "/healthz"),
        (pod["readinessProbe"], WARM if leads else READINESS, "/readyz"),
    ):
        if "grpc" in probe:
            assert probe["grpc"] == {"port": configured(objects).ext_proc.health_port, "service": service}
        else:
            assert probe["httpGet"] == {"path": page, "port": "metrics"} and "metrics" in named


def not_texts(value: Any, path: str = "") -> list[str]:
    """Where a name or a label is no text."""
    if isinstance(value, list):
        return [place for index, item in enumerate(value) for place in not_texts(item, f"{path}[{index}]")]
    if not isinstance(value, dict):
        key = path.rpartition("/")[2].lower()
        return [] if isinstance(value, str) or not key.endswith(("name", "namespace", "instance")) else [path]
    return [place for key, item in value.items() for place in not_texts(item, f"{path}/{key}")]


@every_set
def test_names_of_digits_are_text(helm: Helm, values: Path) -> None:
    numbers = "inferencePool.name=405,nameOverride=406,provider.istio.credentialName=407,serviceAccount.name=408"
    if values.stem in ("several-pools", "standalone"):
        numbers = "nameOverride=406"
    objects = helm.render("--values", str(values), "--set-string", numbers, release="1234", namespace="78123")
    assert not {thing["kind"]: places for thing in objects if (places := not_texts(thing))}
    selectors = [thing["spec"]["selector"] for thing in of_kind(objects, "Service") if "selector" in thing["spec"]]
    assert {selector["app.kubernetes.io/instance"] for selector in selectors} == {"1234"}
    assert configured(objects).kubernetes.namespace == "78123"


@every_set
def test_the_command_line_exists(helm: Helm, values: Path) -> None:
    command, file, *flags = container(rendered(helm, values))["args"]
    assert (command, file) == ("serve", "/etc/fairlead/fairlead.yaml")
    known = {option for one in load_command("serve", COMMANDS["serve"]).params for option in one.opts}
    assert {flag.partition("=")[0] for flag in flags} <= known


@every_set
def test_services_lead_to_ports_of_the_pod(helm: Helm, values: Path) -> None:
    objects = rendered(helm, values)
    ports = container(objects)["ports"]
    pod = {port["name"] for port in ports}
    labels = one(objects, "Deployment", "-epp")["spec"]["template"]["metadata"]["labels"].items()
    for service in of_kind(objects, "Service"):
        if service["metadata"]["labels"]["app.kubernetes.io/component"] != "inference-scheduler":
            continue
        if service["metadata"]["name"].endswith("-leader"):  # kept by the leader, see below
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= {
                port["containerPort"] for port in ports
            }
            continue
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= pod
        assert service["spec"]["selector"].items() <= labels


def test_notes_name_the_group_of_objectives(helm: Helm) -> None:
    """`kubectl get inferenceobjectives` shows those of the older group, of which the chart makes none."""
    command = "kubectl -n default get inferenceobjectives.llm-d.ai"
    assert command in helm.notes(*LABELS, "--set", "inferenceObjectives[0].name=urgent")
    assert command not in helm.notes(*LABELS)


@every_set
def test_notes(helm: Helm, values: Path) -> None:
    notes = helm.notes("--values", str(values))
    assert "kubectl" in notes and "{{" not in notes


@every_set
def test_notes_warn_of_schedulers_that_know_nothing_of_each_other(helm: Helm, values: Path) -> None:
    objects = rendered(helm, values)
    several = (one(objects, "Deployment", "-epp")["spec"].get("replicas", 2)) > 1
    config = configured(objects)
    alone = several and not config.kubernetes.leader_election.enabled and not config.replicas.via
    assert ("replicas schedule for themselves" in helm.notes("--values", str(values))) == alone
    assert alone == (values.stem in ("kgateway", "standalone"))


def test_the_documented_values(helm: Helm) -> None:
    objects = by_name(helm, "documented")
    config = configured(objects)
    assert one(objects, "Deployment", "-epp")["spec"]["replicas"] == 2
    assert [spec.type for spec in config.policy.filters if spec.path.startswith("$.inferenceExtension")] == [
        "queue-depth",
        "memory-pressure",
    ]
    assert [(spec.type, spec.weight) for spec in config.policy.scorers] == [("prefix-aware", 100), ("load-aware", 50)]
    assert (config.kv_events.enabled, config.kv_events.indexer.url) == (True, "http://kv-cache-indexer:9090")
    assert {port["port"] for port in named(objects, "Service", "kv-cache-indexer")["spec"]["ports"]} == {9090, 5555}


def test_the_pool_names_the_service_and_its_port(helm: Helm) -> None:
    objects = by_name(helm, "istio")
    pool = one(objects, "InferencePool")
    assert configured(objects).kubernetes.pool == pool["metadata"]["name"] == "llama"
    picker = pool["spec"]["endpointPickerRef"]
    service = named(objects, "Service", "one-epp-leader")
    assert "selector" not in service["spec"] and {type(one["targetPort"]) for one in service["spec"]["ports"]} == {int}
    assert configured(objects).kubernetes.leader_election.service == service["metadata"]["name"]
    pods = named(objects, "Service", "one-epp")["spec"]
    assert pods["selector"] and {port["name"] for port in pods["ports"]} == {"http-metrics"}
    assert picker == {"name": service["metadata"]["name"], "port": {"number": 9002}, "failureMode": "FailClose"}
    assert 9002 in {port["port"] for port in service["spec"]["ports"]}
    assert one(objects, "DestinationRule")["spec"]["host"] == f"{picker['name']}.default.svc.cluster.local"
    assert one(objects, "HTTPRoute")["spec"]["rules"][0]["backendRefs"] == [
        {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "llama", "weight": 1}
    ]
    assert {thing["spec"]["poolRef"]["name"] for thing in of_kind(objects, "InferenceObjective")} == {"llama"}


@pytest.mark.parametrize(
    ("values", "leads"),
    [("minimal", False), ("istio", True), ("kgateway", False), ("envoy-ai-gateway", True), ("standalone", False)],
)
def test_leader_election_is_for_several_replicas(helm: Helm, values: str, leads: bool) -> None:
    objects = by_name(helm, values)
    election = configured(objects).kubernetes.leader_election
    rules = one(objects, "Role")["rules"]
    leases = [rule for rule in rules if "leases" in rule["resources"]]
    assert (election.enabled, bool(leases)) == (leads, leads)
    update = one(objects, "Deployment")["spec"]["strategy"]["rollingUpdate"]
    assert update == {"maxUnavailable": 0, "maxSurge": 1}
    environment = {one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"] for one in container(objects)["env"]}
    assert ("status.podIP" in environment.values()) == leads
    slices = [rule for rule in rules if "endpointslices" in rule["resources"]]
    if leads:
        assert leases[1]["resourceNames"] == [election.lease_name]
        assert slices[1]["resourceNames"] == [f"{election.service}-ipv4", f"{election.service}-ipv6"]
    else:
        assert not slices and not election.service


def test_a_volume_of_one_node_is_given_up_before_the_next_pod_starts(helm: Helm) -> None:
    volumes = 'inferenceExtension.extraVolumes=[{"name":"journal","persistentVolumeClaim":{"claimName":"journal"}}]'
    claim = (*LABELS, "--set-json", volumes)
    recreate = ("--set", "inferenceExtension.strategy.type=Recreate")
    assert one(helm.render(*LABELS, *recreate), "Deployment")["spec"]["strategy"] == {"type": "Recreate"}
    assert "inferenceExtension.strategy" in helm.notes(*claim)
    for values in (LABELS, (*claim, *recreate)):
        assert "inferenceExtension.strategy" not in helm.notes(*values)


def test_the_role_is_as_small_as_what_is_used(helm: Helm) -> None:
    def resources(name: str) -> set[str]:
        return {resource for rule in one(by_name(helm, name), "Role")["rules"] for resource in rule["resources"]}

    assert resources("standalone") == {"pods"}
    followed = {"pods", "inferencepools", "inferencemodels", "inferenceobjectives", "inferencemodelrewrites"}
    assert resources("kgateway") == followed
    assert resources("minimal") == followed | {f"{name}/status" for name in followed - {"pods", "inferencepools"}}


def test_certificates(helm: Helm) -> None:
    def secret(name: str) -> Any:
        volumes = one(by_name(helm, name), "Deployment")["spec"]["template"]["spec"]["volumes"]
        return next((volume["secret"]["secretName"] for volume in volumes if "secret" in volume), None)

    assert configured(by_name(helm, "minimal")).ext_proc.tls is not None
    assert secret("minimal") == one(by_name(helm, "minimal"), "Secret")["metadata"]["name"]
    assert secret("kgateway") == "picker-certificate" and not of_kind(by_name(helm, "kgateway"), "Secret")
    certificate = one(by_name(helm, "envoy-ai-gateway"), "Certificate")
    assert secret("envoy-ai-gateway") == certificate["spec"]["secretName"]
    assert secret("standalone") is None and configured(by_name(helm, "standalone")).ext_proc.tls is None


def test_api_keys(helm: Helm) -> None:
    secret = "--set", "standalone.enabled=true,standalone.keysSecret=client-keys"
    more = "--set-json", 'config.gateway={"bodyLimit":"16MiB"}'
    objects = helm.render(*LABELS, *secret, *more)
    gateway = configured(objects).gateway
    assert gateway.keys is not None and gateway.body_limit == 16 << 20
    mounts = {mount["name"]: mount for mount in container(objects)["volumeMounts"]}
    assert gateway.keys.file == f"{mounts['keys']['mountPath']}/keys" and "subPath" not in mounts["keys"]
    volumes = one(objects, "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert {"name": "keys", "secret": {"secretName": "client-keys"}} in volumes
    assert configured(by_name(helm, "standalone")).gateway.keys is None


def test_what_platform_teams_add(helm: Helm) -> None:
    objects = by_name(helm, "platform")
    labelled = {thing["kind"] for thing in objects if thing["metadata"].get("labels", {}).get("cost-centre")}
    assert labelled == {thing["kind"] for thing in objects}
    assert [thing["metadata"]["name"] for thing in of_kind(objects, "ConfigMap")].count("one-tokenizers") == 1
    budgets = {one["metadata"]["name"]: one["spec"]["selector"] for one in of_kind(objects, "PodDisruptionBudget")}
    for part, names in (("-epp", ["certificate", "fetch"]), ("-indexer", ["fetch"])):
        deployment = one(objects, "Deployment", part)["spec"]
        pod = deployment["template"]["spec"]
        assert deployment["template"]["metadata"]["labels"]["cost-centre"] == "inference"
        assert [one["name"] for one in pod["initContainers"]] == names
        assert pod["containers"][1]["name"] == "helper" and pod["containers"][0]["envFrom"]
        assert [one["topologyKey"] for one in pod["topologySpreadConstraints"]] == ["topology.kubernetes.io/zone"]
        assert budgets[f"one{part}"] == deployment["selector"]
    assert one(objects, "Deployment", "-epp")["spec"]["minReadySeconds"] == 5
    for policy in of_kind(objects, "NetworkPolicy"):
        (rule,) = (rule for rule in policy["spec"]["egress"] if "ipBlock" in rule.get("to", [{}])[0])
        assert [peer["ipBlock"]["cidr"] for peer in rule["to"]] == ["10.0.0.1/32", "fd00::1/128"]
        assert [port["port"] for port in rule["ports"]] == [443, 6443]


@pytest.mark.parametrize("values", ["platform", "kgateway", "standalone"])
def test_the_same_values_render_the_same_objects(helm: Helm, values: str) -> None:
    """Or Argo CD would never be in sync."""
    file = next(path for path in VALUES if path.stem == values)
    assert rendered(helm, file) == helm.render("--values", str(file), anew=True)


INDEXER = "inferenceExtension.kvcacheIndexer"
DIALS_IN = f"{INDEXER}.enabled=true,{INDEXER}.zmqSubscriberURL=tcp://*:5557"
CUSTOM = "inferenceExtension.pluginsCustomConfig"
EMPTY = ("config", "commonLabels", "service", "monitoring.rules", f"{INDEXER}.config", f"{INDEXER}.podLabels")
EXTENSION = ("pluginsCustomConfig", "podLabels", "leaderElection", "valkey.enabled", "valkey.podLabels")
SECTIONS = ("admin", "extProc", "kubernetes", "kvEvents", "journal", "autoscaling", "replicas", "tracing", "scorers")


@pytest.mark.parametrize(
    "empty",
    [(*EMPTY, *(f"inferenceExtension.{name}" for name in EXTENSION)), [f"config.{name}" for name in SECTIONS]],
    ids=["sections of values", "sections of the configuration"],
)
def test_empty_sections_say_nothing(helm: Helm, empty: list[str]) -> None:
    """As they are left when all below them is commented out."""
    service = (*LABELS, "--set", f"{INDEXER}.enabled=true,{INDEXER}.mode=service,networkPolicy.egress=true")
    nothing = [argument for name in empty for argument in ("--set-json", f"{name}=null")]
    objects = [[thing for thing in helm.render(*service, *more) if thing["kind"] != "Secret"] for more in ((), nothing)]
    assert objects[0] == objects[1]


@pytest.mark.parametrize("mode", ["embedded", "service"])
def test_each_rank_dials_in_at_a_port_of_its_own(helm: Helm, mode: str) -> None:
    more = f"{INDEXER}.mode={mode},config.kvEvents.ranks=3,networkPolicy.enabled=true,{DIALS_IN}"
    names = {"kv-events": 5557, "kv-events-1": 5558, "kv-events-2": 5559}
    listening, reached, allowed = [], [], []
    for thing in helm.render(*LABELS, "--set", more):
        if thing["kind"] == "Deployment":
            ports = thing["spec"]["template"]["spec"]["containers"][0]["ports"]
            listening.append({port["name"]: port["containerPort"] for port in ports if port["name"] in names})
        elif thing["kind"] == "Service":
            ports = [port for port in thing["spec"]["ports"] if port["name"].startswith("tcp-kv-events")]
            reached.append({port["targetPort"]: port["port"] for port in ports})
        elif thing["kind"] == "NetworkPolicy":
            rules = [{port["port"] for port in rule["ports"]} for rule in thing["spec"]["ingress"]]
            allowed.append(set(names) in rules)
    assert [ports for ports in listening if ports] == [ports for ports in reached if ports] == [names]
    assert sum(allowed) == 1


@pytest.mark.parametrize("section", ["tls", "monitoring", "networkPolicy", "inferenceExtension.valkey"])
def test_sections_that_cannot_be_empty_are_named(helm: Helm, section: str) -> None:
    assert f"missing property '{section.rpartition('.')[2]}'" in helm.refused(*LABELS, "--set-json", f"{section}=null")


def test_openshift_chooses_the_users(helm: Helm) -> None:
    pod = one(by_name(helm, "openshift"), "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True


def test_a_change_of_the_configuration_rolls_the_pods_if_wanted(helm: Helm) -> None:
    """For the ConfigMap that they mount has another name."""

    def mounted(*more: str) -> str:
        objects = helm.render(*LABELS, *more)
        (volume,) = (
            volume["configMap"]["name"]
            for volume in one(objects, "Deployment")["spec"]["template"]["spec"]["volumes"]
            if "configMap" in volume
        )
        assert volume == one(objects, "ConfigMap")["metadata"]["name"]
        return str(volume)

    assert mounted() == mounted() == mounted("--set", "tls.mode=generated")
    assert mounted() != mounted("--set", "config.log.level=debug")
    assert mounted("--set", "restartOnConfigChange=false") == "one-epp"


#: What people get wrong in a configuration, the commonest first, and the name of the field in what Helm says.
MISTAKES = {
    "misspelt section": ("config.kvEvent.enabled=true", "kvEvent"),
    "misspelt field": ("config.kvEvents.maxBlock=20000", "maxBlock"),
    "duration that is none": ("config.metrics.interval=soon", "/config/metrics/interval"),
    "size that is none": ("config.parsing.maxBodyBytes=lots", "/config/parsing/maxBodyBytes"),
    "text for a number": ("config.tracing.sample=0.5", "/config/tracing/sample"),
    "number out of range": ("config.admin.port=99999", "/config/admin/port"),
    "none of the words": ("config.log.level=verbose", "/config/log/level"),
    "unknown plugin": ('config.scorers=[{"type":"prefix-awre"}]', "/config/scorers/0/type"),
    "unknown parameter": ('config.filters=[{"type":"queue-depth","parameters":{"maxQueue":5}}]', "maxQueue"),
    "field beside a plugin": ('config.scorers=[{"type":"load-aware","wieght":50}]', "wieght"),
    "mapping for a list": ('config.filters={"type":"queue-depth"}', "/config/filters"),
    "scheduling field in the wrong place": ('config.selection={"topk":2}', "topK"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("where", ["", "inferenceExtension.kvcacheIndexer."])
def test_a_configuration_that_the_program_would_refuse_is_refused(helm: Helm, mistake: str, where: str) -> None:
    setting, named = MISTAKES[mistake]
    assert named in helm.refused(
        *LABELS, "--set-json" if setting.endswith("]") or "={" in setting else "--set", where + setting
    )


OLD_GROUP = "inference.networking.x-k8s.io"


def test_objects_for_gateways_name_the_group_of_the_pool(helm: Helm) -> None:
    existing = f"inferencePool.create=false,inferencePool.name=old,config.kubernetes.group={OLD_GROUP}"
    route = "httpRoute.enabled=true,httpRoute.parentRefs[0].name=gateway,provider.name=gke"
    objects = helm.render("--set", existing, "--set", route)
    named = [one(objects, "HTTPRoute")["spec"]["rules"][0]["backendRefs"][0]]
    named += [one(objects, kind)["spec"]["targetRef"] for kind in ("HealthCheckPolicy", "GCPBackendPolicy")]
    assert [(reference["group"], reference["name"]) for reference in named] == [(OLD_GROUP, "old")] * 3


@pytest.mark.parametrize("entries", ["filters", "scorers"])
def test_custom_plugins_are_checked_as_well(helm: Helm, entries: str) -> None:
    place = f"inferenceExtension.pluginsCustomConfig.{entries}"
    said = helm.refused(*LABELS, "--set-json", f'{place}=[{{"type":"queue-dept"}}]')
    assert f"/inferenceExtension/pluginsCustomConfig/{entries}/0/type" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "modelServers.matchLabels"),
        (["--set", "inferencePool.namespaces={a}", *LABELS], "inferencePool.namespaces: inferencePool.modelServers"),
        (["--set", "inferencePool.namespaces={a},standalone.enabled=true"], "standalone.enabled is for one pool"),
        (["--set", "inferencePool.namespaces={a},provider.name=istio"], "provider.name is for one pool"),
        (
            ["--set", "inferencePool.namespaces={a},inferenceExtension.leaderElection.enabled=false"],
            "inferenceExtension.leaderElection.enabled: with inferencePool.namespaces it stays on",
        ),
        *(
            (["--set", f"inferencePool.namespaces={{a}},{setting}={value}"], f"{setting} is for one pool")
            for setting, value in {
                "config.autoscaling.port": "9004",
                "config.extProc.transport": "grpc-aio",
                "config.kvEvents.bind": "tcp://*:5555",
                "config.replicas.via": "valkey://valkey:6379",
            }.items()
        ),
        ([*LABELS, "--set", "replicas=2"], "additional properties 'replicas' not allowed"),
        ([*LABELS, "--set", "inferenceExtension.replica=2"], "additional properties 'replica' not allowed"),
        ([*LABELS, "--set", "inferenceExtension.replicas=two"], "want integer"),
        ([*LABELS, "--set", "httpRoute.requestTimeout=1.5s"], "/httpRoute/requestTimeout"),
        ([*LABELS, "--set", "monitoring.interval=1.5s"], "/monitoring/interval"),
        ([*LABELS, "--set", "standalone.enabled=true,standalone.port=9090"], "standalone.port: port 9090 is that of"),
        (
            [*LABELS, "--set", f"{INDEXER}.enabled=true,{INDEXER}.zmqSubscriberURL=tcp://*:9002"],
            "zmqSubscriberURL: port 9002 is that of config.extProc.port",
        ),
        *(
            (
                [*LABELS, "--set", f"{INDEXER}.mode={mode},config.kvEvents.port=5557,{DIALS_IN}"],
                "config.kvEvents.port: engines dial in",
            )
            for mode in ("embedded", "service")
        ),
        ([*LABELS, "--set", "standalone.enabled=true,config.gateway=none"], "standalone.enabled starts a gateway"),
        ([*LABELS, "--set", "standalone.enabled=true,config.gateway.mode=none"], "standalone.enabled starts a gateway"),
        ([*LABELS, "--set", "config.gateway.mode=embedded"], "config.gateway.mode: set standalone.enabled"),
        (
            [*LABELS, "--set", "config.extProc.tls=null"],
            "config.extProc.tls: the Services say that the picker speaks TLS",
        ),
        (
            [*LABELS, "--set", "config.kubernetes.namespace=other"],
            "config.kubernetes.namespace: the chart's role and pool",
        ),
        (
            [*LABELS, "--set", "config.kubernetes.pool=other"],
            "config.kubernetes.pool: objects of the chart name the pool",
        ),
        (
            [*LABELS, "--set", "inferenceExtension.replicas=2,config.kubernetes.leaderElection.service=other"],
            "config.kubernetes.leaderElection.service: gateways ask the chart's Service one-epp-leader",
        ),
        (
            [*LABELS, "--set", "config.kubernetes.models=false,inferenceObjectives[0].name=urgent"],
            "config.kubernetes.models: without model definitions",
        ),
        ([*LABELS, "--set", "config.endpoints={10.0.0.1:8000}"], "endpoints come from Kubernetes here"),
        (
            [*LABELS, "--set", "config.policy=random", "--set-json", f'{CUSTOM}.scorers=[{{"type":"queue"}}]'],
            'config.policy: "random" brings its own filters',
        ),
        (
            [*LABELS, *(f'--set-json={place}.filters=[{{"type":"role"}}]' for place in ("config", CUSTOM))],
            "config.filters: inferenceExtension.pluginsCustomConfig says how to choose",
        ),
        (
            [*LABELS, "--set", f"{CUSTOM}.x=text,inferenceExtension.pluginsConfigFile=y"],
            'pluginsConfigFile: "y" is none of the files under pluginsCustomConfig: x',
        ),
        ([*LABELS, "--set", f"{CUSTOM}.x=text,{CUSTOM}.y=text"], 'pluginsConfigFile: "" is none of the files'),
        ([*LABELS, "--set", "config.als.port=9090"], "config.als.port: port 9090 is that of config.admin.port"),
        ([*LABELS, "--set", "inferenceObjectives[0].name=A_b"], "/inferenceObjectives/0/name"),
        ([*LABELS, "--set", "provider.name=nginx"], "value must be one of"),
        ([*LABELS, "--set", "inferencePool.targetPorts[0].number=70000"], "maximum"),
        ([*LABELS, "--set", "inferencePool.failureMode=Open"], "value must be one of"),
        ([*LABELS, "--set", "inferencePool.create=false"], "a gateway needs a pool"),
        ([*LABELS, "--set", f"config.kubernetes.group={OLD_GROUP}"], "the chart makes no pool of this group"),
        ([*LABELS, "--set", "standalone.enabled=true,provider.name=istio"], "choose one of them"),
        (
            [*LABELS, "--set", "inferenceExtension.replicas=2,inferenceExtension.terminationGracePeriodSeconds=44"],
            "at least 45",
        ),
        (
            [*LABELS, "--set", "inferenceExtension.leaderElection.enabled=true,autoscaling.enabled=true"],
            "further replicas take no requests",
        ),
        (
            [*LABELS, "--set", "standalone.enabled=true,inferenceExtension.leaderElection.enabled=true"],
            "stands by serves nothing",
        ),
        ([*LABELS, "--set", "config.kubernetes.leaderElection.enabled=true"], "set inferenceExtension.leaderElection"),
        (
            [*LABELS, "--set", "autoscaling.enabled=true,autoscaling.minReplicas=6,autoscaling.maxReplicas=5"],
            "autoscaling.minReplicas",
        ),
        ([*LABELS, "--set", "standalone.keysSecret=keys"], "set standalone.enabled"),
        (
            [*LABELS, "--set", "standalone.enabled=true,inferenceExtension.replicas=3"],
            "inferenceExtension.replicas: each of these replicas would schedule for itself",
        ),
        (
            [*LABELS, "--set", "standalone.enabled=true,autoscaling.enabled=true"],
            "autoscaling.enabled: each of these replicas would schedule for itself",
        ),
        ([*LABELS, "--set", "autoscaling.enabled=true"], "inferenceExtension.valkey.enabled=true"),
        ([*LABELS, "--set", "tls.mode=cert-manager"], "tls.issuerRef.name"),
        ([*LABELS, "--set", "tls.mode=secret"], "tls.secretName"),
        ([*LABELS, "--set", "httpRoute.enabled=true"], "httpRoute.parentRefs"),
        (
            [
                *LABELS,
                "--set",
                "inferenceExtension.kvcacheIndexer.enabled=true",
                "--set",
                "inferenceExtension.kvcacheIndexer.zmqSubscriberURL=tcp://*",
            ],
            "a port is missing",
        ),
        (
            [
                *LABELS,
                "--set",
                "standalone.enabled=true,inferencePool.create=false,inferenceObjectives[0].name=urgent",
            ],
            "inferenceObjectives: they belong to a pool",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_work_is_refused(helm: Helm, arguments: list[str], said: str) -> None:
    assert said in helm.refused(*arguments)


@pytest.mark.parametrize(
    "settings",
    [
        "config.kubernetes.namespace=default,config.kubernetes.pool=one",
        "config.kubernetes.namespace=other,rbac.create=false,inferencePool.create=false,inferencePool.name=theirs",
        "standalone.enabled=true,config.gateway.mode=embedded",
        "tls.mode=none,config.extProc.tls=null",
    ],
)
def test_what_agrees_with_the_charts_objects_may_be_said_again(helm: Helm, settings: str) -> None:
    assert configured(helm.render(*LABELS, "--set", settings)).kubernetes.on


def test_a_route_of_a_mesh_names_a_service(helm: Helm) -> None:
    service = {"group": "", "kind": "Service", "name": "llm"}
    refs = f"httpRoute.parentRefs={json.dumps([service, {'name': 'edge'}])}"
    route = one(helm.render(*LABELS, "--set", "httpRoute.enabled=true", "--set-json", refs), "HTTPRoute")
    gateway = {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "edge"}
    assert route["spec"]["parentRefs"] == [service, gateway]


def test_a_release_whose_name_has_a_dot_is_refused(helm: Helm) -> None:
    command = ("template", "my.release", str(CHART), *LABELS)
    assert "names of Services have no dots" in helm.run(*command).stderr
    assert helm.run(*command, "--set", "fullnameOverride=mine").returncode == 0


def test_labels_of_long_names_fit(helm: Helm) -> None:
    parts = (
        f"nameOverride={'a' * 63},{INDEXER}.enabled=true,{INDEXER}.mode=service,inferenceExtension.valkey.enabled=true"
    )
    labels = [thing["metadata"]["labels"] for thing in helm.render(*LABELS, "--set", parts)]
    assert {len(label["app.kubernetes.io/name"]) for label in labels} == {63}


def test_notes_know_the_admin_port(helm: Helm) -> None:
    assert "deployment/one-epp 9090:9090 &" in helm.notes(*LABELS)
    assert "deployment/one-epp 9090:9190 &" in helm.notes(*LABELS, "--set", "config.admin.port=9190")


@pytest.mark.parametrize(
    ("more", "warned"),
    [
        ("config.admin.debug=false", False),
        ("config.admin.debug=true", True),
        ("config.admin.debug=true,networkPolicy.metricsFrom[0].podSelector.matchLabels.app=prometheus", False),
        ("config.admin.debug=true,config.admin.tokenFile=/etc/token", False),
        ("config.admin.debug=true,config.admin.metricsPort=9091", False),
        ("config.admin.debug=true,config.admin.metricsPort=9091,networkPolicy.enabled=false", True),
    ],
)
def test_notes_warn_of_debug_pages_that_everyone_may_read(helm: Helm, more: str, warned: bool) -> None:
    assert ("WARNING: config.admin.debug" in helm.notes(*LABELS, "--set", more)) == warned


@pytest.mark.parametrize(("seconds", "short"), [(30, True), (34, True), (35, False)])
def test_notes_warn_of_a_short_grace_period(helm: Helm, seconds: int, short: bool) -> None:
    notes = helm.notes(*LABELS, "--set", f"inferenceExtension.terminationGracePeriodSeconds={seconds}")
    assert ("terminationGracePeriodSeconds is less than 35" in notes) == short


def test_several_pools_need_rights_where_they_are(helm: Helm) -> None:
    listed = helm.render("--set", "inferencePool.namespaces={default,team-b}")
    places = {(role["metadata"]["namespace"], role["metadata"]["name"]) for role in of_kind(listed, "Role")}
    assert places == {("default", "one-epp"), ("default", "default-one-epp-pools"), ("team-b", "default-one-epp-pools")}
    assert not of_kind(listed, "ClusterRole")
    assert not of_kind(listed, "InferencePool")
    everywhere = helm.render("--set", "inferencePool.namespaces={*}")
    assert [role["metadata"]["name"] for role in of_kind(everywhere, "ClusterRole")] == ["default-one-epp-pools"]
    assert one(everywhere, "ClusterRole")["rules"] == of_kind(listed, "Role")[1]["rules"]
    assert configured(everywhere).kubernetes.namespaces == ("*",)
    assert configured(everywhere).kubernetes.leader_election.enabled


def test_releases_of_one_name_share_no_role(helm: Helm) -> None:
    """Each in its namespace, both with the pools of a third."""
    names: list[str] = []
    for namespace in ("plat-a", "plat-b"):
        objects = helm.render("--set", "inferencePool.namespaces={team-x}", release="picker", namespace=namespace)
        pairs = [*of_kind(objects, "Role"), *of_kind(objects, "RoleBinding")]
        names += [
            thing["kind"] + thing["metadata"]["name"] for thing in pairs if thing["metadata"]["namespace"] == "team-x"
        ]
    assert len({*names}) == 4


def test_the_values_in_the_documents(helm: Helm, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text()
    blocks = re.findall(r"^```yml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        (tmp_path / "values.yaml").write_text(block)
        build_policy(configured(rendered(helm, tmp_path / "values.yaml")))


def commands() -> list[list[str]]:
    """`--set` arguments of the documents' helm commands."""
    text = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text().replace("\\\n", " ")
    lines = re.findall(r"^helm upgrade --install llama charts/fairlead (.*)$", text, re.MULTILINE)
    return [[word for pair in re.findall(r"--set '?([^\s']+)", line) for word in ("--set", pair)] for line in lines]


@pytest.mark.parametrize("arguments", commands(), ids=lambda arguments: " ".join(arguments))
def test_the_commands_in_the_documents(helm: Helm, arguments: list[str]) -> None:
    assert len(arguments) > 2
    objects = helm.render(*arguments, release="llama", namespace="serving")
    assert one(objects, "Deployment", "-epp")["metadata"]["name"] == "llama-epp"
    assert "llama" in {service["metadata"]["name"].removesuffix("-epp") for service in of_kind(objects, "Service")}


def test_every_value_is_in_the_schema_and_the_other_way_round() -> None:
    chart = Path(__file__).parents[2] / "charts" / "fairlead"
    values = yaml.safe_load((chart / "values.yaml").read_text())
    schema = yaml.safe_load((chart / "values.schema.json").read_text())

    def compare(value: dict[str, Any], described: dict[str, Any], where: str) -> None:
        known = set(described["properties"]) - {"global", "claims"}
        closed = where.endswith(("resources", "issuerRef", "matchLabels", "pluginsCustomConfig"))
        assert closed or set(value) == known, where
        for key, inner in value.items():
            if isinstance(inner, dict) and "properties" in described["properties"].get(key, {}):
                compare(inner, described["properties"][key], f"{where}.{key}")

    compare(values, schema, "$")


def test_every_value_is_used() -> None:
    chart = Path(__file__).parents[2] / "charts" / "fairlead"
    templates = "\n".join(path.read_text() for path in (chart / "templates").iterdir())
    leaves = re.findall(r"^\s*([a-zA-Z]+):", (chart / "values.yaml").read_text(), re.MULTILINE)
    unused = {leaf for leaf in leaves if not re.search(rf"\.{leaf}\b|\"{leaf}\"", templates)}
    # Parts of mappings that are passed on as they are.
    context = {"runAsNonRoot", "runAsUser", "runAsGroup", "fsGroup", "seccompProfile", "allowPrivilegeEscalation"}
    assert unused <= context | {"readOnlyRootFilesystem", "capabilities", "requests", "limits", "number"}


def test_nobody_reaches_more_than_was_asked_for(helm: Helm) -> None:
    """As installed without further values."""
    objects = by_name(helm, "minimal")
    config = configured(objects).admin
    assert not config.debug
    assert "one-epp.default.svc" in config.hosts
    (policy,) = [thing["spec"] for thing in objects if thing["kind"] == "NetworkPolicy"]
    assert policy["policyTypes"] == ["Ingress"]
    assert [ports["port"] for rule in policy["ingress"] for ports in rule["ports"]] == ["grpc-ext-proc", "metrics"]


def test_a_standby_reaches_the_leader(helm: Helm) -> None:
    """For its connection, and to read what the leader learned, whoever else may read metrics."""
    others = "networkPolicy.metricsFrom[0].podSelector.matchLabels.a=b"
    asked = f"inferenceExtension.replicas=2,networkPolicy.egress=true,{others}"
    (policy,) = of_kind(helm.render(*LABELS, "--set", asked), "NetworkPolicy")
    own = [{"podSelector": policy["spec"]["podSelector"]}]
    for rules, peers in ((policy["spec"]["ingress"], "from"), (policy["spec"]["egress"], "to")):
        (ports,) = [rule["ports"] for rule in rules if rule.get(peers) == own]
        assert [each["port"] for each in ports] == ["grpc-health", "metrics"]


def test_names_and_labels_that_kubernetes_takes(helm: Helm, tmp_path: Path) -> None:
    """Pods of a StatefulSet have a label of its name and eleven characters; labels have 63 at most, and no `+`."""
    long = "n" * 53
    objects = helm.render(*LABELS, "--set", "inferenceExtension.valkey.enabled=true", release=long)
    (name,) = [thing["metadata"]["name"] for thing in of_kind(objects, "StatefulSet")]
    assert len(name) <= 52
    assert configured(objects).replicas.via == f"valkey://fairlead@{name}:6379/0"
    chart = Path(__file__).parents[2] / "charts" / "fairlead"
    assert helm.run("package", str(chart), "--version", "1.2.3+abc", "--destination", str(tmp_path)).returncode == 0
    text = helm.run("template", "one", str(tmp_path / "fairlead-1.2.3+abc.tgz"), *LABELS).stdout
    assert set(re.findall(r"helm.sh/chart: (.*)", text)) == {"fairlead-1.2.3_abc"}


def test_what_was_learned_is_kept_in_the_pod_or_beside_the_journal(helm: Helm) -> None:
    """A container that is restarted finds its file again; a journal's volume may outlive the pod."""
    deployment = one(helm.render(*LABELS), "Deployment")
    template = deployment["spec"]["template"]["spec"]
    path = Path(configured(helm.render(*LABELS)).state.file)
    mount = next(each for each in template["containers"][0]["volumeMounts"] if path.is_relative_to(each["mountPath"]))
    assert "emptyDir" in next(each for each in template["volumes"] if each["name"] == mount["name"])
    beside = configured(helm.render(*LABELS, "--set", "config.journal.path=/journal"))
    assert beside.state.path(beside.journal) == "/journal/learned.state"
    off = configured(helm.render(*LABELS, "--set", "config.state.enabled=false"))
    assert off.state.path(off.journal) == ""


@pytest.mark.parametrize(
    ("journal", "size"),
    [
        ("path=", "256Mi"),
        ("path=/journal", "256Mi"),
        ("path=/tmpfs", "256Mi"),
        *((f"path={path}", "1280Mi") for path in ("/tmp", "/tmp/")),
        ("path=/tmp/journal", "1280Mi"),
        *((f"path=/tmp/journal,config.journal.maxBytes={most}", "768Mi") for most in ("512Mi", "536870912", "0.5GiB")),
        ("path=/tmp/journal,config.journal.maxBytes=100M", "352Mi"),
    ],
)
def test_a_journal_in_tmp_has_room_there(helm: Helm, journal: str, size: str) -> None:
    deployment = one(helm.render(*LABELS, "--set", f"config.journal.{journal}"), "Deployment")
    (tmp,) = (each for each in deployment["spec"]["template"]["spec"]["volumes"] if each["name"] == "tmp")
    assert tmp["emptyDir"]["sizeLimit"] == size


@pytest.mark.parametrize(("leading", "service"), [("false", "one-epp"), ("true", "one-epp-leader")])
def test_keda_reaches_the_external_scaler_of_who_decides(helm: Helm, leading: str, service: str) -> None:
    arguments = (
        *LABELS,
        "--set",
        "config.autoscaling.port=9004",
        "--set",
        f"inferenceExtension.leaderElection.enabled={leading}",
    )
    objects = helm.render(*arguments, "--set", f"inferenceExtension.replicas={2 if leading == 'true' else 1}")
    port = {"name": "grpc-scaler", "port": 9004, "targetPort": 9004, "protocol": "TCP"}
    having = [thing for thing in of_kind(objects, "Service") if port in thing["spec"]["ports"]]
    assert [thing["metadata"]["name"] for thing in having] == [service]
    documented = (Path(__file__).parents[2] / "docs" / "autoscaling.md").read_text()
    assert f"{service.replace('one', 'llama')}.serving.svc:9004`" in documented
    (policy,) = of_kind(objects, "NetworkPolicy")
    assert [{"port": 9004, "protocol": "TCP"}] in [rule["ports"] for rule in policy["spec"]["ingress"]]
    assert not [thing for thing in of_kind(helm.render(*LABELS), "Service") if port in thing["spec"]["ports"]]


@pytest.mark.parametrize(("replicas", "service"), [(1, "one-epp"), (2, "one-epp-leader")])
def test_gateways_reach_the_port_of_the_access_log(helm: Helm, replicas: int, service: str) -> None:
    asked = (*LABELS, "--set", f"config.als.port=9005,inferenceExtension.replicas={replicas}")
    objects = helm.render(*asked)
    having = [
        thing["metadata"]["name"]
        for thing in of_kind(objects, "Service")
        if 9005 in [port["targetPort"] for port in thing["spec"]["ports"]]
    ]
    assert having == [service]
    (policy,) = of_kind(objects, "NetworkPolicy")
    assert {"port": 9005, "protocol": "TCP"} in policy["spec"]["ingress"][0]["ports"]
    for unheard in ("config.als.enabled=false", "config.als.port=9002"):
        assert "grpc-als" not in str(helm.render(*asked, "--set", unheard))
