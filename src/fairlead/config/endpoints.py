"""Endpoints as written in the configuration or in an endpoints file.

Three forms of an entry are understood:

    10.0.0.1:8000
    {name: vllm-0, address: "10.0.0.1:8000", labels: {…}, metricsUrl: "http://10.0.0.1:9400/metrics"}
    {name: vllm-0, namespace: default, address: 10.0.0.1, port: "8000", labels: {…}}

The last is the endpoints file of the reference picker (llm-d-router, file-discovery). Addresses are literal: the
gateway dials what the scheduler says, and must not resolve names per request. The id is `namespace/name`, without a
name the address.
"""

from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, field

from fairlead.config.check import INVALID, struct
from fairlead.config.problems import Place, Problem, Report, describe
from fairlead.config.schema import EndpointSource, Section
from fairlead.config.yamltree import parse
from fairlead.model.endpoint import Endpoint

Name = Annotated[str, Meta(min_length=1, max_length=253)]


class Entry(Section, frozen=True, kw_only=True):
    """One endpoint in a file."""

    address: str
    name: Name | None = None
    namespace: Name = "default"
    #: Where `address` has none. A string, as in the reference, or a number.
    port: int | str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    #: Empty = `http://{address}/metrics`.
    metrics_url: str = ""


class FileSource(Section, frozen=True, kw_only=True):
    file: Annotated[str, Meta(min_length=1)]
    watch: bool = True


def read_source(node: object, place: Place, report: Report, base: Path | None) -> EndpointSource:
    """`endpoints:` of a configuration: a list, or `{file, watch}` with a path relative to `base`."""
    if isinstance(node, list):
        return EndpointSource(static=tuple(read_list(node, place, report)))
    if not isinstance(node, dict):
        report.add(place, f"expected a list, or file: and a path; got {describe(node)}")
        return EndpointSource()
    found = struct(FileSource, node, place, report)
    if found is INVALID:
        return EndpointSource()
    return EndpointSource(file=str(base / found.file) if base else found.file, watch=found.watch)


def read_file_text(text: str | bytes) -> tuple[list[Endpoint], list[Problem]]:
    """The text of an endpoints file: `endpoints: [...]` or a list alone. Whatever is valid, and what is not.

    Never raises. With problems, the caller decides whether to go on with the rest or to keep what it had.
    """
    document = parse(text)
    report = Report(document.lines)
    report.extend(document.problems)
    node, place = document.value, ()
    if isinstance(node, dict):
        for key in node:
            if key != "endpoints":
                report.unknown((key,), "field", key, ["endpoints"])
        node, place = node.get("endpoints"), ("endpoints",)  # type: ignore[assignment]
    found: list[Endpoint] = []
    if isinstance(node, list):
        found = read_list(node, place, report)
    elif not report.problems:
        report.add(place, f"expected a list of endpoints, got {describe(node)}")
    report.close()
    return found, report.problems


def read_list(node: list[Any], place: Place, report: Report) -> list[Endpoint]:
    """Valid entries with unique ids and addresses; everything else is reported and left out."""
    found: list[Endpoint] = []
    ids: dict[str, int] = {}
    addresses: dict[str, int] = {}
    for i, item in enumerate(node):
        endpoint = _endpoint(item, (*place, i), report)
        if endpoint is None:
            continue
        if endpoint.id in ids:
            report.add((*place, i), f"endpoint '{endpoint.id}' is there already, as number {ids[endpoint.id] + 1}")
        elif endpoint.address in addresses:
            number = addresses[endpoint.address] + 1
            report.add((*place, i), f"address {endpoint.address} is there already, as number {number}")
        else:
            found.append(endpoint)
        ids.setdefault(endpoint.id, i)
        addresses.setdefault(endpoint.address, i)
    return found


def _endpoint(item: object, place: Place, report: Report) -> Endpoint | None:
    if isinstance(item, str):
        item, where = {"address": item}, place
    else:
        where = (*place, "address")
    entry = struct(Entry, item, place, report, {"address": where})
    if entry is INVALID:
        return None
    address = _address(entry, place, where, report)
    if not address:
        return None
    if entry.metrics_url and not entry.metrics_url.startswith(("http://", "https://")):
        report.add((*place, "metricsUrl"), f"expected an http or https URL, got {describe(entry.metrics_url)}")
        return None
    return Endpoint(
        id=f"{entry.namespace}/{entry.name}" if entry.name else address,
        address=address,
        labels=entry.labels,
        metrics_url=entry.metrics_url,
    )


def _address(entry: Entry, place: Place, where: Place, report: Report) -> str:
    """`10.0.0.1:8000` or `[fd00::1]:8000`; empty once the problem is reported."""
    text, port = entry.address.strip(), entry.port
    if text.startswith("[") and "]" in text:
        host, _, rest = text[1:].partition("]")
    elif text.count(":") > 1:
        host, rest = text, ""
    else:
        host, colon, rest = text.partition(":")
        rest = colon + rest
    try:
        ip = ip_address(host)
    except ValueError:
        report.add(where, f"expected an IP address and port, got {describe(text)}", _cure(text))
        return ""
    if rest and port is not None:
        report.add((*place, "port"), "the address has a port already")
        return ""
    number = _port(rest.removeprefix(":") if rest else port)
    if number is None:
        report.add(where if port is None else (*place, "port"), "expected a port from 1 to 65535", "10.0.0.1:8000")
        return ""
    return f"[{ip}]:{number}" if ip.version == 6 else f"{ip}:{number}"


def _port(port: int | str | None) -> int | None:
    text = str(port) if not isinstance(port, int) or port.bit_length() < 32 else ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= 65535 else None


def _cure(text: str) -> str:
    if "://" in text:
        return "leave out the scheme: 10.0.0.1:8000"
    if text.startswith("localhost"):
        return f"write {text.replace('localhost', '127.0.0.1', 1)}"
    return "names are not resolved; write a literal address such as 10.0.0.1:8000"
