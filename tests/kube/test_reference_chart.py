"""The reference's chart with our image: its objects, its rights and no more, its arguments, environment and probes.

`tests/data/reference-chart` says where it is from. Gateways reach the picker as in the reference's own tests: full
duplex, TLS that trusts anybody, the destination in a header.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from kc_pods import PodServer, pod_servers
from kc_reference import ROOT, Picker
from kc_traffic import ask
from kr_cluster import Cluster
from kr_helm import one
from kr_runs import installed
from ports import free_ports

from fairlead.core.endpoint import ROLE_LABEL
from fairlead.gateway.envoy.options import Tls

from gw_http1 import Http1  # isort: skip  (kc_traffic shows where it is)
from gw_modes import FULL_DUPLEX, Pair, bootstrap  # isort: skip
from gw_processes import Envoy, get_page, require_envoy, sees_the_scheduler  # isort: skip

RENDERED = (ROOT / "tests" / "data" / "reference-chart" / "rendered.yaml").read_text()
PREFILL_DECODE = (ROOT / "tests" / "data" / "epp-configs" / "pd-epp-config.yaml").read_text()

Object = dict[str, Any]


def rendered(namespace: str, port: int, replicas: int) -> list[Object]:
    """Its objects, for pods that listen on `port`."""
    text = RENDERED.replace("serving", namespace).replace("number: 8000", f"number: {port}")
    if replicas == 1:
        text = text.replace("replicas: 2", "replicas: 1").replace("            - --ha-enable-leader-election\n", "")
        text = text.replace("service: liveness", "service: inference-extension")
        text = text.replace("service: readiness", "service: inference-extension")
    objects = [thing for thing in yaml.load_all(text, yaml.CSafeLoader) if thing]
    return [thing for thing in objects if replicas > 1 or "leader-election" not in thing["metadata"]["name"]]


@asynccontextmanager
async def release(
    kube: Cluster, namespace: str, directory: Path, replicas: int = 1, roles: tuple[str, str] = ("", "")
) -> AsyncIterator[tuple[list[PodServer], Callable[[Callable[[Object], None]], Picker]]]:
    """The chart's objects and two model servers; what starts a picker, after a change to its container."""
    async with AsyncExitStack() as stack:
        pods = await pod_servers(2)
        for pod, role in zip(pods, roles, strict=True):
            stack.push_async_callback(pod.stop)
            labels = {"app": "vllm"} | ({ROLE_LABEL: role} if role else {})
            await asyncio.to_thread(kube.pod, namespace, f"vllm-{pod.address[-1]}", pod.address, labels=labels)
        objects = rendered(namespace, pods[0].port, replicas)
        await asyncio.to_thread(kube.admin.apply, one(objects, "Deployment"), namespace)
        for thing in objects:
            thing["metadata"]["namespace"] = namespace
        await asyncio.to_thread(installed, kube, namespace, objects, directory / "kubeconfig")
        (directory / "config").mkdir()
        for name, text in {**one(objects, "ConfigMap")["data"], "pd.yaml": PREFILL_DECODE}.items():
            (directory / "config" / name).write_text(text)
        container = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
        started: list[Picker] = []

        def start(change: Callable[[Object], None]) -> Picker:
            change(container)
            started.append(Picker(directory, f"llama-epp-{len(started)}", container, namespace))
            stack.callback(started[-1].end)
            return started[-1]

        yield pods, start


def as_it_is(container: Object) -> None: ...


def of_pairs(container: Object) -> None:
    """`pluginsConfigFile`, with `pluginsCustomConfig`."""
    container["args"] = [word.replace("default-plugins", "pd") for word in container["args"]]


@pytest.mark.parametrize(("roles", "change"), [(("", ""), as_it_is), (("prefill", "decode"), of_pairs)])
async def test_one_replica_serves(
    kube: Cluster,
    namespace: str,
    tmp_path: Path,
    roles: tuple[str, str],
    change: Callable[[Object], None],
) -> None:
    require_envoy()
    async with release(kube, namespace, tmp_path, roles=roles) as (pods, start):
        picker = await asyncio.to_thread(start, change)
        for probe in ("livenessProbe", "readinessProbe"):
            await asyncio.to_thread(picker.poll_until, lambda probe=probe: picker.answers(probe))
        addresses = [f"{pod.address}:{pod.port}" for pod in pods]
        (port,) = free_ports(1)
        gateway = Envoy(tmp_path)
        theirs = Pair(FULL_DUPLEX, FULL_DUPLEX, log=False)
        made = bootstrap(theirs, port, f"127.0.0.1:{picker.port}", addresses, tls=Tls(verify=False))
        try:
            await asyncio.to_thread(gateway.start, made)
            await sees_the_scheduler(gateway.admin)
            async with Http1(port) as client:
                answers = [await client.ask(ask("m", f"{number} {'long ' * 500}")) for number in range(12)]
        finally:
            gateway.end()
        assert [answer.status for answer in answers] == [200] * 12, answers[0]
        _, page = await asyncio.to_thread(get_page, f"http://127.0.0.1:{picker.metrics}/metrics")
    assert 'llm_d_epp_ready_endpoints{name="llama"} 2' in page
    assert "not allowed to list inferencemodels" in picker.said(), "this cluster knows them"
    if change is of_pairs:
        prefill, decode = pods
        assert (prefill.served, decode.prefillers) == (0, {addresses[0]: 12})
    else:
        assert sum(pod.served for pod in pods) == 12 and all(set(pod.prefillers) <= {""} for pod in pods)


async def test_of_two_replicas_the_one_that_leads_is_ready(kube: Cluster, namespace: str, tmp_path: Path) -> None:
    async with release(kube, namespace, tmp_path, replicas=2) as (_, start):
        first = await asyncio.to_thread(start, as_it_is)
        await asyncio.to_thread(first.poll_until, lambda: first.answers("readinessProbe"))
        second = await asyncio.to_thread(start, as_it_is)
        await asyncio.to_thread(second.poll_until, lambda: second.answers("livenessProbe"))
        assert not second.answers("readinessProbe")
        first.signal(signal.SIGTERM)
        await asyncio.to_thread(second.poll_until, lambda: second.answers("readinessProbe"))
        first.end(gently=False)  # it would wait for gateways to notice
