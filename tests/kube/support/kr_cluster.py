"""A cluster for tests: the API server, its keys, accounts with roles, pods with addresses."""

import shutil
import ssl
import time
from collections.abc import Sequence
from pathlib import Path

import yaml
from kr_client import Client, Object, Refused
from kr_process import Process

CRDS = Path(__file__).parents[3] / "charts" / "fairlead" / "crds"
RBAC = "rbac.authorization.k8s.io"
#: Seconds; the server needs two or three, and many more beside other work.
PATIENCE = 60.0


class Cluster:
    """Start it with `start`. It keeps its address, keys and data over `stop`, `kill` and the next `start`.

    `admin` may do everything. `account` makes others. What a real cluster's controllers do does not happen: no
    garbage collection, no EndpointSlices, no default accounts, and deleted namespaces stay Terminating.
    """

    def __init__(self, binary: Path, directory: Path, arguments: Sequence[str] = (), etcd: Path | None = None) -> None:
        self.directory = directory
        self.keys = directory / "keys"
        self._binary = binary
        self._arguments = tuple(arguments)
        self._etcd = etcd
        self._port = 0
        self._process: Process | None = None
        self.admin: Client

    # ---- its life

    def start(self) -> "Cluster":
        """Returns when /readyz says ok."""
        shared = ["-etcd", str(self._etcd)] if self._etcd else []
        self._process = Process(
            self._binary, self.directory, ["-port", str(self._port), *shared, "--", *self._arguments]
        )
        self._port = int(self._process.url.rpartition(":")[2])
        deadline = time.monotonic() + PATIENCE
        while not (self.keys / "complete").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.admin = Client(self._process.url, self.keys / "ca.crt", (self.keys / "admin.token").read_text())
        self.wait_ready(deadline)
        return self

    def wait_ready(self, deadline: float) -> None:
        said: object = "nothing"
        while time.monotonic() < deadline:
            try:
                status, said = self.admin.request("GET", "/readyz")
                # RBAC's own roles and the priority classes come last; before them a new account is refused.
                if status == 200 and self.admin.request("GET", "/api/v1/namespaces/default")[0] == 200:
                    return
            except (OSError, ssl.SSLError) as error:
                said = error
            if not self.process.running:
                break
            time.sleep(0.05)
        raise AssertionError(f"the API server is not ready: {said}\n{self.process.log.read_text()[-2000:]}")

    @property
    def process(self) -> Process:
        assert self._process is not None, "start() comes first"
        return self._process

    @property
    def url(self) -> str:
        return self.process.url

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()

    def kill(self) -> None:
        self.process.kill()

    def restart(self, *, kill: bool = False) -> None:
        """Watches break, resource versions from before are too old: a watch from one of them gets 410."""
        self.kill() if kill else self.stop()
        self.start()

    def compact(self) -> int:
        """Throw away etcd's history. The API server's cache still holds some of it until a restart."""
        return int(self.process.ask("compact")["revision"])

    def twin(self, directory: Path) -> "Cluster":
        """Another API server on this one's etcd, with the same keys. Not started; stop it before this one."""
        shutil.copytree(self.keys, directory / "keys")
        return Cluster(self._binary, directory, self._arguments, self._etcd or self.directory)

    # ---- who may what

    def client(self, token: str) -> Client:
        return Client(self.url, self.keys / "ca.crt", token)

    def account(
        self, namespace: str, name: str, rules: Sequence[Object] = (), cluster_rules: Sequence[Object] = ()
    ) -> str:
        """A service account with a role of its own; gives a bearer token for one hour."""
        self.admin.apply(_object("v1", "ServiceAccount", name), namespace)
        for kind, given, space in (("Role", rules, namespace), ("ClusterRole", cluster_rules, None)):
            if given:
                called = name if space else f"{namespace}-{name}"
                self.admin.apply({**_object(f"{RBAC}/v1", kind, called), "rules": list(given)}, space)
                self.bind(kind, called, namespace, name)
        return self.token(namespace, name)

    def bind(self, kind: str, role: str, namespace: str, account: str) -> None:
        """Give a service account an existing Role or ClusterRole."""
        binding = {
            **_object(f"{RBAC}/v1", f"{kind}Binding", f"{role}-{account}"),
            "roleRef": {"apiGroup": RBAC, "kind": kind, "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
        }
        self.admin.apply(binding, namespace)

    def token(self, namespace: str, account: str, seconds: int = 3600) -> str:
        """A new token of a service account. The server gives none for less than 600 s."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        wanted = {"spec": {"expirationSeconds": seconds}, "apiVersion": "authentication.k8s.io/v1"}
        return str(self.admin.must("POST", path, {**wanted, "kind": "TokenRequest"})["status"]["token"])

    def revoke(self, namespace: str, account: str) -> None:
        """Delete a service account: its tokens get 401. The server remembers a good one for up to 10 s."""
        self.admin.delete(_object("v1", "ServiceAccount", account), namespace)

    def kubeconfig(self, path: Path, token: str = "", namespace: str = "default") -> Path:
        """Write one; without a token, with the administrator's client certificate."""
        certificate = {"client-certificate": str(self.keys / "admin.crt"), "client-key": str(self.keys / "admin.key")}
        cluster = {"server": self.url, "certificate-authority": str(self.keys / "ca.crt")}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "tests",
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "one", "namespace": namespace}}],
            "clusters": [{"name": "tests", "cluster": cluster}],
            "users": [{"name": "one", "user": {"token": token} if token else certificate}],
        }
        path.write_text(yaml.safe_dump(document))
        return path

    # ---- what is in it

    def namespace(self, name: str) -> str:
        self.admin.apply(_object("v1", "Namespace", name))
        return name

    def install_crds(self) -> None:
        """Those of the chart. Returns when objects of them can be listed."""
        for path in sorted(CRDS.glob("*.yaml")):
            self.install_crd_file(path)

    def install_crd_file(self, path: Path) -> None:
        for crd in yaml.load_all(path.read_text(), yaml.CSafeLoader):
            self.install_crd(crd)

    def install_crd(self, crd: Object) -> None:
        self.admin.apply(crd)
        spec = crd["spec"]
        for version in (one["name"] for one in spec["versions"] if one["served"]):
            self._wait_served(f"/apis/{spec['group']}/{version}/{spec['names']['plural']}")

    def _wait_served(self, path: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.admin.request("GET", path)[0] != 200:
            assert time.monotonic() < deadline, f"{path} is not served"
            time.sleep(0.05)

    def pod(self, namespace: str, name: str, address: str, *, ready: bool = True, **metadata: object) -> Object:
        """A scheduled, running pod with that IP. `metadata`: labels, annotations."""
        container = {"name": "server", "image": "example.invalid/server"}
        spec = {"nodeName": "node-0", "containers": [container], "terminationGracePeriodSeconds": 30}
        thing = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **metadata}, "spec": spec}
        self.admin.create(thing, namespace)
        return self.admin.patch(thing, {"status": running(address, ready)}, namespace, "status")

    def set_ready(self, namespace: str, name: str, ready: bool) -> Object:
        thing = _object("v1", "Pod", name)
        return self.admin.patch(thing, {"status": {"conditions": [_condition(ready)]}}, namespace, "status")

    def delete_pod(self, namespace: str, name: str, grace: int = 0) -> None:
        self.admin.delete(_object("v1", "Pod", name), namespace, grace)


def running(address: str, ready: bool) -> Object:
    """A pod's status."""
    addresses = {"podIP": address, "podIPs": [{"ip": address}], "hostIP": "10.0.0.1", "hostIPs": [{"ip": "10.0.0.1"}]}
    return {"phase": "Running", "conditions": [_condition(ready)], **addresses}


def _condition(ready: bool) -> Object:
    return {"type": "Ready", "status": "True" if ready else "False"}


def _object(version: str, kind: str, name: str) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}}


__all__ = ["Client", "Cluster", "Refused", "running"]
