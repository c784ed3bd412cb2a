"""The pool as a file that Envoy watches (endpoint discovery from a file, EDS).

Envoy reacts to a file that is *moved* over the old one, so every version is written aside and renamed: it never reads
half a file, and never restarts. A file that it cannot read leaves the old endpoints in force.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fairlead.io.envoy.options import parse_endpoint

CLUSTER = "all_endpoints"

_ASSIGNMENT = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"


def assignment(addresses: Iterable[str]) -> dict[str, Any]:
    """A ClusterLoadAssignment. Raises `ConfigError` for what is not `ip:port`."""
    parsed = [parse_endpoint(address) for address in addresses]
    return {
        "cluster_name": CLUSTER,
        "endpoints": [
            {
                "lb_endpoints": [
                    {"endpoint": {"address": {"socket_address": {"address": a.host, "port_value": a.port}}}}
                    for a in parsed
                ]
            }
        ],
    }


def render(addresses: Iterable[str], version: int) -> str:
    """The text of the file."""
    resource = {"@type": _ASSIGNMENT, **assignment(addresses)}
    return json.dumps({"version_info": str(version), "resources": [resource]})


class EndpointsFile:
    """Writes versions of the pool to `path`. Its directory must be one that nobody else writes to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._version = 0
        self._written: tuple[str, ...] | None = None

    def write(self, addresses: Iterable[str]) -> bool:
        """Make `addresses` the pool; order and repetitions do not matter. True if that changed anything.

        Raises `ConfigError` for an address that is not `ip:port` (nothing is written), `OSError` when the disk does.
        """
        wanted = tuple(sorted(set(addresses)))
        if wanted == self._written:
            return False
        text = render(wanted, self._version + 1)
        aside = self.path.with_suffix(".new")
        aside.write_text(text)
        os.replace(aside, self.path)
        self._version += 1
        self._written = wanted
        return True
