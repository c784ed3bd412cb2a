"""The HTTP/2 server over TLS, with certificates that change."""

import asyncio
import contextlib
import os
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from echo_server import PATH, Serve, until

from fairlead.core.errors import ConfigError
from fairlead.gateway.tls import ServerTls


async def echo(channel: grpc.aio.Channel, *messages: bytes) -> list[bytes]:
    async def requests() -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    return [answer async for answer in channel.stream_stream(PATH)(requests())]


def certificate(directory: Path, name: str, days: int = 2) -> bytes:
    """A self-signed pair in `tls.crt` and `tls.key`; gives the certificate."""
    new = directory / f".{name}"
    new.mkdir()
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", new / "tls.key", "-out", new / "tls.crt", "-days", str(days), "-subj", f"/CN={name}",
         "-addext", f"subjectAltName=DNS:{name}"],
        check=True, capture_output=True,
    )  # fmt: skip
    for file in ("tls.key", "tls.crt"):
        os.replace(new / file, directory / file)
    return (directory / "tls.crt").read_bytes()


async def secure_echo(target: str, root: bytes, name: str) -> list[bytes]:
    credentials = grpc.ssl_channel_credentials(root)
    options = [("grpc.ssl_target_name_override", name)]
    async with grpc.aio.secure_channel(target, credentials, options=options) as channel:
        return await asyncio.wait_for(echo(channel, b"hello", os.urandom(0) + b"x" * 200_000), 10)


async def test_tls_with_reload(serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = certificate(tmp_path, "one.test")
    tls = ServerTls.from_directory(tmp_path)
    server, target = await serve(tls=tls)
    expected = [b"hello", b"x" * 200_000]
    assert await secure_echo(target, first, "one.test") == expected
    second = certificate(tmp_path, "two.test")
    assert tls.reload()
    assert not tls.reload()
    assert await secure_echo(target, second, "two.test") == expected
    (tmp_path / "tls.crt").write_bytes(second[:100])
    assert not tls.reload()
    assert not tls.reload()
    assert [record.levelname for record in caplog.records if "cannot load" in record.message] == ["WARNING"]
    assert await secure_echo(target, second, "two.test") == expected
    (tmp_path / "tls.crt").write_bytes(first)  # does not belong to the key
    assert not tls.reload()
    (tmp_path / "tls.key").unlink()
    assert not tls.reload()
    assert await secure_echo(target, second, "two.test") == expected
    assert tls.reloads == 1
    assert server.streams == 4


def test_tls_files_that_cannot_be_used_any_more_are_a_trouble_until_they_can(tmp_path: Path) -> None:
    first = certificate(tmp_path, "one.test")
    tls = ServerTls(tmp_path / "tls.crt", tmp_path / "tls.key", check_interval=1.0)
    assert tls.trouble(0.0) == ""
    (tmp_path / "tls.crt").write_bytes(first[:100])
    assert tls.trouble(0.5) == "", "not looked at yet"
    assert "cannot be used" in tls.trouble(2.0) and "stays in use" in tls.trouble(2.0)
    certificate(tmp_path, "two.test")
    assert tls.trouble(4.0) == ""
    (tmp_path / "tls.key").unlink()
    assert tls.trouble(6.0) == "", "just being replaced"
    assert "tls.key: No such file" in tls.trouble(8.0)
    certificate(tmp_path, "three.test")
    assert tls.trouble(10.0) == "" and tls.reloads == 2


def test_tls_files_that_failed_once_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after chmod, which changes neither content nor modification time."""
    certificate(tmp_path, "one.test")
    tls = ServerTls.from_directory(tmp_path)
    for name in ("tls.crt", "tls.key"):  # keep the pair for later
        os.link(tmp_path / name, tmp_path / f"first.{name}")
    second = certificate(tmp_path, "two.test")
    with monkeypatch.context() as unreadable:
        unreadable.setattr(Path, "read_bytes", lambda path: os.read(-1, 1))
        assert not tls.reload() and "cannot be used" in tls.trouble(1.0)
    assert tls.reload() and tls.trouble(9.0) == "" and tls.pem[1] == second
    (tmp_path / "tls.key").write_bytes(b"")
    assert "cannot be used" in tls.trouble(20.0)
    for name in ("tls.crt", "tls.key"):
        os.replace(tmp_path / f"first.{name}", tmp_path / name)
    assert tls.trouble(30.0) == "" and tls.reloads == 2


def test_a_certificate_that_expires_is_reported_before_and_after(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate(tmp_path, "one.test", days=100)
    now, day = time.time(), 86400.0  # not before the certificate, which may take a second to be made
    tls = ServerTls(tmp_path / "tls.crt", tmp_path / "tls.key", check_interval=0.0, today=lambda: now)
    assert tls.trouble(1.0) == ""
    now += 94 * day
    assert tls.trouble(2.0) == "", "renewal may still come"
    now += 2 * day
    assert "expires on 20" in tls.trouble(3.0)
    now += 5 * day
    assert "expired on 20" in tls.trouble(4.0) and "clients that check it refuse it" in tls.trouble(5.0)
    assert [" expires " in record.message for record in caplog.records] == [True, False], "one line each"
    certificate(tmp_path, "two.test", days=200)
    assert tls.trouble(6.0) == "" and tls.reloads == 1
    now -= 200 * day
    assert "is not valid before" in tls.trouble(7.0)


def test_an_expired_certificate_replaces_none_that_is_valid(tmp_path: Path) -> None:
    first = certificate(tmp_path, "one.test", days=100)
    now, day = time.time(), 86400.0
    tls = ServerTls(tmp_path / "tls.crt", tmp_path / "tls.key", check_interval=0.0, today=lambda: now)
    second = certificate(tmp_path, "two.test", days=2)
    now += 3 * day
    assert "the new certificate expired on" in tls.trouble(1.0) and "stays in use" in tls.trouble(1.0)
    assert (tls.reloads, tls.pem[1]) == (0, first)
    now += 100 * day
    assert tls.reload() and tls.pem[1] == second, "both have expired"
    again = ServerTls(tmp_path / "tls.crt", tmp_path / "tls.key", today=lambda: now)
    assert "expired on" in again.expiry(), "it starts all the same"


async def test_tls_reload_needs_no_owner(serve: Serve, tmp_path: Path) -> None:
    certificate(tmp_path, "one.test")
    tls = ServerTls(tmp_path / "tls.crt", tmp_path / "tls.key", check_interval=0.1)
    _, target = await serve(tls=tls)
    second = certificate(tmp_path, "two.test")
    await until(lambda: tls.reloads == 1)
    assert await secure_echo(target, second, "two.test")


async def test_tls_peers_must_speak_h2(serve: Serve, tmp_path: Path) -> None:
    certificate(tmp_path, "one.test")
    server, target = await serve(tls=ServerTls.from_directory(tmp_path))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection("127.0.0.1", int(target.rpartition(":")[2]), ssl=context)
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()
    await until(lambda: not server.connections)


def test_tls_files_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tls\.crt"):
        ServerTls.from_directory(tmp_path)
    certificate(tmp_path, "one.test")
    key = tmp_path / "tls.key"
    subprocess.run(
        ["openssl", "ec", "-in", key, "-aes128", "-passout", "pass:x", "-out", key], check=True, capture_output=True
    )
    with pytest.raises(ConfigError):
        ServerTls.from_directory(tmp_path)
