"""Settings that are unsafe on a network, each found, and none where only this machine is reached."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fairlead.compat.load import load
from fairlead.doctor.checks import exposure
from fairlead.doctor.run import Finding, examine
from fairlead.doctor.site import Site

NEAR = ["127.0.0.1:9"]
FAR = ["192.0.2.7:9"]
KEYS = {"keys": {"file": "keys.txt"}}
TOKENS = {"jwt": {"issuer": "issuer", "audiences": ["us"], "jwksFile": "jwks.json"}}
ENCRYPTED = {"tls": {"certDir": "nowhere"}}
EVENTS = {"enabled": True, "port": 5557}
#: Code, what makes it, and what takes it away.
UNSAFE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("gateway", {"gateway": {"host": "0.0.0.0"}}, {"gateway": {"host": "127.0.0.1"}}),
    ("gateway", {"gateway": {"host": "::"}}, {"gateway": {"host": "::1"}}),
    ("clear-keys", {"gateway": {"host": "0.0.0.0", **KEYS}}, {"gateway": KEYS}),
    ("clear-keys", {"gateway": {"host": "0.0.0.0", **TOKENS}}, {"gateway": TOKENS}),
    ("admin", {"admin": {"host": "0.0.0.0"}}, {"admin": {"host": "0.0.0.0", "debug": False}}),
    ("admin", {"admin": {"host": "0.0.0.0"}},
     {"admin": {"host": "0.0.0.0", "tokenFile": "token", "tls": {"certDir": "nowhere"}}}),
    ("token", {"admin": {"host": "0.0.0.0", "tokenFile": "token"}}, {"admin": {"tokenFile": "token"}}),
    ("token", {"admin": {"metricsPort": 2, "metricsHost": "0.0.0.0", "tokenFile": "token"}},
     {"admin": {"metricsHost": "0.0.0.0", "tokenFile": "token"}}),
    ("hosts", {"admin": {"hosts": [".com"]}}, {"admin": {"hosts": [".example.com", ".internal", "dev"]}}),
    ("hosts", {"admin": {"hosts": [".com"]}}, {"admin": {"hosts": [".com"], "tokenFile": "token"}}),
    ("ext-proc", {"gateway": "none", "headers": {"trust": []}}, {"gateway": "none", "extProc": {"host": "localhost"}}),
    ("tenants", {"gateway": "none", "extProc": ENCRYPTED},
     {"gateway": "none", "extProc": ENCRYPTED, "headers": {"trust": ["slo"]}}),
    ("test-selection", {"gateway": "none", "extProc": ENCRYPTED, "headers": {"trust": ["test-selection"]}},
     {"gateway": "none", "headers": {"trust": ["test-selection"]}, "extProc": {"host": "127.0.0.1"}}),
    ("audience", {"gateway": {"jwt": TOKENS["jwt"] | {"audiences": []}}}, {"gateway": TOKENS}),
    ("forward", {"gateway": {"keys": {"file": "keys.txt", "forward": True}}}, {"gateway": KEYS}),
    ("forward", {"gateway": {"jwt": TOKENS["jwt"] | {"forward": True}}}, {"gateway": TOKENS}),
    ("envoy-admin", {"gateway": {"adminPort": 9901}}, {"gateway": {"adminPort": 0}}),
    ("indexer", {"kvEvents": {"enabled": True, "indexer": {"url": "http://index:9090"}}},
     {"kvEvents": {"enabled": True, "indexer": {"url": "https://index:9090"}}}),
    ("indexer", {"kvEvents": {"enabled": True, "port": 1, "indexer": {"warmFrom": "http://index:9090"}}},
     {"kvEvents": {"enabled": True, "port": 1, "indexer": {"warmFrom": "http://localhost:9090"}}}),
    ("replicas", {"replicas": {"via": "valkey://u@v:6379/0", "passwordFile": "token"}},
     {"replicas": {"via": "valkeys://u@v:6379/0", "passwordFile": "token"}}),
    ("replicas", {"replicas": {"via": "rediss://v:6379"}}, {"replicas": {"via": "redis://127.0.0.1:6379"}}),
    ("replicas", {"replicas": {"via": "valkey+sentinel://127.0.0.1,[2001:db8::1]:1/m"}},
     {"replicas": {"via": "valkey+sentinel://127.0.0.1,[::1]:1/m"}}),
    ("password", {"replicas": {"via": "valkeys://u:secret@v:6379"}}, {"replicas": {"via": "unix:///run/valkey.sock"}}),
    ("traces", {"tracing": {"endpoint": "http://otel:4318/v1/traces"}},
     {"tracing": {"endpoint": "https://otel:4318/v1/traces"}}),
    ("ext-proc", {"extProc": {"host": "10.0.0.1"}}, {"extProc": {"host": "10.0.0.1", "tls": {"certDir": "nowhere"}}}),
    ("kv-events", {"kvEvents": EVENTS, "endpoints": FAR}, {"kvEvents": EVENTS}),
    ("kv-events", {"kvEvents": {"enabled": True, "bind": "tcp://0.0.0.0:5555"}},
     {"kvEvents": {"enabled": True, "bind": "tcp://127.0.0.1:5555"}}),
    ("scheduler", {"scheduler": {"address": "192.0.2.7:1"}}, {"scheduler": {"address": "unix:/run/s"}}),
    ("scheduler", {"scheduler": {"address": "192.0.2.7:1"}}, {"scheduler": {"address": "192.0.2.7:1", "tls": {}}}),
    ("unverified", {"metrics": {"tls": {"verify": False}}}, {"metrics": {"tls": {"verify": True}}}),
    ("unverified", {"scheduler": {"address": "a:1", "tls": {"verify": False}}},
     {"scheduler": {"address": "a:1", "tls": {"verify": True}}}),
    ("token", {"metrics": {"tokenFile": "token"}, "endpoints": FAR}, {"metrics": {"tokenFile": "token"}}),
]  # fmt: skip


async def findings(config: dict[str, Any]) -> tuple[Finding, ...]:
    admin = {"port": 1, **config.get("admin", {})}
    async with Site(load(json.dumps({"endpoints": NEAR, **config, "admin": admin}))) as site:
        found = await examine(site, [exposure.exposure])
    assert found.outcomes[0].state in ("well", "found"), found.outcomes
    return found.findings


async def codes(config: dict[str, Any]) -> set[str]:
    return {one.code for one in await findings(config)}


async def test_the_defaults_are_safe() -> None:
    assert await codes({}) == set()


@pytest.mark.parametrize(("code", "unsafe", "safe"), UNSAFE, ids=lambda one: one if isinstance(one, str) else "")
async def test_each_unsafe_setting_is_found(code: str, unsafe: dict[str, Any], safe: dict[str, Any]) -> None:
    assert await codes(unsafe) == {f"exposure.{code}"}
    assert await codes(safe) == set()


async def test_clients_who_choose_endpoints() -> None:
    trusting = {"headers": {"trust": ["test-selection"]}}
    assert await codes(trusting) == set()
    assert await codes({"gateway": {"host": "0.0.0.0"}, **trusting}) == {"exposure.gateway", "exposure.test-selection"}


@pytest.mark.parametrize("path", ["/*", "/v1/*", "/sleep", "/wake*"])
async def test_paths_that_clients_should_not_reach(path: str) -> None:
    near, far = {"paths": [path]}, {"paths": [path], "host": "0.0.0.0"}
    assert await codes({"gateway": near}) == set()
    assert await codes({"gateway": far}) == {"exposure.gateway", "exposure.paths"}
    assert await codes({"gateway": far | {"paths": ["/cohere/*", "/v1/realtime"]}}) == {"exposure.gateway"}


async def test_uploads_without_a_bound() -> None:
    near, far = {"uploadShare": 1}, {"uploadShare": 1, "host": "0.0.0.0"}
    assert await codes({"gateway": near}) == set()
    assert await codes({"gateway": far}) == {"exposure.gateway", "exposure.uploads"}


async def test_a_password_is_not_repeated() -> None:
    assert "secret" not in repr(await findings({"replicas": {"via": "valkey://u:secret@v:6379"}}))


async def test_an_admin_port_that_the_system_chooses() -> None:
    assert await codes({"admin": {"port": 0, "host": "0.0.0.0"}}) == {"exposure.admin"}


async def test_files_that_others_may_write_or_read(tmp_path: Path) -> None:
    keys, jwks, record = tmp_path / "keys.txt", tmp_path / "jwks.json", tmp_path / "journal" / "old.journal"
    record.parent.mkdir()
    for one in (keys, jwks, record):
        one.touch()
    gateway = {"keys": {"file": str(keys)}, "jwt": TOKENS["jwt"] | {"jwksFile": str(jwks)}}
    config = {"gateway": gateway, "journal": {"path": str(record.parent)}}
    for one, unsafe, code in ((keys, 0o646, "writable"), (jwks, 0o666, "writable"), (record, 0o644, "records")):
        for safe in (keys, jwks, record):
            safe.chmod(0o640)
        assert await codes(config) == set()
        one.chmod(unsafe)
        assert await codes(config) == {f"exposure.{code}"}


@pytest.mark.parametrize("place", ["extProc", "replicas"])
async def test_secrets_that_everybody_can_read(tmp_path: Path, place: str) -> None:
    key, token = tmp_path / "tls.key", tmp_path / "token"
    key.write_text("x")
    token.write_text("x")
    pair = {"certDir": str(tmp_path)}
    config = {place: {"tls": pair} if place == "extProc" else pair, "metrics": {"tokenFile": str(token)}}
    for one in (key, token):
        os.chmod(key, 0o640)
        os.chmod(token, 0o640)
        assert await codes(config) == set()
        os.chmod(one, 0o644)
        assert await codes(config) == {"exposure.secrets"}


async def test_an_api_server_that_anybody_can_be(tmp_path: Path) -> None:
    file = tmp_path / "kubeconfig"
    cluster = {"server": "https://127.0.0.1:6443"}
    context = {"name": "c", "context": {"cluster": "c"}}
    kubernetes = {"pool": "p", "kubeconfig": str(file)}
    for more, expected in (({}, set()), ({"insecure-skip-tls-verify": True}, {"exposure.api-server"})):
        clusters = [{"name": "c", "cluster": cluster | more}]
        file.write_text(json.dumps({"current-context": "c", "contexts": [context], "clusters": clusters}))
        assert await codes({"kubernetes": kubernetes, "endpoints": []}) == expected
    file.unlink()
    assert await codes({"kubernetes": kubernetes, "endpoints": []}) == set()


def test_every_finding_is_tried_here() -> None:
    others = {f"exposure.{code}" for code in ("paths", "uploads", "secrets", "writable", "records", "api-server")}
    assert {f"exposure.{code}" for code, _, _ in UNSAFE} | others == {kind.code for kind in exposure.exposure.kinds}
