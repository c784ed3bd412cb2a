"""Settings that are unsafe on a network, each found, and none where only this machine is reached."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fairlead.compat.load import load
from fairlead.doctor.checks import exposure
from fairlead.doctor.run import examine
from fairlead.doctor.site import Site

NEAR = ["127.0.0.1:9"]
FAR = ["192.0.2.7:9"]
KEYS = {"keys": {"file": "keys.txt"}}
TOKENS = {"jwt": {"issuer": "issuer", "jwksFile": "jwks.json"}}
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
    ("ext-proc", {"gateway": "none"}, {"gateway": "none", "extProc": {"host": "localhost"}}),
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


async def codes(config: dict[str, Any]) -> set[str]:
    admin = {"port": 1, **config.get("admin", {})}
    async with Site(load(json.dumps({"endpoints": NEAR, **config, "admin": admin}))) as site:
        found = await examine(site, [exposure.exposure])
    assert found.outcomes[0].state in ("well", "found"), found.outcomes
    return {one.code for one in found.findings}


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


async def test_paths_that_are_all_open() -> None:
    near, far = {"paths": ["/*"]}, {"paths": ["/*"], "host": "0.0.0.0"}
    assert await codes({"gateway": near}) == set()
    assert await codes({"gateway": far}) == {"exposure.gateway", "exposure.paths"}
    assert await codes({"gateway": far | {"paths": ["/cohere/*"]}}) == {"exposure.gateway"}


async def test_secrets_that_everybody_can_read(tmp_path: Path) -> None:
    key, token = tmp_path / "tls.key", tmp_path / "token"
    key.write_text("x")
    token.write_text("x")
    config = {"extProc": {"tls": {"certDir": str(tmp_path)}}, "metrics": {"tokenFile": str(token)}}
    for one in (key, token):
        os.chmod(key, 0o640)
        os.chmod(token, 0o640)
        assert await codes(config) == set()
        os.chmod(one, 0o644)
        assert await codes(config) == {"exposure.secrets"}


def test_every_finding_is_tried_here() -> None:
    others = {"exposure.test-selection", "exposure.paths", "exposure.secrets"}
    assert {f"exposure.{code}" for code, _, _ in UNSAFE} | others == {kind.code for kind in exposure.exposure.kinds}
