"""The inference extension's own conformance tests, those of the data plane, against our picker.

    python tests/kube/extension_suite.py [NAME]     all of them, or one; a few minutes, and the first time the build

The suite (Go, SUITE) tests gateways, with pickers of its own behind them. Here the pickers are ours, by the command
lines that the suite gives its own, with the rights that it gives them. This program plays the rest of a cluster on a
real API server: model servers that echo, a gateway of plain Envoys that asks in full duplex, and the statuses that
a gateway's controller writes. Tests of nothing but those statuses are left out. It listens on port 80 of loopback
addresses, so it must be root.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from kc_pods import Server, body_of
from kc_reference import Picker
from kr_build import cached, ensure_built, find_go
from kr_client import Refused
from kr_cluster import Cluster

from gw_processes import Envoy  # isort: skip  (kc_reference shows where it is)

MODULE, VERSION = "sigs.k8s.io/gateway-api-inference-extension", "v1.3.0"
#: Of what a gateway's controller does alone; and one that makes another picker unavailable than it asks.
SKIPPED = (
    "InferencePoolAccepted", "InferencePoolResolvedRefsCondition", "InferencePoolInvalidEPPService",
    "HTTPRouteInvalidInferencePoolRef", "EppUnAvailableFailOpen",
)  # fmt: skip
APP, INFRA = "inference-conformance-app-backend", "inference-conformance-infra"
GATEWAY, POOL = "gateway.networking.k8s.io/v1", "inference.networking.k8s.io/v1"
CONTROLLER = "fairlead.example.com/tests"
#: The suite's own names two plugins of its tests; this is what migration.md says to write instead.
CONFIG = "{apiVersion: llm-d.ai/v1alpha1, kind: EndpointPickerConfig, headers: {trust: [test-selection]}}"
DESTINATION = "x-gateway-destination-endpoint"
#: Who serves is who was picked: there are no retries.
SERVED = f"""
function envoy_on_request(handle)
  handle:streamInfo():dynamicMetadata():set(
    "envoy.lb", "{DESTINATION}-served", handle:headers():get("{DESTINATION}") or "")
end
"""

Object = dict[str, Any]


def suite() -> tuple[Path, list[Path]]:
    """The tests as a program, built once; and the definitions of what they make objects of."""
    go, place = find_go(), cached().parents[2] / f"extension-suite-{VERSION}"
    environment = {**os.environ, "GOFLAGS": "-mod=mod", "CGO_ENABLED": "0"}
    place.mkdir(parents=True, exist_ok=True)

    def run(*command: str) -> str:
        return subprocess.run(
            [go, *command], cwd=place, env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    if not (place / "suite").is_file():
        (place / "go.mod").write_text("module suite\n\ngo 1.25.0\n")
        run("get", f"{MODULE}/conformance@{VERSION}")
        run("test", "-c", "-o", "suite", f"{MODULE}/conformance")
    extension, gateways = (
        Path(run("list", "-m", "-f", "{{.Dir}}", name).strip()) for name in (MODULE, "sigs.k8s.io/gateway-api")
    )
    kinds = ("gatewayclasses", "gateways", "httproutes", "referencegrants")
    files = [gateways / "config/crd/standard" / f"gateway.networking.k8s.io_{kind}.yaml" for kind in kinds]
    # As its rights are: none to rewrites.
    files += [extension / "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml"]
    files += [extension / "config/crd/bases/inference.networking.x-k8s.io_inferenceobjectives.yaml"]
    return place / "suite", files


class Echo(Server):
    """A port of a model server's pod."""

    def __init__(self, address: str, port: int, pod: str) -> None:
        super().__init__(address, port)
        self._pod = pod

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            fields = [line.split(": ", 1) for line in lines if line]
            await body_of(reader, {name.lower(): value for name, value in fields})
            method, path, proto = first.split(" ")
            headers: dict[str, list[str]] = {}
            for name, value in fields:
                headers.setdefault(name.title(), []).append(value)
            told = {"path": path, "method": method, "proto": proto, "headers": headers, "namespace": APP}
            told |= {"host": headers.get("Host", [""])[0], "pod": self._pod, "httpPort": str(self.port)}
            answer = json.dumps(told).encode() if path != "/metrics" else b"vllm:num_requests_running 0\n"
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(answer)
            )
            writer.write(answer)


def true(*kinds: str, generation: int) -> list[Object]:
    now = {"lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": generation, "message": ""}
    return [{"type": kind, "status": "True", "reason": kind, **now} for kind in kinds]


