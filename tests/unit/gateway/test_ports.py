"""Servers that listen everywhere, with IPv6 and without."""

import json
import socket
from pathlib import Path

import pytest

from fairlead.gateway.envoy.gateway import prepare
from fairlead.gateway.envoy.options import Options
from fairlead.gateway.envoy.process import LISTENERS_LATER
from fairlead.gateway.ports import listening_sockets

needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")


@needs_ipv6
@pytest.mark.parametrize("host", ["", "::"])
def test_everywhere_is_ipv4_and_ipv6(host: str) -> None:
    (listener,) = listening_sockets(host, 0, 8)
    with listener:
        for client in ("127.0.0.1", "::1"):
            socket.create_connection((client, listener.getsockname()[1])).close()


def test_without_ipv6_everywhere_is_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    (listener,) = listening_sockets("::", 0, 8)
    with listener:
        assert listener.family == socket.AF_INET
        socket.create_connection(("127.0.0.1", listener.getsockname()[1])).close()


@needs_ipv6
@pytest.mark.parametrize(("ipv6", "host"), [(True, "::"), (False, "0.0.0.0")])
def test_envoy_listens_on_what_the_machine_has(
    ipv6: bool, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: ipv6)
    plan = prepare(Options(host="::", port=0), ["127.0.0.1:1"], binary="/bin/true", directory=tmp_path)
    (listener,) = json.loads(Path(plan.directory, LISTENERS_LATER).read_text())["resources"]
    assert listener["address"]["socket_address"]["address"] == host
