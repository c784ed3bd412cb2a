"""What a scheduler says of its own addresses."""

from types import SimpleNamespace
from typing import Any

import pytest

from fairlead.compat.load import load
from fairlead.server.live.scheduler import Live


@pytest.mark.parametrize(
    ("host", "shown"), [("::", "[::]"), ("::1", "[::1]"), ("0.0.0.0", "0.0.0.0"), ("127.0.0.1", "127.0.0.1")]
)
def test_addresses_can_be_copied_from_the_log(host: str, shown: str) -> None:
    text = "gateway: {host: '%s', port: 8081}\nextProc: {host: '%s', port: 9002}\nadmin: {host: '%s'}\n"
    live: Any = Live(load(text % (host, host, host), need_endpoints=False))
    live.serving, live.admin = SimpleNamespace(endpoints=0), SimpleNamespace(port=9091)
    found = live._whereabouts()
    assert found["gateway"] == f"http://{shown}:8081/"
    assert found["ext_proc"] == f"{shown}:9002"
    assert found["admin"] == f"http://{shown}:9091/"
