"""Who we are to the API server: kubeconfigs, token files, exec plugins, the service account of a pod."""

import asyncio
import base64
import ssl
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_kube import FakeKube

from fairlead.core.errors import ConfigError
from fairlead.pool.kube.auth import (
    REREAD_S,
    Access,
    FixedSecret,
    Secret,
    TokenFile,
    Where,
    find_access,
    in_cluster,
    read_kubeconfig,
)
from fairlead.pool.kube.client import KubeClient, KubeError, Resource, Unreachable

PODS = Resource("", "v1", "pods", "default")


#: Two self-signed certificates, `CN=one` and `CN=two`.
AUTHORITIES = (
    """-----BEGIN CERTIFICATE-----
MIIBdDCCARmgAwIBAgIUXO7qBroMyIbQnbCJbzx4iv3REjQwCgYIKoZIzj0EAwIw
DjEMMAoGA1UEAwwDb25lMCAXDTI2MTEyMTEyMTkwNFoYDzIxMjYxMDI4MTIxOTA0
WjAOMQwwCgYDVQQDDANvbmUwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAASM5uGE
eg0q3qYb7UV4vapBy5fDc2ZXXmSjizaWkwCZO7J7Ty6XFS0FTX5fwlaFtQyO4H22
26NvNa/DDtA6Zcmzo1MwUTAdBgNVHQ4EFgQUQNuqXIGKngDULhKTXa7At8BN1F0w
HwYDVR0jBBgwFoAUQNuqXIGKngDULhKTXa7At8BN1F0wDwYDVR0TAQH/BAUwAwEB
/zAKBggqhkjOPQQDAgNJADBGAiEAm09TGaoZmnHJTZSablrrM62grJeqc51WQf8i
P6JC0EMCIQDssQj1eLmEUPDgCrvUVErlSyKjf2NEdKJ/lruQ+PI+GA==
-----END CERTIFICATE-----
""",
    """-----BEGIN CERTIFICATE-----
MIIBczCCARmgAwIBAgIUVZVwECFvlDCMSaxOPXpiyrIWV0gwCgYIKoZIzj0EAwIw
DjEMMAoGA1UEAwwDdHdvMCAXDTI2MTEyMTEyMTkwNFoYDzIxMjYxMDI4MTIxOTA0
WjAOMQwwCgYDVQQDDAN0d28wWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAAQeSbwb
t1Pg9hwQ0aLreWrN0tKd8yRYz0sesDdUkOkhkuC7ZkcB2wR1uUy+N01bl+F176X5
woWhPlcEH3JoeZ4Po1MwUTAdBgNVHQ4EFgQUEgzBKgxbeSXVoi8DtJdygWD+kZIw
HwYDVR0jBBgwFoAUEgzBKgxbeSXVoi8DtJdygWD+kZIwDwYDVR0TAQH/BAUwAwEB
/zAKBggqhkjOPQQDAgNIADBFAiBxAXtmY0MaaLgZ4brMLBCWmaSPMzEemHGIv4FL
q6J8uAIhALWsaOWcpIhGmeslElpqd3KyzqNSaA9rwDjS4v3x/F6Q
-----END CERTIFICATE-----
""",
)


