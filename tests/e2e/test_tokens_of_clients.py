"""JSON Web Tokens at the embedded gateway, checked by its Envoy against keys made here."""

import asyncio
import base64
import json
import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gw_clients import LARGE, MINTED, ask, bearer, tenant
from gw_processes import Serve, Upstream
from tcp import TcpServer

from fairlead.gateway.envoy.authentication import new_key

ISSUER = "https://issuer.example"


def url64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


class Issuer:
    """RS256 by the openssl command."""

    def __init__(self, file: Path) -> None:
        self._file = str(file)
        self._openssl("genrsa", "-out", self._file, "2048")

    def _openssl(self, *arguments: str, given: bytes = b"") -> bytes:
        return subprocess.run(["openssl", *arguments], input=given, capture_output=True, check=True).stdout

    @property
    def jwks(self) -> str:
        modulus = self._openssl("rsa", "-in", self._file, "-noout", "-modulus").decode().strip().partition("=")[2]
        key = {"kty": "RSA", "alg": "RS256", "use": "sig", "kid": "1", "e": "AQAB", "n": url64(bytes.fromhex(modulus))}
        return json.dumps({"keys": [key]})

    def tls(self, certificate: Path) -> ssl.SSLContext:
        """Of a server that only this certificate vouches for."""
        name = "-subj", "/CN=issuer", "-addext", "subjectAltName=IP:127.0.0.1"
        self._openssl("req", "-x509", "-key", self._file, "-out", str(certificate), "-days", "2", *name)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, self._file)
        return context

    def token(self, **changes: Any) -> str:
        """For an hour; `changes` of its claims, `None` leaves one out."""
        claims = {"iss": ISSUER, "aud": "pool", "exp": int(time.time()) + 3600, "org": {"team": "team-j"}, **changes}
        claims = {name: value for name, value in claims.items() if value is not None}
        head = {"alg": "RS256", "kid": "1", "typ": "JWT"}
        signed = ".".join(url64(json.dumps(part).encode()) for part in (head, claims))
        return f"{signed}.{url64(self._openssl('dgst', '-sha256', '-sign', self._file, given=signed.encode()))}"


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    made = Issuer(tmp_path / "issuer.pem")
    (tmp_path / "jwks.json").write_text(made.jwks)
    return made


def settings(**changes: Any) -> dict[str, Any]:
    jwt = {"issuer": ISSUER, "audiences": ["pool"], "jwksFile": "jwks.json", "tenantClaim": "org.team", **changes}
    return {"paths": [], "jwt": {name: value for name, value in jwt.items() if value}}


async def test_a_claim_names_the_tenant(
    issuer: Issuer, serve: Callable[..., Serve], upstream: Upstream, tmp_path: Path
) -> None:
    at = await asyncio.to_thread(serve, {"endpoints": upstream.addresses, "gateway": settings()})
    good = issuer.token()
    for size in (5, LARGE):
        assert await tenant(at, bearer(good), *MINTED, size=size) == "team-j"
    decided = await at.decisions()
    now = int(time.time())
    head, claims, signature = good.split(".")
    unsigned = f"{url64(json.dumps({'alg': 'none'}).encode())}.{claims}."
    wrong = [
        *("", "x", unsigned, f"{head}.{claims}.{signature[:-8]}AAAAAAAA", Issuer(tmp_path / "other.pem").token()),
        issuer.token(iss="https://other.example"),
        *(issuer.token(exp=now - 3600), issuer.token(exp=None), issuer.token(nbf=now + 3600)),
    ]
    for token in wrong:
        got = await ask(at, bearer(token), *MINTED)
        assert (got.status, json.loads(got.body)["error"]["type"]) == (401, "AuthenticationError"), token
        assert got.field("www-authenticate").startswith("bearer")
    assert (await ask(at, path=f"/v1/chat/completions?access_token={good}")).status == 401, "paths stand in logs"
    for claims, said in (({"aud": "other"}, "Audiences"), ({"aud": None}, "Audiences"), ({"org": None}, "no tenant")):
        got = await ask(at, bearer(issuer.token(**claims)), *MINTED)
        error = json.loads(got.body)["error"]
        assert (got.status, error["type"]) == (403, "PermissionDeniedError") and said in error["message"]
    assert await at.decisions() == decided
    assert await tenant(at, bearer(issuer.token(org={"team": "team-j "})), *MINTED) == "team-j "
    at.end()
    assert good not in at.said()


