"""The pool as a file that Envoy watches."""

import json
from pathlib import Path

import pytest

from fairlead.core.errors import ConfigError
from fairlead.gateway.envoy.clusters import EndpointsFile, render


def addresses(path: Path) -> list[tuple[str, int]]:
    (resource,) = json.loads(path.read_text())["resources"]
    sockets = [e["endpoint"]["address"]["socket_address"] for e in resource["endpoints"][0]["lb_endpoints"]]
    return [(s["address"], s["port_value"]) for s in sockets]


def test_each_version_is_moved_into_place(tmp_path: Path) -> None:
    file = EndpointsFile(tmp_path / "pool.json")
    assert file.write(["10.0.0.2:1", "[fd00::1]:2"])
    first = file.path.stat().st_ino
    assert addresses(file.path) == [("10.0.0.2", 1), ("fd00::1", 2)]
    assert file.write([])
    assert addresses(file.path) == []
    assert file.path.stat().st_ino != first
    assert [path.name for path in tmp_path.iterdir()] == ["pool.json"]


def test_order_and_repetition_are_no_change(tmp_path: Path) -> None:
    file = EndpointsFile(tmp_path / "pool.json")
    assert file.write(["10.0.0.1:1", "10.0.0.2:1"])
    assert not file.write(["10.0.0.2:1", "10.0.0.1:1", "10.0.0.1:1"])
    assert json.loads(file.path.read_text())["version_info"] == "1"


def test_a_wrong_address_leaves_the_file_alone(tmp_path: Path) -> None:
    file = EndpointsFile(tmp_path / "pool.json")
    file.write(["10.0.0.1:1"])
    with pytest.raises(ConfigError):
        file.write(["10.0.0.1:1", "vllm-0:8000"])
    assert addresses(file.path) == [("10.0.0.1", 1)]
    assert file.write(["10.0.0.3:1"])


def test_text() -> None:
    document = json.loads(render(["10.0.0.1:1"], 7))
    assert document["version_info"] == "7"
    assert document["resources"][0]["cluster_name"] == "all_endpoints"
