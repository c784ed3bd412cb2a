"""`fairlead indexer`: its flags, and one run from start to end."""

import asyncio
import resource
import signal
import sys
from pathlib import Path

import aiohttp
import pytest
import zmq

from fairlead.cli.main import main
from fairlead.compat.load import load
from fairlead.server.live import indexer as live_indexer
from fairlead.server.live.indexer import alone

FILE = "endpoints: ['127.0.0.1:1']\nlog: {format: json}\n"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9090", ("127.0.0.1", 9090)),
        (":0", ("::", 0)),
        ("[::1]:80", ("::1", 80)),
        ("localhost", None),
        ("h:x", None),
        ("h:65536", None),
        ("h:", None),
    ],
)
def test_addresses(
    text: str,
    address: tuple[str, int] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[tuple[str, int]] = []

    class Noting:
        """An indexer that notes where it was to listen."""

        def __init__(self, config: object, host: str, port: int, accept_snapshots: bool) -> None:
            asked.append((host, port))

        async def run(self) -> None:
            pass

    monkeypatch.setattr(live_indexer, "LiveIndexer", Noting)
    file = tmp_path / "f.yaml"
    file.write_text(FILE)
    with pytest.raises(SystemExit) as ended:
        main(["indexer", str(file), "--listen", text])
    assert (ended.value.code, asked) == ((0, [address]) if address else (2, []))
    assert ("HOST:PORT" in capsys.readouterr().err) == (address is None)


def test_a_schedulers_configuration_serves_an_indexer_too() -> None:
    config = load(
        "kubernetes: {pool: p, leaderElection: {enabled: true}}\n"
        "kvEvents: {enabled: true, indexer: {url: 'http://i:9090'}}",
        need_endpoints=False,
    )
    found = alone(config)
    assert (found.kv_events.enabled, found.kv_events.indexer.url) == (True, "")
    assert found.kubernetes.pool == "p"
    assert not (found.kubernetes.leader_election.enabled or found.kubernetes.models or found.kubernetes.status)


def test_an_address_to_connect_to_needs_the_keys_of_publishers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "f.yaml"
    public, secret = zmq.curve_keypair()
    (tmp_path / "public").write_bytes(public)
    (tmp_path / "secret").write_bytes(secret)
    curve = f"{{publicKeyFile: public, secretKeyFile: secret, serverKey: '{public.decode()}'}}"
    file.write_text(FILE + f"kvEvents: {{curve: {curve}}}\n")
    with pytest.raises(SystemExit) as ended:
        main(["indexer", str(file), "--listen", "127.0.0.1:0", "--bind", "tcp://127.0.0.1:*"])
    assert ended.value.code == 2
    assert "$.kvEvents.curve.clientsFile" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_taken_port_and_an_open_one_are_said(host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(FILE)
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(SystemExit) as ended:
            main(["indexer", str(file), "--listen", f"{host}:{port}"])
    assert ended.value.code == 1, "the configuration may be right"
    said = "".join(capsys.readouterr())
    assert f"cannot listen on {host}:{port}" in said
    assert ("anyone who reaches this address" in said) == (host != "127.0.0.1")


async def test_it_runs_until_it_is_told_to_end(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(FILE)
    kept = tmp_path / "index.kv"
    child = await asyncio.create_subprocess_exec(
        "sh", "-c", 'ulimit -S -n 512 && exec "$@"', "sh", sys.executable,
        "-m", "fairlead", "indexer", str(file), "--listen", "127.0.0.1:0", "--bind", "tcp://127.0.0.1:*",
        "--snapshot", str(kept), "--warm-from", "http://127.0.0.1:1",
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert child.stderr is not None
    said = b""
    async with asyncio.timeout(30):
        while b'"url":"' not in said and b'"url": "' not in said:
            line = await child.stderr.readline()
            assert line, said.decode()
            said += line
        url = said.replace(b'": "', b'":"').split(b'"url":"')[1].split(b'"')[0].decode()
        async with aiohttp.ClientSession() as session, session.get(f"{url}readyz") as answer:
            assert answer.status == 200
        files, allowed = resource.prlimit(child.pid, resource.RLIMIT_NOFILE)
        assert files > 512 or files == allowed
        child.send_signal(signal.SIGTERM)
        said += await child.stderr.read()
        assert await child.wait() == 0, said.decode()
    assert b"no warm start from another indexer" in said
    assert b"accepting connections from publishers of KV events" in said
    assert kept.read_bytes().startswith(b"fairlead-kv")
