"""A list of endpoints as text (YAML or JSON) or as plain values, to `Endpoint`s: the format of file discovery.

    endpoints:
    - name: vllm-0              # required, unique per namespace; of duplicates the last wins, with a warning
      namespace: default        # optional
      address: 10.0.0.1         # required: IPv4, IPv6 (brackets optional) or a host name
      port: 8000                # required, 1-65535, number or string
      labels: {model-id: llama} # optional, scalars
      metrics_url: http://10.0.0.1:9400/metrics   # optional; also labels metricsAddress, metricsPort

Rules
* Nothing raises. Whatever is wrong becomes a `Problem` with a JSON path and, for text, a line.
* A wrong entry costs only itself; `Listing.broken` names it if its name could be read, so that a reload can keep what
  it knew of it. `Listing.ok` is false when the text as a whole could not be read.
"""

import re
from collections.abc import Mapping, Sequence
from ipaddress import IPv6Address, ip_address
from typing import Any

from msgspec import Struct, field

from fairlead.model.endpoint import Endpoint
from fairlead.wire.plain_yaml import Node, PlainYamlError, parse_plain

MAX_BYTES = 1 << 20
MAX_ENDPOINTS = 10_000
_KEYS = frozenset({"name", "namespace", "address", "port", "labels", "metrics_url"})
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_HOST = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_DIGITS = re.compile(r"[0-9]{1,5}")


class Problem(Struct, frozen=True):
    """Something wrong with a list. `path` as in `$.endpoints[2].port`, empty = not about its text; `line` from 1."""

    message: str
    path: str = "$"
    line: int = 0
    #: The entry is used all the same.
    warning: bool = False

    def __str__(self) -> str:
        where = f"line {self.line}, {self.path}" if self.line else self.path
        return f"{where}: {self.message}" if where else self.message


class Listed(Struct, frozen=True):
    """One entry. `endpoint.address` and the default metrics URL hold the host as written."""

    endpoint: Endpoint
    host: str
    port: int
    #: The host is an address and needs no resolving.
    literal: bool

    def at(self, ip: str) -> Endpoint:
        """The endpoint with its host name resolved to `ip`."""
        old = self.endpoint
        return Endpoint(old.id, join(ip, self.port), old.labels, old.metrics_url)


class Listing(Struct, frozen=True):
    """What a list said."""

    entries: tuple[Listed, ...] = ()
    problems: tuple[Problem, ...] = ()
    #: Ids of entries that are there but wrong.
    broken: frozenset[str] = frozenset()
    #: Some wrong entry could not even be named.
    nameless: bool = False
    ok: bool = True

    @property
    def endpoints(self) -> list[Endpoint]:
        return [entry.endpoint for entry in self.entries]


def parse_endpoints_text(text: bytes) -> Listing:
    """A file's content. JSON is read as the YAML that it is."""
    if len(text) > MAX_BYTES:
        return _unreadable(f"larger than {MAX_BYTES} bytes")
    try:
        root = parse_plain(text)
    except PlainYamlError as error:
        return _unreadable(str(error), error.line)
    value = root.value
    if not isinstance(value, dict) or "endpoints" not in value:
        return _unreadable("expected a mapping with the key `endpoints`", root.line)
    extra = sorted(set(value) - {"endpoints"})
    if extra:
        return _unreadable(f"unknown key {extra[0]!r}", value[extra[0]].line)
    entries = value["endpoints"]
    if entries.missing:
        return _unreadable("`endpoints` has no value; write [] for an empty list", entries.line)
    if not isinstance(entries.value, list):
        return _unreadable("expected a list", entries.line, "$.endpoints")
    return _Reader().read(entries.value, "$.endpoints")


def parse_endpoints(entries: Sequence[Any], path: str = "$.endpoints") -> Listing:
    """Entries that are plain values already, such as a configuration's `endpoints`."""
    return _Reader().read([Node.of(entry) for entry in entries], path)


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _unreadable(message: str, line: int = 0, path: str = "$") -> Listing:
    return Listing(problems=(Problem(message, path, line),), ok=False)


class _Wrong(Exception):
    def __init__(self, message: str, node: Node, path: str) -> None:
        self.problem = Problem(message, path, node.line)


class _State(Struct):
    entries: dict[str, Listed] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    nameless: bool = False


