"""Who may ask the admin port."""

import asyncio
import base64
import os
import resource
import socket
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from fairlead.cli.options import opened, with_token
from fairlead.core.errors import ConfigError
from fairlead.gateway import tls
from fairlead.gateway.tls import MOST_SILENT, ServerTls
from fairlead.server.admin import Admin, AdminSources, admin_access
from fairlead.server.http_port import Access

SOURCES = AdminSources(
    metrics=lambda: [b"a 1\n"], unready=list, endpoints=list, decisions=lambda count: [{"request_id": 1}]
)


async def ask(port: int, path: str, **headers: str) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}{path}", headers=headers) as response,
    ):
        return response.status


async def started(**options: Any) -> Admin:
    admin = Admin(SOURCES, port=0, **options)
    await admin.start()
    return admin


@pytest.mark.parametrize(
    ("accept", "scheme"), [("text/html,*/*;q=0.8", "Basic"), ("*/*", "Basic"), ("text/event-stream", "Bearer")]
)
async def test_browsers_ask_the_user_for_a_page_not_for_its_scripts(accept: str, scheme: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("first\n")
    admin = await started(access=admin_access([], str(file)))
    url = f"http://127.0.0.1:{admin.port}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url, headers={"Accept": accept}) as response:
        assert (response.status, response.headers["WWW-Authenticate"].split()[0]) == (401, scheme)
    await admin.close()


@pytest.mark.parametrize(
    ("host", "ours"),
    [
        ("127.0.0.1:9090", True),
        ("10.2.3.4:9090", True),
        ("[fd00::1]:9090", True),
        ("[::1]", True),
        ("localhost:9090", True),
        ("LOCALHOST.:9090", True),
        ("fairlead.localhost", True),
        (socket.gethostname(), True),
        ("metrics.example.com", True),
        ("a.inside.example.com:1", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("inside.example.com.evil", False),
        ("", False),
        ("[::1", False),
        ("a@localhost.evil", False),
        ("evil.example@localhost", False),
        ("localhost/evil.example", False),
        ("localhost#evil.example", False),
    ],
)
def test_names_that_are_ours(host: str, ours: bool) -> None:
    assert Access(["metrics.example.com", ".inside.example.com"]).ours(host) is ours


async def test_a_foreign_name_reads_nothing() -> None:
    admin = await started()
    for path in ("/debug/decisions", "/metrics", "/", "/debug/endpoints", "/nothing"):
        assert await ask(admin.port, path, Host="evil.example") == 403
    assert await ask(admin.port, "/healthz", Host="evil.example") == 200
    assert await ask(admin.port, "/metrics", Host="10.1.2.3:9090") == 200, "as Prometheus scrapes a pod"
    await admin.close()


async def test_a_page_of_another_origin_reads_nothing() -> None:
    admin = await started()
    here = f"127.0.0.1:{admin.port}"
    assert await ask(admin.port, "/debug/decisions", Origin="https://evil.example") == 403
    assert await ask(admin.port, "/debug/decisions", Origin="null") == 403
    assert await ask(admin.port, "/debug/decisions", Origin=f"http://{here}") == 200
    await admin.close()


async def test_a_token(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("first\n")
    access = admin_access([], str(file))
    admin = await started(access=access)
    basic = "Basic " + base64.b64encode(b"anybody:first").decode()
    assert await ask(admin.port, "/metrics") == 401
    assert await ask(admin.port, "/debug/decisions", Authorization="Bearer wrong") == 401
    assert await ask(admin.port, "/debug/decisions", Authorization="Bearer first") == 200
    assert await ask(admin.port, "/debug/decisions", Authorization=basic) == 200
    assert await ask(admin.port, "/debug/decisions", Authorization="Basic !") == 401
    assert await ask(admin.port, "/readyz") == 200
    new = tmp_path / "new"
    new.write_text("second\nthird\n")
    os.replace(new, file)
    statuses = [await ask(admin.port, "/metrics", Authorization=f"Bearer {t}") for t in ("first", "second", "third")]
    assert statuses == [401, 200, 200]
    assert access.problem() == ""
    file.unlink()
    assert await ask(admin.port, "/metrics", Authorization="Bearer third") == 200
    assert access.problem() == f"cannot read {file}: No such file or directory; the admin tokens read before stay valid"
    file.write_text("\n")  # all are revoked
    assert [await ask(admin.port, "/metrics", Authorization=f"Bearer {t}") for t in ("", "third")] == [401, 401]
    assert access.problem() == f"{file} holds no token: nobody gets in until it has one per line"
    await admin.close()


async def test_comments_in_the_file_are_no_tokens(tmp_path: Path) -> None:
    """As in the other files of keys; nor does the mark at the start of a file from Windows belong to the first one."""
    file = tmp_path / "tokens"
    file.write_bytes(b"\xef\xbb\xbffirst\r\n# prometheus\r\n  #old\r\nsecond\r\n")
    admin = await started(access=admin_access([], str(file)))
    given = ("first", "# prometheus", "#old")
    statuses = [await ask(admin.port, "/metrics", Authorization=f"Bearer {token}") for token in given]
    assert statuses == [200, 401, 401]
    await admin.close()


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (b"authorization: Bearer \xff\xfe", 401),
        (b"authorization: Basic \xff\xfe", 401),
        (b"authorization: Bearer wrong\r\nauthorization: Bearer first", 401),
        (b"authorization: Bearer first\r\norigin: http://[::1", 403),
        (b"authorization: Bearer first\r\norigin: http://a\xe2\x84\x80b", 403),
    ],
)
async def test_odd_headers_are_refused_without_an_error(lines: bytes, status: int, tmp_path: Path) -> None:
    """They were answered 500, each with a traceback in the log."""
    file = tmp_path / "tokens"
    file.write_text("first\n")
    admin = await started(access=admin_access([], str(file)))
    reader, writer = await asyncio.open_connection("127.0.0.1", admin.port)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n%b\r\n\r\n" % lines)
    assert int((await reader.read())[9:12]) == status
    writer.close()
    await admin.close()


@pytest.mark.parametrize("text", [None, "", " \n"])
def test_a_file_without_tokens_is_said_at_the_start(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "tokens"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"tokens"):
        admin_access([], str(file))


async def test_metrics_and_probes_on_their_own_port() -> None:
    admin = await started(metrics=("127.0.0.1", 0))
    assert admin.metrics_port != admin.port
    for path in ("/metrics", "/healthz", "/readyz"):
        assert await ask(admin.metrics_port, path) == 200
    for path in ("/", "/debug/decisions", "/debug/endpoints", "/dashboard/snapshot"):
        assert await ask(admin.metrics_port, path) == 404
    assert await ask(admin.metrics_port, "/metrics", Host="evil.example") == 403
    assert await ask(admin.port, "/debug/decisions") == 200
    await admin.close()


async def test_a_metrics_port_that_is_taken_leaves_nothing_behind() -> None:
    first = await started()
    second = Admin(SOURCES, port=0, metrics=("127.0.0.1", first.port))
    with pytest.raises(OSError, match="in use"):
        await second.start()
    with pytest.raises(aiohttp.ClientConnectorError):
        await ask(second.port, "/healthz")
    await first.close()


async def test_tls(tmp_path: Path) -> None:
    await certify(tmp_path)
    admin = await started(tls=ServerTls.from_directory(tmp_path, protocol="http/1.1"))
    context = ssl.create_default_context(cafile=str(tmp_path / "tls.crt"))
    context.check_hostname = False
    async with aiohttp.ClientSession() as session:
        async with session.get(f"https://127.0.0.1:{admin.port}/metrics", ssl=context) as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"http://127.0.0.1:{admin.port}/metrics")
    await admin.close()


