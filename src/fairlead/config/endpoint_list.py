"""Reads lists of endpoints: those in configurations, and endpoints files (YAML or JSON).

The format of an entry is that of file discovery, with short forms:

- 10.0.0.1:8000             # only an address
- name: vllm-0              # optional; without it the id is the address
  namespace: default        # optional; the id is namespace/name
  address: 10.0.0.1         # required: IPv4, IPv6 or a host name, with or without the port
  port: 8000                # if the address has none; 1-65535, number or string
  labels: {model-id: llama} # optional, scalars; metricsAddress and metricsPort change the metrics URL
  metricsUrl: http://10.0.0.1:9400/metrics    # optional; `metrics_url` is the same

Rules
* Reading a list raises nothing. Every error becomes a `Problem` with a JSON path and a line.
* A wrong entry only affects itself. `Listing.broken` contains its id if it could be read, so that a reload can keep
  the earlier entry. `Listing.ok` is false if the text as a whole could not be read.
* An id or an address that an earlier entry has is an error. `Listing.broken` has the ids of both, since either may be
  meant. The first of the two is among the entries, for lists that are read for the first time.
"""

import re
from collections.abc import Mapping
from ipaddress import IPv6Address, ip_address
from urllib.parse import urlsplit

from msgspec import Struct

from fairlead.config.problems import Place, Problem, show, suggestion
from fairlead.config.yaml import Node, YamlError, parse_yaml
from fairlead.core.endpoint import Endpoint, host_port
from fairlead.core.text import masked

#: The most labels of one endpoint. YAML aliases may repeat a large mapping for every entry of a list.
MAX_LABELS = 100
MAX_ENDPOINTS = 10_000
_TWICE = "leave one out, or give each a name and an address of its own"
KEYS = ("address", "labels", "metricsUrl", "name", "namespace", "port")
_KEYS = frozenset({*KEYS, "metrics_url"})
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_HOST = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
#: The labels with the port and the host of the metrics page, where they are not those of the address.
PORT_LABEL, HOST_LABEL = "metricsPort", "metricsAddress"
#: What is wrong with a text that is not `is_host`.
NO_HOST = "is neither an IP address nor a host name"
_DIGITS = re.compile(r"[0-9]{1,5}")


class Listed(Struct, frozen=True):
    """One entry. `endpoint.address` and the default metrics URL contain the host as written."""

    endpoint: Endpoint
    host: str
    port: int
    #: Whether the host is an address, which needs no resolving.
    literal: bool

    def resolved(self, ip: str) -> Endpoint:
        """The endpoint with its host name resolved to `ip`."""
        old = self.endpoint
        return Endpoint(old.id, host_port(ip, self.port), old.labels, old.metrics_url)


class WrongEntry(Exception):
    """An entry cannot be used. `endpoint_id` is empty if its id could not be read."""

    def __init__(self, message: str, line: int, place: Place, hint: str = "") -> None:
        self.problem = Problem(show(place), line, message, hint)
        self.endpoint_id = ""


def read_entry(node: Node, place: Place) -> Listed:
    """Read one entry. Raises `WrongEntry`."""
    entry = _open(node, place)
    endpoint_id = _named(entry)
    try:
        return _listed(entry, endpoint_id)
    except WrongEntry as wrong:
        wrong.endpoint_id = endpoint_id
        raise


class _Entry(Struct):
    """An entry that is being read."""

    node: Node
    #: The place of its fields. In the short form, the address is the entry itself.
    place: Place
    fields: Mapping[str, Node]

    def place_of(self, key: str) -> Place:
        return (*self.place, key) if isinstance(self.node.value, dict) else self.place

    def line(self, key: str) -> int:
        return self.node.key_lines.get(key, self.node.line)

    def has(self, key: str) -> bool:
        field = self.fields.get(key)
        return field is not None and not field.missing

    def text(self, key: str, default: str = "") -> str:
        """A scalar as text. Raises `WrongEntry` for anything else."""
        if not self.has(key):
            return default
        value = self.fields[key].value
        if not isinstance(value, str):
            raise self.wrong(key, "expected a scalar")
        return value.strip()

    def wrong(self, key: str, message: str, hint: str = "") -> WrongEntry:
        return WrongEntry(message, self.line(key), self.place_of(key), hint)

    def missing(self, key: str, hint: str = "") -> WrongEntry:
        return WrongEntry(f"`{key}` is missing", self.line(key), self.place, hint)


