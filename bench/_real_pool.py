"""Real model servers as child processes: start, wait, warm, kill, stop and go on.

The flags of vLLM make a small machine hold two of them: four sequences at once, 96 MB of KV cache, eager mode, one
OpenMP thread, the in-process executor (the other one spins on a core). On processors without bfloat16 products the
numbers are 32 bits long, which makes prompts four times as fast there. Events and their replay are published over ZMQ.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from itertools import product
from pathlib import Path

from msgspec import Struct

from _gateway import free_ports
from _process import children, cpu_s

ENGINES = ("vllm", "transformers")
MODEL, ADAPTERS = "tiny", ("adapter-a", "adapter-b")
READY_S, END_S = 240.0, 20.0
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
}
_FLAGS = (
    "--max-model-len 4096 --block-size 32 --max-num-seqs 4 --enforce-eager --distributed-executor-backend uni"
    " --enable-prefix-caching --prefix-caching-hash-algo sha256_cbor"
    " --enable-prompt-tokens-details --enable-request-id-headers --enable-server-load-tracking --enable-scale-out"
)


def _numbers() -> list[str]:
    """Flags: the format of numbers, and the memory for as many blocks in either."""
    with contextlib.suppress(OSError):
        flags = Path("/proc/cpuinfo").read_text().split()
        if not {"avx512_bf16", "amx_bf16", "bf16"}.intersection(flags):  # the last is Arm's
            return ["--dtype", "float32", "--kv-cache-memory-bytes", "192M"]
    return ["--dtype", "bfloat16", "--kv-cache-memory-bytes", "96M"]


#: Tokens that the cache of one server has room for, by size of the model; for the engine `transformers`.
CACHE_TOKENS = {"28m": 12_288, "8b": 65_536}


class Home(Struct, frozen=True):
    """What the servers are started from."""

    path: Path
    #: Of `ENGINES`.
    engine: str = "vllm"
    #: Size of the model: a key of `CACHE_TOKENS`.
    size: str = "28m"
    #: vLLM's program, or the interpreter that has transformers; empty = that of the folder's own installation.
    given: str = ""

    @property
    def program(self) -> Path:
        own = self.path / "venv" / "bin" / ("vllm" if self.engine == "vllm" else "python")
        return Path(self.given) if self.given else own

    @property
    def python(self) -> Path:
        """An interpreter with torch and transformers."""
        return self.program if self.engine == "transformers" else self.program.parent / "python"

    @property
    def model(self) -> Path:
        return self.path / ("model" if self.size == "28m" else f"model-{self.size}")

    def adapter(self, name: str) -> Path:
        return self.path / name

    def missing(self) -> str:
        """What is not there, as one sentence; empty = all is."""
        for what, path in ((self.engine, self.program), ("a model", self.model / "config.json")):
            if not path.is_file():
                return f"{path} is not there: {what} has to be installed first, with --install"
        return ""


class Server:
    """One server; its processes are a group of their own."""

    def __init__(self, home: Home, name: str, log: Path, nice: int, lora: bool, core: int | None = None) -> None:
        """`core`: the only one that it runs on; `None` = any."""
        self.name = name
        self.port, self.events, self.replay = free_ports(3)
        self._home, self._log, self._nice, self._lora, self._core = home, log, nice, lora, core
        self._process: subprocess.Popen[bytes] | None = None
        self._spent_s = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                env={**os.environ, **_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        set_group_nice(self._process.pid, self._nice)
        if self._core is not None:
            os.sched_setaffinity(self._process.pid, {self._core})

    def _command(self) -> list[str]:
        nice = ["nice", "-n", str(self._nice - os.getpriority(os.PRIO_PROCESS, 0)), str(self._home.program)]
        return [*nice, *(self._vllm() if self._home.engine == "vllm" else self._transformers())]

    def _transformers(self) -> list[str]:
        script = Path(__file__).with_name("_real_transformers.py")
        command = [str(script), str(self._home.model), "--model", MODEL, "--port", str(self.port)]
        return [*command, "--cache-tokens", str(CACHE_TOKENS[self._home.size])]

    def _vllm(self) -> list[str]:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events}",
            "replay_endpoint": f"tcp://*:{self.replay}",
            "topic": f"kv@127.0.0.1:{self.port}@{MODEL}",
        }
        command = ["serve", str(self._home.model), "--served-model-name", MODEL]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *_FLAGS.split()]
        command += _numbers()
        command += ["--kv-events-config", json.dumps(events)]
        if self._lora:
            modules = [f"{name}={self._home.adapter(name)}" for name in ADAPTERS]
            command += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules", *modules]
        return command

    def healthy(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
        return False

    def wait(self, seconds: float = READY_S) -> None:
        """Until it is healthy. Raises SystemExit with its last words when it ends or takes too long."""
        deadline = time.monotonic() + seconds
        while not self.healthy():
            if not self.running() or time.monotonic() > deadline:
                words = self._log.read_text(errors="replace")[-3000:]
                raise SystemExit(f"server {self.name} did not become healthy; the end of {self._log}:\n{words}")
            time.sleep(0.25)

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def post(self, path: str, body: dict[str, object] | None = None, seconds: float = 60.0) -> int:
        """Returns the status. Raises OSError."""
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                answer.read()
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def signal(self, number: signal.Signals, core: bool = False) -> None:
        """To all of its processes, or only to its engine core: then its pages still answer."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if core:
                for pid in _engine_cores(self._process.pid):
                    os.kill(pid, number)
            else:
                os.killpg(self._process.pid, number)

    def cpu_s(self) -> float:
        """CPU seconds that its processes have used, those that were killed too."""
        return self._spent_s + (family_cpu_s(self._process.pid) if self._process else 0.0)

    def kill(self) -> None:
        """At once, as a node that is gone."""
        self._spent_s = self.cpu_s()
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
            self._process = None

    def end(self) -> None:
        """Harmless when repeated."""
        if self._process is None:
            return
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self.signal(signal.SIGKILL)
        self._process.wait()


