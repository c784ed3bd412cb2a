"""`fairlead init && fairlead doctor && fairlead serve`, in a terminal and without one."""

import os
import pty
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import FAIRLEAD, answers, ask, run, running, stub, until
from ports import free_ports

from fairlead.compat.load import load


@pytest.fixture
def stubs(tmp_path: Path) -> Iterator[list[str]]:
    """Addresses of three servers that publish KV events."""
    with stub(tmp_path, "stubs", "--replicas", "3", "--kv-events", "--kv-events-port", "0") as addresses:
        yield addresses


def in_a_terminal(folder: Path, told: dict[str, str], *arguments: str) -> str:
    """What it shows in a terminal of 80 columns, where each question is answered."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.environ.update(COLUMNS="80", NO_COLOR="1")
        os.execv(sys.executable, [*FAIRLEAD, *arguments])
    shown, open_questions = "", dict(told)
    try:
        while part := os.read(terminal, 65536):
            shown += part.decode()
            for question in [one for one in open_questions if one in shown]:
                os.write(terminal, open_questions.pop(question).encode() + b"\n")
    except OSError:  # Linux says so when the other end is closed.
        pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, shown
    assert not open_questions
    return shown


def test_from_nothing_to_an_answer(stubs: list[str], tmp_path: Path) -> None:
    told = {"Model servers, ": ", ".join(stubs), "only prefill ": "", "Use KV events": "y"}
    shown = in_a_terminal(tmp_path, told, "init")
    for address in stubs:
        (said,) = re.findall(rf"found {address}: (.*)", shown.replace("\r", ""))
        assert "vllm 0.32.0" in said and "Qwen/Qwen3-32B" in said
        assert "KV events at tcp://" in said
    assert "next: fairlead doctor && fairlead serve" in shown
    assert "#" in (tmp_path / "fairlead.yaml").read_text()
    examined = run(tmp_path, "doctor")
    assert (examined.returncode, "nothing found" in examined.stdout) == (0, True), examined.stdout + examined.stderr
    gateway, admin, ext_proc = free_ports(3)
    ports = ("--port", str(gateway), "--admin-port", str(admin), "--grpc-port", str(ext_proc))
    with running(tmp_path, "serve", *ports):
        until(lambda: answers(f"http://127.0.0.1:{admin}/readyz"), tmp_path)
        assert ask(gateway)
        assert "→" in run(tmp_path, "explain", "1", "--admin", f"http://127.0.0.1:{admin}").stdout


def test_flags_alone_are_enough(stubs: list[str], tmp_path: Path) -> None:
    done = run(tmp_path, "init", *stubs[:2], "--kv-events", "--port", "8123", "--admin-port", "9123")
    assert done.returncode == 0, done.stderr
    made = load(tmp_path / "fairlead.yaml")
    assert (made.gateway.port, made.admin.port, made.kv_events.enabled) == (8123, 9123, True)
    assert [entry.endpoint.address for entry in made.endpoints.static] == stubs[:2]
    before = (tmp_path / "fairlead.yaml").read_text()
    again = run(tmp_path, "init", stubs[0])
    assert again.returncode == 2 and "--force" in again.stderr
    assert (tmp_path / "fairlead.yaml").read_text() == before
    assert run(tmp_path, "init", stubs[0], "--prefill", stubs[1], "--force").returncode == 0
    made = load(tmp_path / "fairlead.yaml")
    assert made.policy.name == "prefill-decode"
    assert [entry.endpoint.labels["llm-d.ai/role"] for entry in made.endpoints.static] == ["decode", "prefill"]
    assert run(tmp_path, "doctor").returncode == 0


def test_servers_without_kv_events_are_named(stubs: list[str], tmp_path: Path) -> None:
    with stub(tmp_path, "plain") as [plain]:
        done = run(tmp_path, "init", stubs[0], plain)
        assert (done.returncode, f"note: no KV events at {plain};" in done.stdout) == (0, True)
        done = run(tmp_path, "init", plain, "--kv-events", "--out", "other.yaml")
        assert (done.returncode, (tmp_path / "other.yaml").exists()) == (2, False)
        assert "docs/kv-events.md" in done.stderr
        assert run(tmp_path, "init", plain, "--force").returncode == 0
    assert not load(tmp_path / "fairlead.yaml").kv_events.enabled


def test_unlike_servers_are_named(stubs: list[str], tmp_path: Path) -> None:
    with stub(tmp_path, "short", "--max-model-len", "512") as [short], stub(tmp_path, "other", "--model", "m") as [m]:
        done = run(tmp_path, "init", stubs[0], short, m)
    assert done.returncode == 0, done.stderr
    assert "do not serve the same models" in done.stdout
    assert re.search(r"max_model_len differs \(512, \d+", done.stdout)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("127.0.0.1:1",), 1, "127.0.0.1:1: does not answer (Connection refused)"),
        (("no-such-host.invalid:8000",), 1, "no-such-host.invalid"),
        ((), 2, "name the model servers"),
        (("127.0.0.1:1", "--no-probe", "--pool", "llama"), 2, "--pool"),
        (("127.0.0.1:1", "127.0.0.1"), 2, "error: 127.0.0.1: `port` is missing"),
        (("foo", "10.0.0.1:8000", "bar:99999"), 2, "8000)\nerror: bar:99999: '99999' is not a port"),
        (("https://10.0.0.1:8000/v1",), 2, "error: https://10.0.0.1:8000/v1: 'https://10.0.0.1:8000/v1' is a URL"),
        (("http://me:geheim@10.0.0.1:8000/v1",), 2, "'http://me:***@10.0.0.1:8000/v1' is a URL"),
        (("10.0.0.1:8000", "--prefill", "10.0.0.2:80/x"), 2, "error: 10.0.0.2:80/x: '80/x' is not a port"),
        (("10.0.0.1:8000", "--prefill", "10.0.0.1:8000"), 2, "error: 10.0.0.1:8000: 10.0.0.1:8000 is listed twice"),
        (('1"], x: [', "--no-probe"), 2, "error: "),
    ],
)
def test_what_cannot_be_writes_nothing(arguments: tuple[str, ...], code: int, said: str, tmp_path: Path) -> None:
    done = run(tmp_path, "init", *arguments)
    assert done.returncode == code and said in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert [*tmp_path.iterdir()] == []


def test_base_urls_of_clients_are_addresses(tmp_path: Path) -> None:
    urls = ("http://10.0.0.1:8000/v1", "http://10.0.0.2:8000/v1/,10.0.0.3:8000/v1", "HTTP://[::1]:8000/", "vllm:8000")
    done = run(tmp_path, "init", "--no-probe", *urls)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "fairlead.yaml").read_text(encoding="utf-8")
    addresses = ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000", "[::1]:8000", "vllm:8000"]
    assert re.findall('^  - "(.*)"$', text, re.MULTILINE) == addresses


def test_kubernetes_needs_no_server(tmp_path: Path) -> None:
    assert run(tmp_path, "init", "--pool", "llama", "--namespace", "serving").returncode == 0
    made = load(tmp_path / "fairlead.yaml")
    assert (made.kubernetes.pool, made.kubernetes.namespace) == ("llama", "serving")
    done = run(tmp_path, "validate")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("command", ["serve", "doctor", "validate"])
def test_without_a_file_the_way_to_one_is_named(command: str, tmp_path: Path) -> None:
    done = run(tmp_path, command)
    assert done.returncode == 2 and "`fairlead init`" in done.stderr