def _open(node: Node, place: Place) -> _Entry:
    if isinstance(node.value, dict):
        return _Entry(node, place, node.value)
    if isinstance(node.value, str) and not node.missing:
        return _Entry(node, place, {"address": node})
    raise WrongEntry("expected host:port, or a mapping with an address", node.line, place)


def _named(entry: _Entry) -> str:
    """The endpoint's id by its name; empty = it has no name, and its address becomes the id."""
    name = entry.text("name")
    namespace = entry.text("namespace", "default")
    if not entry.has("name"):
        return ""
    for key, text in (("name", name), ("namespace", namespace)):
        if not _NAME.fullmatch(text):
            raise entry.wrong(key, f"{text[:80]!r} is not a valid name (letters, digits, `.`, `_`, `-`)")
    return f"{namespace}/{name}"


def _listed(entry: _Entry, endpoint_id: str) -> Listed:
    for key in entry.fields:
        if key not in _KEYS:
            raise entry.wrong(key, f"unknown field {key[:80]!r}", suggestion(key[:80], KEYS))
    host, behind = _split(entry)
    address, literal = _host(entry, host)
    port = _port(entry, behind)
    labels = _labels(entry)
    url = _metrics_url(entry, labels)
    where = host_port(address, port)
    return Listed(Endpoint(endpoint_id or where, where, labels, url), address, port, literal)


def _split(entry: _Entry) -> tuple[str, str | None]:
    """The address as (host, text after its colon; `None` = no colon)."""
    text = entry.text("address")
    if not entry.has("address"):
        raise entry.missing("address")
    if "://" in text:
        raise entry.wrong("address", f"{text[:80]!r} is a URL", "write host:port, without scheme and path")
    if text.startswith("[") and "]" in text:
        host, _, behind = text.partition("]")
        if not behind or behind[0] == ":":
            return host + "]", behind[1:] if behind else None
    elif text.count(":") == 1:
        host, _, behind = text.partition(":")
        return host, behind
    return text, None


