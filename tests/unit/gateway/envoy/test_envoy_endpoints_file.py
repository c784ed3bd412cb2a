"""The pool as a file that Envoy watches."""

import json
from pathlib import Path

import pytest

from fairlead.core.errors import ConfigError
from fairlead.gateway.envoy import clusters
from fairlead.gateway.envoy.clusters import EndpointsFile, assignment
from fairlead.gateway.envoy.options import parse_endpoint


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


def test_text(tmp_path: Path) -> None:
    file = EndpointsFile(tmp_path / "pool.json")
    file.write(["10.0.0.1:1", "[fd00::1]:2"])
    (resource,) = json.loads(file.path.read_text())["resources"]
    kind = resource.pop("@type")
    assert kind == "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
    assert resource == assignment(["10.0.0.1:1", "[fd00::1]:2"])


def test_only_new_addresses_are_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing those of 2,000 endpoints for each change took the event loop 15 ms."""
    parsed: list[str] = []
    monkeypatch.setattr(clusters, "parse_endpoint", lambda text: parsed.append(text) or parse_endpoint(text))
    file = EndpointsFile(tmp_path / "pool.json")
    file.prepare("10.0.0.3:1")
    for there in (["10.0.0.1:1", "10.0.0.2:1"], ["10.0.0.1:1", "10.0.0.3:1"], ["10.0.0.1:1", "10.0.0.2:1"]):
        file.write(there)
        assert [f"{host}:{port}" for host, port in addresses(file.path)] == there
    assert parsed == ["10.0.0.3:1", "10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1", "10.0.0.2:1"]