async def test_a_token_or_a_key(
    issuer: Issuer, serve: Callable[..., Serve], upstream: Upstream, tmp_path: Path
) -> None:
    key, kept = new_key("team-k")
    (tmp_path / "keys.txt").write_text(kept.line)
    both = {**settings(), "keys": {"file": "keys.txt"}}
    at = await asyncio.to_thread(serve, {"endpoints": upstream.addresses, "gateway": both})
    token = bearer(issuer.token())
    assert [await tenant(at, one, *MINTED) for one in (token, bearer(key), ("x-api-key", key))] == [
        *("team-j", "team-k", "team-k")
    ]
    assert await tenant(at, token, ("x-api-key", key)) == "team-j"
    for wrong in ("", issuer.token(aud="other"), issuer.token(org=None)):
        assert (await ask(at, bearer(wrong), *MINTED)).status == 401


async def test_an_issuers_new_keys_hold_without_a_restart(
    issuer: Issuer, serve: Callable[..., Serve], upstream: Upstream, tmp_path: Path
) -> None:
    at = await asyncio.to_thread(serve, {"endpoints": upstream.addresses, "gateway": settings()})
    envoy, next_one = at.envoy_pid(), Issuer(tmp_path / "next.pem")
    old, new = bearer(issuer.token()), bearer(next_one.token())

    async def until(jwks: str, *wanted: int) -> None:
        (tmp_path / "jwks.json").write_text(jwks)
        async with asyncio.timeout(20):
            while [(await ask(at, token)).status for token in (old, new)] != list(wanted):
                await asyncio.sleep(0.05)

    assert [(await ask(at, token)).status for token in (old, new)] == [200, 401]
    await until(next_one.jwks, 401, 200)
    (tmp_path / "jwks.json").write_text("{")
    async with asyncio.timeout(20):
        while not await at.metric("fairlead_trouble", what="keys"):
            await asyncio.sleep(0.05)
    assert (await ask(at, new)).status == 200, "a file with a mistake changes nothing"
    await until(issuer.jwks, 200, 401)
    assert at.envoy_pid() == envoy


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_the_issuers_keys_are_fetched(
    scheme: str, issuer: Issuer, serve: Callable[..., Serve], upstream: Upstream, tmp_path: Path
) -> None:
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        jwks = issuer.jwks.encode()
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(jwks), jwks))

    tls = issuer.tls(tmp_path / "ca.pem") if scheme == "https" else None
    async with TcpServer(answer, ssl=tls) as server:
        there = {"jwksFile": "", "jwksUri": f"{scheme}://{server.address}/certs", "caFile": "ca.pem" if tls else ""}
        at = await asyncio.to_thread(serve, {"endpoints": upstream.addresses, "gateway": settings(**there)})
        assert await tenant(at, bearer(issuer.token()), *MINTED) == "team-j"
        assert (await ask(at)).status == 401
    assert asked[0].startswith(b"GET /certs HTTP/1.1")


async def test_the_issuers_server_may_change_its_authority(
    issuer: Issuer, serve: Callable[..., Serve], upstream: Upstream, tmp_path: Path
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        jwks = issuer.jwks.encode()
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(jwks), jwks))

    Issuer(tmp_path / "other.pem").tls(tmp_path / "ca.pem")
    tls = issuer.tls(tmp_path / "new-ca.pem")
    async with TcpServer(answer, ssl=tls) as server:
        there = {"jwksFile": "", "jwksUri": f"https://{server.address}/certs", "caFile": "ca.pem"}
        at = await asyncio.to_thread(serve, {"endpoints": upstream.addresses, "gateway": settings(**there)})
        token = bearer(issuer.token())
        async with asyncio.timeout(20):
            while not await at.metric("fairlead_trouble", what="issuer"):
                await asyncio.sleep(0.1)
        assert (await ask(at, token, *MINTED)).status == 401
        (tmp_path / "ca.pem").write_bytes((tmp_path / "new-ca.pem").read_bytes())
        async with asyncio.timeout(20):  # Envoy fetches again each five seconds
            while (await ask(at, token, *MINTED)).status != 200:
                await asyncio.sleep(0.1)
        (tmp_path / "ca.pem").write_text("half a bund")
        async with asyncio.timeout(20):
            while not await at.metric("fairlead_trouble", what="keys"):
                await asyncio.sleep(0.1)
    at.end()
    assert "its server's certificate is for another host, or not trusted (gateway.jwt.caFile)" in at.said()