def _host(entry: _Entry, text: str) -> tuple[str, bool]:
    """(IP address or host name, whether it is an address)."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        address = ip_address(bare)
    except ValueError:
        if bare != text or not _is_host_name(bare):
            raise entry.wrong("address", f"{text[:80]!r} {NO_HOST}") from None
        return bare, False
    if isinstance(address, IPv6Address) and address.scope_id:
        raise entry.wrong("address", "an IPv6 zone cannot be dialled by the gateway")
    return str(address), True


def is_host(text: str) -> bool:
    """Whether the text is an IP address without a zone, or a host name."""
    try:
        ip_address(text)
    except ValueError:
        return _is_host_name(text)
    return "%" not in text


def _is_host_name(text: str) -> bool:
    # Only digits and dots: a mistyped IPv4 address. The resolver would turn `10.1` into 10.0.0.1.
    numeric = text.replace(".", "").isdigit()
    return not numeric and _HOST.fullmatch(text) is not None and len(text) <= 253


def _port(entry: _Entry, behind: str | None) -> int:
    if behind is not None and entry.has("port"):
        raise entry.wrong("port", "the address has a port already")
    if behind is None and not entry.has("port"):
        raise entry.missing("port", "write it behind the address: 10.0.0.1:8000")
    text = entry.text("port") if behind is None else behind
    port = port_number(text)
    if not port:
        raise entry.wrong("port" if behind is None else "address", f"{text[:80]!r} is not a port (1 to 65535)")
    return port


def port_number(text: str) -> int:
    """The port number in a text, 1 to 65535; 0 = the text is not a port."""
    port = int(text) if _DIGITS.fullmatch(text) else 0
    return port if port <= 65535 else 0


def _labels(entry: _Entry) -> dict[str, str]:
    if not entry.has("labels"):
        return {}
    node = entry.fields["labels"]
    if not isinstance(node.value, dict):
        raise entry.wrong("labels", "expected a mapping")
    if len(node.value) > MAX_LABELS:
        raise entry.wrong("labels", f"more than {MAX_LABELS} labels")
    labels = {}
    for key, value in node.value.items():
        if not isinstance(value.value, str):
            raise WrongEntry("expected a scalar", node.key_lines[key], (*entry.place_of("labels"), key))
        labels[key] = value.value
    return labels


def _metrics_url(entry: _Entry, labels: Mapping[str, str]) -> str:
    """The URL of the metrics page; empty = the entry gives none, and `config.checks.with_page` sets it."""
    key = "metrics_url" if "metrics_url" in entry.fields else "metricsUrl"
    url = entry.text(key)
    if url:
        if fault := url_fault(url):
            raise entry.wrong(key, fault)
        return url
    other_port = labels.get(PORT_LABEL)
    if other_port and not port_number(other_port):
        place = (*entry.place_of("labels"), PORT_LABEL)
        raise WrongEntry(f"{other_port[:80]!r} is not a port", entry.line("labels"), place)
    other_host = labels.get(HOST_LABEL)
    if other_host and not is_host(other_host):
        place, hint = (*entry.place_of("labels"), HOST_LABEL), f"a port goes into {PORT_LABEL}"
        raise WrongEntry(f"{other_host[:80]!r} {NO_HOST}", entry.line("labels"), place, hint)
    return ""


def url_fault(url: str) -> str:
    """Why no page can be read at this URL; empty = it can."""
    shown = masked(url)[:80]
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        return f"{shown!r} is no URL: {error}"
    if parts.scheme not in ("http", "https"):
        return f"{shown!r} is neither http nor https"
    if parts.username is not None or parts.password is not None:
        return "the URL has a user or a password, which are not sent; a token can be (metrics.tokenFile)"
    if not host.isascii() or not host or any(c <= " " for c in host) or port == 0:
        return f"{shown!r} has no usable host and port"
    return ""


class Listing(Struct, frozen=True):
    """The content of a list."""

    entries: tuple[Listed, ...] = ()
    problems: tuple[Problem, ...] = ()
    #: Ids of wrong entries. If such an id is in `entries` too, that entry counts only if no list was applied before.
    broken: frozenset[str] = frozenset()
    #: Whether the id of some wrong entry could not be read.
    nameless: bool = False
    ok: bool = True

    @property
    def endpoints(self) -> list[Endpoint]:
        return [entry.endpoint for entry in self.entries]


def parse_endpoints_text(text: bytes) -> Listing:
    """Parse a file: a mapping with the key `endpoints`, or just a list. JSON is read as YAML."""
    try:
        tree = parse_yaml(text)
    except YamlError as error:
        return _unreadable(error.problem)
    if tree.faults:
        return _unreadable(tree.faults[0])
    root = tree.root
    place: Place = ()
    if isinstance(root.value, dict):
        extra = sorted(set(root.value) - {"endpoints"})
        if extra:
            line = root.value[extra[0]].line
            return _unreadable(Problem("$", line, f"unknown field {extra[0][:80]!r}", "known: endpoints"))
        if "endpoints" in root.value:
            root, place = root.value["endpoints"], ("endpoints",)
    if root.missing and place:
        hint = "write [] for an empty list"
        return _unreadable(Problem(show(place), root.line, "there is nothing in it", hint))
    return read_endpoints(root, place)


def read_endpoints(node: Node, place: Place) -> Listing:
    """Read a list at `place` in a larger document."""
    if not isinstance(node.value, list):
        return _unreadable(Problem(show(place), node.line, "expected a list of endpoints"))
    if len(node.value) > MAX_ENDPOINTS:
        line = node.value[MAX_ENDPOINTS].line
        return _unreadable(Problem(show(place), line, f"more than {MAX_ENDPOINTS} endpoints"))
    entries: dict[str, Listed] = {}
    problems: list[Problem] = []
    broken, doubtful, nameless = set[str](), set[str](), False
    owners: dict[str, str] = {}  # endpoint ids by address
    for i, entry in enumerate(node.value):
        try:
            listed = read_entry(entry, (*place, i))
        except WrongEntry as wrong:
            problems.append(wrong.problem)
            broken |= {wrong.endpoint_id} - {""}
            nameless = nameless or not wrong.endpoint_id
            continue
        name, address = listed.endpoint.id, listed.endpoint.address
        owner = owners.setdefault(address, name)
        twice = name in entries
        if twice or owner != name:
            message = f"{name} is listed twice" if twice else f"{address} is the address of {owner} already"
            problems.append(Problem(show((*place, i)), entry.line, message, _TWICE))
            doubtful |= {name, owner}
            nameless = nameless or twice  # the duplicate may be a misspelled name of any endpoint
            continue
        broken.discard(name)
        entries[name] = listed
    usable = tuple(listed for name, listed in entries.items() if name not in broken)
    return Listing(usable, tuple(problems), frozenset(broken | doubtful), nameless)


def _unreadable(problem: Problem) -> Listing:
    return Listing(problems=(problem,), ok=False)