class Plane:
    """What a cluster's controllers, its kubelet and a gateway do, as far as the suite looks."""

    def __init__(self, cluster: Cluster, directory: Path, stack: AsyncExitStack) -> None:
        self._admin, self._cluster, self._directory, self._stack = cluster.admin, cluster, directory, stack
        self._network = f"127.{20 + os.getpid() % 200}"
        self._made: set[str] = set()
        #: By the Service that the pool names.
        self._pickers: dict[str, Picker] = {}
        self._envoys: dict[str, tuple[str, Envoy]] = {}

    async def run(self) -> None:
        while True:
            for act in (self._deployments, self._gateways):
                try:
                    await act()
                except Refused as error:
                    if error.status not in (404, 409):  # gone, or changed meanwhile
                        raise
            await asyncio.sleep(0.3)

    async def _all(self, version: str, kind: str, namespace: str = APP) -> list[Object]:
        path = self._admin.path({"apiVersion": version, "kind": kind, "metadata": {}}, namespace)
        found = await asyncio.to_thread(self._admin.must, "GET", path)
        return [{**one, "apiVersion": version, "kind": kind} for one in found["items"]]

    async def _deployments(self) -> None:
        for one in await self._all("apps/v1", "Deployment"):
            name, pod = one["metadata"]["name"], one["spec"]["template"]
            if name not in self._made:
                self._made.add(name)
                labels, containers = pod["metadata"]["labels"], pod["spec"]["containers"]
                if containers[0]["name"] == "epp":
                    await self._picker(name, labels, containers[0])
                    continue
                ports = [port["containerPort"] for container in containers for port in container["ports"]]
                for index in range(one["spec"]["replicas"]):
                    address = f"{self._network}.{len(self._made)}.{index + 1}"
                    for port in ports:
                        self._stack.push_async_callback((await Echo(address, port, f"{name}-{index}").start()).stop)
                    await asyncio.to_thread(self._cluster.pod, APP, f"{name}-{index}", address, labels=labels)

    async def _picker(self, name: str, labels: Object, container: Object) -> None:
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
        await asyncio.to_thread(self._admin.apply, account, APP)
        token = await asyncio.to_thread(self._cluster.token, APP, "default")
        self._cluster.kubeconfig(self._directory / "kubeconfig", token, APP)
        (self._directory / "config").mkdir(exist_ok=True)
        (self._directory / "config" / "conformance-plugins.yaml").write_text(CONFIG)
        picker = Picker(self._directory, name, container, APP)
        self._stack.callback(picker.end)
        await asyncio.to_thread(picker.poll_until, lambda: picker.answers("readinessProbe"))
        services = [one for one in await self._all("v1", "Service") if one["spec"]["selector"] == labels]
        self._pickers[services[0]["metadata"]["name"]] = picker

    async def _gateways(self) -> None:
        pools = {one["metadata"]["name"]: one for one in await self._all(POOL, "InferencePool")}
        asked = {name: one["spec"]["endpointPickerRef"]["name"] for name, one in pools.items()}
        if not asked or not set(asked.values()) <= self._pickers.keys():
            return
        routes = await self._all(GATEWAY, "HTTPRoute")
        for number, gateway in enumerate(await self._all(GATEWAY, "Gateway", INFRA), 1):
            name, address = gateway["metadata"]["name"], f"{self._network}.0.{number}"
            own = [one for one in routes if one["spec"]["parentRefs"][0]["name"] == name]
            ports = {pool: self._pickers[service].port for pool, service in asked.items()}
            await self._serve(name, bootstrap(address, own, ports))
            status = {"addresses": [{"type": "IPAddress", "value": address}]}
            await self._tell(gateway, "conditions", true("Accepted", "Programmed", generation=1), **status)
            parent = {"group": GATEWAY[:-3], "kind": "Gateway", "name": name, "namespace": INFRA}
            for one in own:
                ref = one["spec"]["parentRefs"][0]
                conditions = true("Accepted", "ResolvedRefs", generation=one["metadata"]["generation"])
                await self._tell(
                    one, "parents", [{"parentRef": ref, "controllerName": CONTROLLER, "conditions": conditions}]
                )
                for rule in one["spec"]["rules"]:
                    for backend in rule["backendRefs"]:
                        pool = pools[backend["name"]]
                        known = {old["parentRef"]["name"]: old for old in pool.get("status", {}).get("parents", [])}
                        conditions = true("Accepted", "ResolvedRefs", generation=1)
                        known[name] = {"parentRef": parent, "conditions": conditions}
                        parents = [known[key] for key in sorted(known)]
                        pools[backend["name"]] = await self._tell(pool, "parents", parents)

    async def _tell(self, thing: Object, field: str, value: Any, **more: Any) -> Object:
        status = thing.get("status", {})
        if status.get(field) == value:
            return thing
        change = {"status": {field: value, **more}}
        namespace = thing["metadata"]["namespace"]
        return await asyncio.to_thread(self._admin.patch, thing, change, namespace, "status")

    async def _serve(self, name: str, wanted: Object) -> None:
        """An Envoy that does; another one when the routes are others."""
        text = json.dumps(wanted)
        known, envoy = self._envoys.get(name, ("", None))
        if known != text:
            if envoy is not None:
                await asyncio.to_thread(envoy.end)
            else:
                envoy = Envoy(self._directory, name)
                self._stack.callback(envoy.end)
            await asyncio.to_thread(envoy.start, wanted)
            self._envoys[name] = text, envoy


