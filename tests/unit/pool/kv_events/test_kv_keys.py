"""CURVE keys of KV events: what of the configured files is used, and what is refused before it harms."""

from pathlib import Path

import pytest
import zmq

from fairlead.config.schema import KvCurve
from fairlead.core.errors import ConfigError
from fairlead.pool.kv_events.keys import read_keys

ZEROS, ONES = "0" * 40, "1" * 40


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    """Fairlead's keys, in the files `public` and `secret`."""
    public, secret = zmq.curve_keypair()
    (tmp_path / "public").write_bytes(public)
    (tmp_path / "secret").write_bytes(secret + b"\n")
    return public.decode(), secret.decode()


def settings(directory: Path, server: str = "", clients: str | None = None) -> KvCurve:
    files = {"public_key_file": str(directory / "public"), "secret_key_file": str(directory / "secret")}
    if clients is not None:
        (directory / "clients").write_text(clients, encoding="utf-8")
        files["clients_file"] = str(directory / "clients")
    return KvCurve(**files, server_key=server)


def test_keys_to_connect(tmp_path: Path, pair: tuple[str, str]) -> None:
    curve, clients = read_keys(settings(tmp_path, server=ZEROS, clients=ZEROS), bound=False)
    assert curve is not None
    assert (curve.public, curve.secret, curve.server, clients) == (*pair, ZEROS, [])
    assert read_keys(None, bound=False) == (None, [])


def test_keys_to_be_connected_to(tmp_path: Path, pair: tuple[str, str]) -> None:
    curve, clients = read_keys(settings(tmp_path, ZEROS, f"# pods\n\n{ZEROS}\r\n {ONES}\n"), bound=True)
    assert curve is not None
    assert (curve.public, curve.secret, curve.server, clients) == (*pair, "", [ZEROS, ONES])


@pytest.mark.parametrize(
    ("clients", "reason"),
    [
        ("", "has no keys"),
        ("# none yet", "has no keys"),
        (f'# pods\npublic-key = "{ZEROS}"', ":2 is no CURVE key"),
        (ZEROS[1:], ":1 is no CURVE key"),
        (f"{ZEROS} {ZEROS}", ":1 is no CURVE key"),
        ('"' * 40, ":1 is no CURVE key"),
        ("é" * 40, ":1 is no CURVE key"),
        ("%" * 40, ":1 is no CURVE key"),
        (None, "needed"),
    ],
)
def test_unusable_keys_of_publishers(tmp_path: Path, pair: tuple[str, str], clients: str | None, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        read_keys(settings(tmp_path, ZEROS, clients), bound=True)
    assert caught.value.path == "$.kvEvents.curve.clientsFile"


@pytest.mark.parametrize("server", ["", "0", "é" * 40])
def test_unusable_key_of_the_server(tmp_path: Path, pair: tuple[str, str], server: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_keys(settings(tmp_path, server), bound=False)
    assert caught.value.path == "$.kvEvents.curve.serverKey"


@pytest.mark.parametrize(
    ("content", "reason"), [(ZEROS, "not the public key"), ("", "one key"), ('"' * 40, "no CURVE key"), (None, "read")]
)
def test_unusable_public_key(tmp_path: Path, pair: tuple[str, str], content: str | None, reason: str) -> None:
    (tmp_path / "public").unlink()
    if content is not None:
        (tmp_path / "public").write_text(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        read_keys(settings(tmp_path, ZEROS), bound=False)
    assert caught.value.path == "$.kvEvents.curve.publicKeyFile"
