"""The reference transport is optional."""

import sys

import pytest

from fairlead.io.receive.grpc_server import GrpcServer
from fairlead.model.errors import ConfigError


def test_without_grpcio_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(ConfigError, match=r"pip install fairlead\[grpc\]"):
        GrpcServer({})