def kubeconfig(directory: Path, user: Any, server: str = "http://127.0.0.1:1", **cluster: Any) -> Path:
    document = {
        "apiVersion": "v1",
        "current-context": "a",
        "contexts": [
            {"name": "a", "context": {"cluster": "c", "user": "u", "namespace": "serving"}},
            {"name": "b", "context": {"cluster": "nowhere"}},
        ],
        "clusters": [{"name": "c", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    file = directory / "kubeconfig"
    file.write_text(yaml.safe_dump(document))
    return file


async def header(access: Access) -> str:
    return (await access.credentials())[0].get("Authorization", "")


async def test_a_token_and_the_namespace(tmp_path: Path) -> None:
    access = find_access(str(kubeconfig(tmp_path, {"token": "t"})))
    assert await header(access) == "Bearer t"
    assert access.where.namespace == "serving"


async def test_a_token_file_is_read_again(tmp_path: Path) -> None:
    now = 0.0
    file = tmp_path / "token"
    file.write_text("one\n")
    source = TokenFile(file, lambda: now)
    assert (await source.get()).token == "one"
    file.write_text("two")
    assert (await source.get()).token == "one"
    now = REREAD_S
    assert (await source.get()).token == "two"
    file.write_text("three")
    source.refused()
    assert (await source.get()).token == "three"
    file.unlink()
    source.refused()
    assert (await source.get()).token == "three", "the last one stays"


async def test_all_who_ask_at_once_get_the_token(tmp_path: Path) -> None:
    """The reflectors of all kinds start together: none may ask without a token."""
    file = tmp_path / "token"
    source = TokenFile(file, lambda: 0.0)
    found = await asyncio.gather(*(source.get() for _ in range(3)), return_exceptions=True)
    assert all(isinstance(each, ConfigError) for each in found), found
    file.write_text("one")
    assert {secret.token for secret in await asyncio.gather(*(source.get() for _ in range(5)))} == {"one"}


async def test_a_watch_that_is_never_accepted_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlead.pool.kube.client.QUIET_S", 0.05)
    monkeypatch.setattr("fairlead.pool.kube.client.ANSWER_S", 0.05)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    client = KubeClient(Access(Where(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), FixedSecret(Secret())))
    async with server, asyncio.timeout(10.0):
        with pytest.raises(Unreachable):
            await anext(client.watch(Resource("", "v1", "pods", ""), {}, idle_s=60.0))
        await client.close()


async def test_a_rotated_authority_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubelet renews ca.crt in place: within a minute it counts, and at once when a server was not trusted."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    now = 0.0
    monkeypatch.setattr("fairlead.pool.kube.auth.time.monotonic", lambda: now)
    first, second = AUTHORITIES
    (tmp_path / "token").write_text("t")
    (tmp_path / "ca.crt").write_text(first)
    access = in_cluster(tmp_path)

    async def trusted() -> set[str]:
        _, context = await access.credentials()
        assert isinstance(context, ssl.SSLContext)
        return {one["subject"][0][0][1] for one in context.get_ca_certs()}  # type: ignore[index,misc]

    assert await trusted() == {"one"}
    (tmp_path / "ca.crt").write_text(second)
    assert await trusted() == {"one"}
    access.refused()
    assert await trusted() == {"one"}, "a 401 says nothing of the server"
    access.distrusted()
    assert await trusted() == {"two"}
    (tmp_path / "ca.crt").write_text(first)
    now = REREAD_S
    assert await trusted() == {"one"}
    (tmp_path / "ca.crt").write_text("half a certif")
    access.distrusted()
    assert await trusted() == {"one"}, "what cannot be used changes nothing"


async def test_no_token_file_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="token file"):
        await TokenFile(tmp_path / "none", lambda: 0.0).get()


def plugin(directory: Path, body: str) -> dict[str, Any]:
    script = directory / "plugin"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return {
        "exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "./plugin", "env": None, "args": ["x"]}
    }


async def test_an_exec_plugin_is_run_once_until_its_token_is_refused(tmp_path: Path) -> None:
    body = 'echo x >> "$(dirname "$0")/runs"\ncase "$KUBERNETES_EXEC_INFO" in *ExecCredential*) ;; *) exit 9;; esac\n'
    body += """echo '{"kind":"ExecCredential","status":{"token":"from-plugin"}}'"""
    access = find_access(str(kubeconfig(tmp_path, plugin(tmp_path, body))))
    assert await header(access) == "Bearer from-plugin"
    assert await header(access) == "Bearer from-plugin"
    assert (tmp_path / "runs").read_text().count("x") == 1
    access.refused()
    await header(access)
    assert (tmp_path / "runs").read_text().count("x") == 2


async def test_an_exec_plugins_token_that_ran_out_is_renewed(tmp_path: Path) -> None:
    body = 'echo x >> "$(dirname "$0")/runs"\n'
    body += """echo '{"status":{"token":"t","expirationTimestamp":"2020-01-01T00:00:00Z"}}'"""
    access = find_access(str(kubeconfig(tmp_path, plugin(tmp_path, body))))
    await header(access)
    await header(access)
    assert (tmp_path / "runs").read_text().count("x") == 2


@pytest.mark.parametrize(
    ("body", "said"), [("echo broken >&2; exit 3", "broken"), ("echo hello", "no ExecCredential"), ("true", "no Exec")]
)
async def test_an_exec_plugin_that_fails(tmp_path: Path, body: str, said: str) -> None:
    access = find_access(str(kubeconfig(tmp_path, plugin(tmp_path, body))))
    with pytest.raises(ConfigError, match=said):
        await access.credentials()
    client = KubeClient(access)
    with pytest.raises(Unreachable, match=said):
        await client.get(PODS, {})
    await client.close()


async def test_a_plugin_that_is_not_installed_says_how_to_get_it(tmp_path: Path) -> None:
    user = {"exec": {"command": "no-such-plugin-anywhere", "installHint": "get it somewhere"}}
    with pytest.raises(ConfigError, match="get it somewhere"):
        await find_access(str(kubeconfig(tmp_path, user))).credentials()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "not a kubeconfig"),
        ("a: [", "not a kubeconfig"),
        ("current-context: x", "no context 'x'"),
        ("contexts: 7", "not a kubeconfig"),
        ("\x00", "not a kubeconfig"),
    ],
)
def test_kubeconfigs_that_cannot_be_used(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_kubeconfig(file)


def test_contexts_are_checked(tmp_path: Path) -> None:
    file = kubeconfig(tmp_path, {"token": "t"})
    with pytest.raises(ConfigError, match="no context 'z'; known: a, b"):
        read_kubeconfig(file, "z")
    with pytest.raises(ConfigError, match="no cluster 'nowhere'"):
        read_kubeconfig(file, "b")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_kubeconfig(tmp_path / "absent")
    with pytest.raises(ConfigError, match="certificate data"):
        read_kubeconfig(kubeconfig(tmp_path, {}, **{"certificate-authority-data": "%%%"}))


async def test_certificates_that_are_none(tmp_path: Path) -> None:
    junk = base64.b64encode(b"junk").decode()
    user = {"client-certificate-data": junk, "client-key-data": junk}
    access = find_access(str(kubeconfig(tmp_path, user, "https://127.0.0.1:1")))
    with pytest.raises(ConfigError, match="certificates cannot be used"):
        await access.credentials()


async def test_tls_is_verified_unless_told_otherwise(tmp_path: Path) -> None:
    _, strict = await find_access(str(kubeconfig(tmp_path, {}, "https://127.0.0.1:1"))).credentials()
    assert isinstance(strict, ssl.SSLContext) and strict.verify_mode is ssl.CERT_REQUIRED and strict.check_hostname
    lax_file = kubeconfig(tmp_path, {}, "https://127.0.0.1:1", **{"insecure-skip-tls-verify": True})
    _, lax = await find_access(str(lax_file)).credentials()
    assert isinstance(lax, ssl.SSLContext) and lax.verify_mode is ssl.CERT_NONE


async def test_in_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    (tmp_path / "token").write_text("sa")
    (tmp_path / "namespace").write_text("serving\n")
    with pytest.raises(ConfigError, match="service account"):
        in_cluster(tmp_path)
    (tmp_path / "ca.crt").write_text("")
    access = find_access(account=tmp_path)
    assert (access.where.server, access.where.namespace) == ("https://[fd00::1]:6443", "serving")


def test_nothing_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="no access to Kubernetes"):
        find_access(account=tmp_path)


async def test_a_refused_token_is_looked_for_once_more(kube: FakeKube, tmp_path: Path) -> None:
    kube.tokens = {"new"}
    file = tmp_path / "token"
    file.write_text("old")
    client = KubeClient(Access(Where(kube.url), TokenFile(file, asyncio.get_running_loop().time)))
    with pytest.raises(KubeError, match="401") as refused:
        await client.get(PODS, {})
    assert refused.value.code == 401
    file.write_text("new")
    assert b"items" in await client.get(PODS, {})
    await client.close()


async def test_a_proxy_is_not_asked_for_this_machine(kube: FakeKube, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    near = KubeClient(Access(Where(kube.url), FixedSecret(Secret())))
    assert b"items" in await near.get(PODS, {})
    await near.close()
    far = KubeClient(Access(Where("http://kube.example:80"), FixedSecret(Secret())))
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1"):
        await far.get(PODS, {})
    await far.close()


async def test_nobody_there() -> None:
    client = KubeClient(Access(Where("http://127.0.0.1:1"), FixedSecret(Secret())))
    with pytest.raises(Unreachable):
        await client.get(PODS, {})
    with pytest.raises(Unreachable):
        async for _ in client.watch(PODS, {}, 1.0):
            pass
    await client.close()
