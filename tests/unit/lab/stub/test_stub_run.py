"""`fairlead stub` as a process: it says where it is, writes the endpoints, answers, and ends on a signal."""

import asyncio
import json
import os
import signal
import socket
import sys

import pytest
import yaml

from fairlead.cli.main import main


async def _start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "fairlead", "stub"),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_replicas_serve_until_a_signal(http, tmp_path, number):
    file = tmp_path / "endpoints.yaml"
    process = await _start("--port", "0", "--replicas", "2", "--model", "tiny", "--out", str(file))
    assert process.stdout is not None
    lines = [(await asyncio.wait_for(process.stdout.readline(), 30)).decode() for _ in range(3)]
    assert lines[0].startswith("tiny (qwen3-32b-h100): KV cache 270,000 tokens")
    endpoints = yaml.safe_load(file.read_text())["endpoints"]
    assert [entry["name"] for entry in endpoints] == ["stub-0", "stub-1"]
    for entry, line in zip(endpoints, lines[1:], strict=True):
        address = f"{entry['address']}:{entry['port']}"
        assert line == f"{entry['name']}  http://{address}\n"
        assert entry["labels"]["model"] == "tiny"
        assert (await http.get(address, "/health"))[0] == 200
    _, writer = await http.open(address, "/v1/completions", {"prompt": "x", "max_tokens": 9000, "stream": True})
    process.send_signal(number)
    output, errors = await asyncio.wait_for(process.communicate(), 30)
    assert (process.returncode, output, errors) == (0, b"", b"")
    writer.close()


async def test_a_taken_port_is_a_clear_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = await _start("--port", str(port))
        _, errors = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in errors.decode()
    assert "Choose another --port" in errors.decode()
    assert "Traceback" not in errors.decode()


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--engine", "list"], 0, "llama-8b-l40s"),
        (["--help"], 0, "fairlead stub --replicas 8 --out endpoints.yaml"),
        (["--engine", "abacus"], 2, "unknown preset 'abacus'"),
        (["--time-ratio", "0"], 2, "time_ratio must be above 0"),
        (["--time-ratio", "inf"], 2, "time_ratio must be above 0"),
        (["--time-ratio", "nan"], 2, "time_ratio must be above 0"),
        (["--port", "-4"], 2, "greater than or equal to 0"),
        (["--port", "65536"], 2, "less than or equal to 65535"),
        (["--kv-tokens", "5"], 2, "does not fit into a KV cache of 5"),
        (["--port", "65535", "--replicas", "2"], 1, "need ports above 65535"),
        (["--kv-encoding", "morse", "--kv-events"], 2, "encoding': 'morse' is not one of 'map', 'array'"),
        (["--kv-events-port", "0"], 2, "need --kv-events too"),
        (["--kv-encoding", "array"], 2, "need --kv-events too"),
        (["--port", "0", "--kv-events", "--kv-events-port", "65534", "--replicas", "2"], 1, "need ports above 65535"),
        (
            ["--port", "0", "--kv-events", "--kv-events-connect", "hub"],
            1,
            "--kv-events-connect is an address as tcp://",
        ),
        (["--port", "0", "--kv-events", "--host", "::1"], 1, "must be an IPv4 address"),
        (["--port", "0", "--out", "/nonexistent/x.yaml"], 1, "cannot write /nonexistent/x.yaml"),
    ],
)
def test_options_explain_themselves(arguments, status, says, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    with pytest.raises(SystemExit) as ended:
        main(["stub", *arguments])
    text = "".join(capsys.readouterr())
    assert (ended.value.code or 0) == status
    assert says in text
    assert "Traceback" not in text


async def test_replicas_say_where_their_events_are(http):
    process = await _start(
        *("--port", "0", "--replicas", "2", "--model", "tiny", "--kv-events", "--kv-events-port", "0"),
        *("--kv-encoding", "v0.16", "--kv-encoding", "bytes", "--kv-buffer-steps", "7"),
    )
    assert process.stdout is not None
    lines = [(await asyncio.wait_for(process.stdout.readline(), 30)).decode() for _ in range(3)]
    for line in lines[1:]:
        _, url, *where = line.split()
        (source,) = json.loads((await http.get(url.removeprefix("http://"), "/kv_event_sources"))[1]).values()
        assert where == ["events", source["endpoint"], "replay", source["replay_endpoint"]]
        assert source["buffer_steps"] == 7
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.communicate(), 30) == (b"", b"")
    assert process.returncode == 0


async def test_a_taken_port_of_events_is_a_clear_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = await _start("--port", "0", "--kv-events", "--kv-events-port", str(port))
        _, errors = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1
    assert f"Address already in use (addr='tcp://127.0.0.1:{port}')" in errors.decode()
    assert "Choose another --kv-events-port" in errors.decode()
    assert "Traceback" not in errors.decode()
