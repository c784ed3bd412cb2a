"""`fairlead bench` as a user calls it, against stub model servers and against servers that misbehave."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fairlead.cli.app import build_app
from fairlead.core.errors import ConfigError
from fairlead.lab.workload.generate import Pace, generate
from fairlead.lab.workload.record import Workload


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(build_app(), ["bench", *map(str, arguments)])


@pytest.fixture(scope="module")
def stub() -> Iterator[str]:
    """A stub model server, a hundred times as fast as the real one."""
    command = [sys.executable, "-m", "fairlead", "stub", "--port", "0", "--time-ratio", "100"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield next(line.split()[1] for line in process.stdout if "http://" in line)
        finally:
            process.terminate()


def write_trace(path: Path) -> Workload:
    from fairlead.lab.workload.formats import write_native

    parameters = {"groups": "4", "prompts": "2", "system_tokens": "640", "question_tokens": "160", "output_tokens": "9"}
    made = generate("shared-prefix", Pace(rate=20, count=40, seed=7), parameters)
    path.write_bytes(write_native(made))
    return made


def test_a_trace_is_replayed_and_its_prefixes_are_found(stub: str, tmp_path: Path) -> None:
    from fairlead.lab.workload.describe import ideal_hit

    made = write_trace(tmp_path / "t.jsonl")
    done = bench(stub, "-w", tmp_path / "t.jsonl", "--speedup", 2, "--out", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert summary == json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (tmp_path / "out" / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert (summary["requests"], summary["failed"]) == (40, 0)
    assert summary["output_tokens"] == 40 * 9
    # The template of the chat adds a little to each prompt, and requests that overlap miss what one cache would hit.
    assert summary["prompt_tokens"] == pytest.approx(40 * 800, rel=0.05)
    assert summary["prefix_hit_rate"] == pytest.approx(ideal_hit(made), abs=0.15)
    last = made.records[-1].arrival_us - made.records[0].arrival_us
    assert summary["duration_s"] >= last * 1e-6 / 2
    assert summary["config"]["command"]["speedup"] == 2


def test_results_are_written_even_if_nobody_reads_the_output(stub: str, tmp_path: Path) -> None:
    shell = f"{sys.executable} -m fairlead bench {stub} -n 5 --rate 100 --json --out {tmp_path} | true"
    subprocess.run(["bash", "-c", shell], check=True, timeout=120)
    assert json.loads((tmp_path / "summary.json").read_text())["requests"] == 5


def test_a_table_for_people(stub: str) -> None:
    done = bench(stub, "-w", "chat", "--closed", 4, "-n", 20, "--output-tokens", 5, "--slo-ttft-ms", 60000)
    assert done.exit_code == 0, done.output
    for words in ("TTFT p99, ms", "TPOT p50, ms", "E2E p99, ms", "output tokens/s", "send lag p99", "closed loop of 4"):
        assert words in done.stdout
    assert "goodput (TTFT 60000 ms, TPOT 50 ms)" in done.stdout


def test_failures_set_the_exit_code_and_are_explained(stub: str) -> None:
    done = bench(stub, "-w", "chat", "--rate", 200, "-n", 5, "--model", "nobody-has-it", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["failed_by_reason"] == {"status_404": 5}
    assert "--model" in done.stderr


class Handler(BaseHTTPRequestHandler):
    """Remembers what it gets; has no list of models."""

    protocol_version = "HTTP/1.1"
    heard: list[tuple[dict[str, str], dict[str, Any]]]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.reply(404, b"no such page")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.heard.append(({key.lower(): value for key, value in self.headers.items()}, json.loads(body)))
        self.reply(200, b'{"usage":{"prompt_tokens":8,"completion_tokens":2}}')

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def listening() -> Iterator[tuple[str, list[tuple[dict[str, str], dict[str, Any]]]]]:
    heard: list[tuple[dict[str, str], dict[str, Any]]] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), type("H", (Handler,), {"heard": heard})) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", heard
        finally:
            server.shutdown()
            thread.join()


def test_headers_and_fields_are_sent_but_not_written_down(tmp_path: Path) -> None:
    options = ("--rate", 200, "-n", 4, "--model", "m", "-H", "authorization=Bearer a=b", "--set", "stream=false")
    with listening() as (target, heard):
        done = bench(target, *options, "--set", "system_tokens=5", "--extra", '{"top_k": 3}', "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert len(heard) == 4
    for headers, body in heard:
        assert headers["authorization"] == "Bearer a=b"
        assert (body["top_k"], body["model"]) == (3, "m")
    text = (tmp_path / "summary.json").read_text()
    assert "Bearer" not in text
    assert json.loads(text)["prefix_hit_rate"] is None


def test_who_names_no_model_is_asked_for_one() -> None:
    with listening() as (target, heard):
        done = bench(target, "-n", 1)
    assert isinstance(done.exception, ConfigError)
    assert "--model" in str(done.exception)
    assert heard == []


def test_nobody_answers() -> None:
    with listening() as (target, _):
        pass
    command = [sys.executable, "-m", "fairlead", "bench", target]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "does not answer" in ended.stderr and "check that the server runs" in ended.stderr
    assert "Traceback" not in ended.stderr