async def test_a_token_in_a_malformed_request_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """As from a file of tokens with carriage returns."""
    admin = await started()
    reader, writer = await asyncio.open_connection("127.0.0.1", admin.port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer s3cret\r\r\n\r\n")
    assert b" 400 " in await reader.readline()
    writer.close()
    await admin.close()
    assert "s3cret" not in caplog.text and caplog.records == []


async def test_handshakes_that_never_begin_are_limited(tmp_path: Path) -> None:
    await certify(tmp_path)
    most = min(MOST_SILENT, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 16)
    admin = await started(tls=ServerTls.from_directory(tmp_path, protocol="http/1.1"))
    silent = [await asyncio.open_connection("127.0.0.1", admin.port) for _ in range(most + 40)]
    async with aiohttp.ClientSession() as session:
        for _ in range(3):  # its own takes a moment, and many more would have to come in it
            async with session.get(f"https://127.0.0.1:{admin.port}/metrics", ssl=False) as response:
                assert response.status == 200
    async with asyncio.timeout(30):
        for reader, _ in silent[:40]:
            with suppress(ConnectionError):
                assert await reader.read() == b""
    assert not any(reader.at_eof() for reader, _ in silent[50:])
    for _, writer in silent:
        writer.close()
    await admin.close()


async def test_handshakes_that_never_end_keep_nobody_out(tmp_path: Path) -> None:
    """Clients that begin a handshake, hold it and come again when they are ended."""
    await certify(tmp_path)
    admin = await started(tls=ServerTls.from_directory(tmp_path, protocol="http/1.1"))

    async def hold() -> None:
        while True:
            with suppress(ConnectionError):
                reader, writer = await asyncio.open_connection("127.0.0.1", admin.port)
                try:
                    writer.write(b"\x16\x03\x01")
                    await reader.read()
                finally:
                    writer.close()

    async with asyncio.TaskGroup() as group:
        held = [group.create_task(hold()) for _ in range(6 * tls.MOST_HANDSHAKES)]
        await asyncio.sleep(2.5)  # behind them all it would take five seconds or more
        url, patience = f"https://127.0.0.1:{admin.port}/healthz", aiohttp.ClientTimeout(total=4)
        async with aiohttp.ClientSession(timeout=patience) as session, session.get(url, ssl=False) as response:
            assert response.status == 200
        for task in held:
            task.cancel()
    await admin.close()


async def test_many_honest_clients_at_once_are_all_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a restart, when all gateways connect anew."""
    monkeypatch.setattr(tls, "AGED_S", 60.0)  # this process does both ends of all handshakes, on a busy machine slowly
    await certify(tmp_path)
    admin = await started(tls=ServerTls.from_directory(tmp_path, protocol="http/1.1"))
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    async def ask() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", admin.port, ssl=context)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        line = await reader.readline()
        writer.close()
        return line

    assert {line.split()[1] for line in await asyncio.gather(*(ask() for _ in range(200)))} == {b"200"}
    await admin.close()


async def certify(directory: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(directory / "tls.key"), "-out", str(directory / "tls.crt"), "-subj", "/CN=localhost"]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)


async def test_a_certificate_that_is_not_required_is_used_once_it_is_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TLS files"):
        ServerTls.from_directory(tmp_path)
    optional = ServerTls.from_directory(tmp_path, protocol="http/1.1", required=False)
    admin = await started(tls=optional)
    url = f"https://127.0.0.1:{admin.port}/metrics"
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get(url, ssl=False)
        optional.trouble(1e9)
        assert "nobody can connect" in optional.trouble(2e9), "missing twice"
        await certify(tmp_path)
        assert optional.trouble(3e9) == ""
        async with session.get(url, ssl=False) as response:
            assert response.status == 200
    await admin.close()


def test_the_command_line_gives_the_token_of_an_address() -> None:
    request = with_token("http://:to%20ken@127.0.0.1:9091/debug")
    assert (request.full_url, request.get_header("Authorization")) == ("http://127.0.0.1:9091/debug", "Bearer to ken")
    assert with_token("http://127.0.0.1:9091").get_header("Authorization") is None


async def test_the_command_line_asks_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The admin port is mostly on this machine, and the proxy would get the token."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    admin = await started()
    with await asyncio.to_thread(opened, f"http://127.0.0.1:{admin.port}/metrics", 5.0) as answer:
        assert answer.status == 200
    await admin.close()