class _Reader:
    """Reads entries one after the other."""

    def read(self, entries: list[Node], path: str) -> Listing:
        if len(entries) > MAX_ENDPOINTS:
            return _unreadable(f"more than {MAX_ENDPOINTS} endpoints", entries[MAX_ENDPOINTS].line, path)
        state = _State()
        for i, node in enumerate(entries):
            self._entry(state, node, f"{path}[{i}]")
        for broken in state.broken:
            state.entries.pop(broken, None)
        return Listing(tuple(state.entries.values()), tuple(state.problems), frozenset(state.broken), state.nameless)

    def _entry(self, state: _State, node: Node, path: str) -> None:
        endpoint_id = ""
        try:
            fields = self._fields(node, path)
            endpoint_id = self._id(fields, node, path)
            listed = self._listed(endpoint_id, fields, node, path)
        except _Wrong as wrong:
            state.problems.append(wrong.problem)
            if endpoint_id:
                state.broken.add(endpoint_id)
            else:
                state.nameless = True
            return
        if endpoint_id in state.entries:
            state.problems.append(Problem(f"{endpoint_id} is listed twice, the last counts", path, node.line, True))
            del state.entries[endpoint_id]
        state.broken.discard(endpoint_id)
        state.entries[endpoint_id] = listed

    def _fields(self, node: Node, path: str) -> dict[str, Node]:
        if not isinstance(node.value, dict):
            raise _Wrong("expected a mapping with name, address and port", node, path)
        return node.value

    def _id(self, fields: Mapping[str, Node], node: Node, path: str) -> str:
        name = self._text(fields, "name", node, path)
        namespace = self._text(fields, "namespace", node, path, default="default")
        for key, text in (("name", name), ("namespace", namespace)):
            if not _NAME.fullmatch(text):
                raise _Wrong(f"{text[:80]!r} is no name (letters, digits, `.`, `_`, `-`)", fields[key], f"{path}.{key}")
        return f"{namespace}/{name}"

    def _listed(self, endpoint_id: str, fields: Mapping[str, Node], node: Node, path: str) -> Listed:
        for key in fields:
            if key not in _KEYS:
                raise _Wrong(f"unknown key {key[:80]!r}", fields[key], path)
        host, literal = self._host(fields, node, path)
        port_text = self._text(fields, "port", node, path)
        port = int(port_text) if _DIGITS.fullmatch(port_text) else 0
        if not 1 <= port <= 65535:
            raise _Wrong(f"{port_text[:80]!r} is no port (1 to 65535)", fields["port"], f"{path}.port")
        labels = self._labels(fields, path)
        url = self._metrics_url(fields, labels, node, path, host, port)
        return Listed(Endpoint(endpoint_id, join(host, port), labels, url), host, port, literal)

    def _host(self, fields: Mapping[str, Node], node: Node, path: str) -> tuple[str, bool]:
        text = self._text(fields, "address", node, path)
        bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        try:
            address = ip_address(bare)
        except ValueError:
            # All digits and dots is a mistyped IPv4 address: the resolver would make `10.1` into 10.0.0.1.
            numeric = bare.replace(".", "").isdigit()
            if bare != text or numeric or not _HOST.fullmatch(bare) or len(bare) > 253:
                wrong = f"{text[:80]!r} is neither an IP address nor a host name"
                raise _Wrong(wrong, fields["address"], f"{path}.address") from None
            return bare, False
        if isinstance(address, IPv6Address) and address.scope_id:
            raise _Wrong("an IPv6 zone cannot be dialled by the gateway", fields["address"], f"{path}.address")
        return str(address), True

    def _labels(self, fields: Mapping[str, Node], path: str) -> dict[str, str]:
        node = fields.get("labels")
        if node is None or node.missing:
            return {}
        if not isinstance(node.value, dict):
            raise _Wrong("expected a mapping", node, f"{path}.labels")
        labels = {}
        for key, value in node.value.items():
            if not isinstance(value.value, str):
                raise _Wrong("expected a scalar", value, f"{path}.labels.{key[:80]}")
            labels[key] = value.value
        return labels

    def _metrics_url(
        self, fields: Mapping[str, Node], labels: Mapping[str, str], node: Node, path: str, host: str, port: int
    ) -> str:
        url = self._text(fields, "metrics_url", node, path, default="")
        if url:
            if not url.startswith(("http://", "https://")):
                raise _Wrong(f"{url[:80]!r} is neither http nor https", fields["metrics_url"], f"{path}.metrics_url")
            return url
        other_host, other_port = labels.get("metricsAddress"), labels.get("metricsPort")
        if not other_host and not other_port:
            return ""
        if other_port and not (_DIGITS.fullmatch(other_port) and 1 <= int(other_port) <= 65535):
            raise _Wrong(f"{other_port[:80]!r} is no port", fields["labels"], f"{path}.labels.metricsPort")
        return f"http://{join(other_host or host, int(other_port or port))}/metrics"

    def _text(self, fields: Mapping[str, Node], key: str, node: Node, path: str, default: str | None = None) -> str:
        found = fields.get(key)
        if found is None or found.missing:
            if default is None:
                raise _Wrong(f"`{key}` is missing", found or node, path)
            return default
        if not isinstance(found.value, str):
            raise _Wrong("expected a scalar", found, f"{path}.{key}")
        return found.value.strip()
