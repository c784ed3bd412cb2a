"""Flags of `fairlead serve` that users of the reference picker know, as values of the configuration."""

from collections.abc import Mapping
from typing import Any

from fairlead.model.errors import ConfigError


def overlay(
    *,
    pool: str = "",
    namespace: str = "",
    group: str = "",
    selector: str = "",
    target_ports: str = "",
    kubeconfig: str = "",
    leader_election: bool = False,
    ports: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """In the shape of the file; what was not given is absent. Raises `ConfigError` for what cannot be read."""
    kubernetes: dict[str, Any] = {
        key: value
        for key, value in (("pool", pool), ("namespace", namespace), ("group", group), ("kubeconfig", kubeconfig))
        if value
    }
    if selector:
        kubernetes["selector"] = _labels(selector)
    if target_ports:
        kubernetes["targetPorts"] = _numbers(target_ports)
    if leader_election:
        kubernetes["leaderElection"] = {"enabled": True}
    flags: dict[str, Any] = {"kubernetes": kubernetes} if kubernetes else {}
    for path, port in (ports or {}).items():
        if port:
            section, _, field = path.partition(".")
            flags.setdefault(section, {})[field] = port
    return flags


def _labels(text: str) -> dict[str, str]:
    pairs = [part.split("=", 1) for part in text.split(",") if part.strip()]
    if not all(len(pair) == 2 and pair[0].strip() for pair in pairs):
        raise ConfigError(f"expected KEY=VALUE,KEY=VALUE, got {text!r}", "--endpoint-selector")
    return {pair[0].strip(): pair[1].lstrip("=").strip() for pair in pairs}


def _numbers(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isascii() and word.isdigit() for word in words):
        raise ConfigError(f"expected PORT,PORT, got {text!r}", "--endpoint-target-ports")
    return [int(word) for word in words]