def bootstrap(address: str, routes: list[Object], pickers: dict[str, int]) -> Object:
    """A gateway as the extension wants it: plain Envoy, full duplex, the destination in a header."""
    types = "type.googleapis.com/envoy.extensions"
    body = "FULL_DUPLEX_STREAMED"
    mode = {f"{side}_{part}_mode": "SEND" for side in ("request", "response") for part in ("header", "trailer")}
    ext_proc = {
        "@type": f"{types}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": next(iter(pickers))}},
        "processing_mode": {**mode, "request_body_mode": body, "response_body_mode": body},
        "metadata_options": {"forwarding_namespaces": {"untyped": ["envoy.lb"]}},
        "message_timeout": "1000s",
    }
    lua = {"@type": f"{types}.filters.http.lua.v3.Lua", "default_source_code": {"inline_string": SERVED}}
    filters = [{"name": "ext_proc", "typed_config": ext_proc}, {"name": "lua", "typed_config": lua}]
    filters += [{"name": "router", "typed_config": {"@type": f"{types}.filters.http.router.v3.Router"}}]

    def chosen(backend: Object) -> Object:
        override = {"grpc_service": {"envoy_grpc": {"cluster_name": backend["name"]}}}
        config = {"@type": f"{types}.filters.http.ext_proc.v3.ExtProcPerRoute", "overrides": override}
        return {"name": "picked", "weight": backend.get("weight", 1), "typed_per_filter_config": {"ext_proc": config}}

    hosts: dict[tuple[str, ...], list[Object]] = {}
    for route in routes:
        listed = hosts.setdefault(tuple(route["spec"].get("hostnames", ["*"])), [])
        for rule in route["spec"]["rules"]:
            clusters = {"weighted_clusters": {"clusters": [chosen(one) for one in rule["backendRefs"]]}}
            listed += [{"match": {"prefix": one["path"]["value"]}, "route": clusters} for one in rule["matches"]]
    virtual_hosts = [
        {"name": str(i), "domains": list(names), "routes": found} for i, (names, found) in enumerate(hosts.items())
    ]
    manager = {
        "@type": f"{types}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "route_config": {"virtual_hosts": virtual_hosts},
        "http_filters": filters,
    }
    http2 = {
        "@type": f"{types}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    tls = {"@type": f"{types}.transport_sockets.tls.v3.UpstreamTlsContext", "common_tls_context": {}}
    clusters: list[Object] = [
        {
            "name": pool,
            "connect_timeout": "5s",
            "transport_socket": {"name": "tls", "typed_config": tls},
            "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
            "load_assignment": {
                "cluster_name": pool,
                "endpoints": [{"lb_endpoints": [{"endpoint": at("127.0.0.1", port)}]}],
            },
        }
        for pool, port in pickers.items()
    ]
    picked = {"use_http_header": True, "http_header_name": DESTINATION}
    clusters += [
        {"name": "picked", "type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED", "original_dst_lb_config": picked}
    ]
    listener = {
        "name": "gateway",
        **at(address, 80),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


def at(address: str, port: int) -> Object:
    return {"address": {"socket_address": {"address": address, "port_value": port}}}


async def main(only: str) -> int:
    program, definitions = suite()
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flk-", dir="/tmp")))
        cluster = Cluster(ensure_built(sys.stderr), directory)
        stack.callback(cluster.stop)
        cluster.start()
        for path in definitions:
            cluster.install_crd_file(path)
        gateway_class: Object = {"apiVersion": GATEWAY, "kind": "GatewayClass", "metadata": {"name": "fairlead"}}
        cluster.admin.apply({**gateway_class, "spec": {"controllerName": CONTROLLER}})
        cluster.admin.patch(gateway_class, {"status": {"conditions": true("Accepted", generation=1)}}, None, "status")
        plane = asyncio.create_task(Plane(cluster, directory, stack).run())
        chosen = ["-run-test", only] if only else ["-skip-tests", ",".join(SKIPPED)]
        command = [str(program), "-test.v", "-gateway-class", "fairlead", "-allow-crds-mismatch", *chosen]
        environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig(directory / "admin"))}
        tests = await asyncio.create_subprocess_exec(*command, env=environment)
        ended = asyncio.create_task(tests.wait())
        await asyncio.wait({plane, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            tests.terminate()
            await plane  # it raises
        plane.cancel()
        await asyncio.gather(plane, return_exceptions=True)
        return await ended


if __name__ == "__main__":
    sys.exit(asyncio.run(main("".join(sys.argv[1:]))))