class Pool:
    """Servers that are equal, and end together."""

    def __init__(
        self, home: Home, folder: Path, count: int = 2, nice: int = 5, lora: bool = False, pinned: bool = False
    ) -> None:
        """`pinned`: each has a core of its own while there are enough, so that none is slower while another works."""
        folder.mkdir(parents=True, exist_ok=True)
        self.lora = lora
        cores = sorted(os.sched_getaffinity(0))
        self.servers = [
            Server(home, f"e{i}", folder / f"server-e{i}.log", nice, lora, cores[i % len(cores)] if pinned else None)
            for i in range(count)
        ]

    def __enter__(self) -> "Pool":
        try:
            for server in self.servers:
                server.start()
            for server in self.servers:
                server.wait()
            self.warm()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.signal(signal.SIGCONT)
            server.signal(signal.SIGTERM)
        for server in self.servers:
            server.end()

    def warm(self) -> None:
        """A few requests to each, so that no measured one is an engine's first."""
        for server in self.servers:
            for tokens, model in product((50, 700, 1500), (MODEL, *ADAPTERS) if self.lora else (MODEL,)):
                body = {"model": model, "prompt": [7] * tokens, "max_tokens": 16, "ignore_eos": True}
                if server.post("/v1/completions", body) != 200:
                    raise SystemExit(f"server {server.name} does not answer a request")

    def forget(self) -> None:
        """Empty the prefix caches. Raises SystemExit when a server refuses."""
        for server in self.servers:
            if server.post("/reset_prefix_cache") != 200:
                raise SystemExit(f"server {server.name} does not reset its prefix cache")


def set_group_nice(pid: int, nice: int) -> None:
    """Of its session: where Linux groups by session (`sched_autogroup_enabled`), a process's own nice value counts
    only among those of its group. Nothing happens where that is not so, or not allowed."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))


def family_cpu_s(pid: int) -> float:
    """CPU seconds of a process and all below it."""
    spent = 0.0
    for one in _family(pid):
        with contextlib.suppress(OSError):
            spent += cpu_s(one)
    return spent


def _engine_cores(pid: int) -> list[int]:
    return [child for child in _family(pid) if b"EngineCore" in _read(child, "cmdline")]


def _family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            found += children(one)
    return found


def _read(pid: int, name: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""
