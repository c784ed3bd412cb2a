"""`endpoints:` of a configuration: a list, or a file that holds one. The entries are those of an endpoints file, see
`fairlead.wire.endpoint_list`."""

from pathlib import Path
from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from fairlead.config.check import INVALID, struct
from fairlead.config.engines import note_unknown_engines
from fairlead.config.files import read_bytes
from fairlead.config.problems import Report, describe
from fairlead.config.schema import EndpointSource, Metrics, Section
from fairlead.model.errors import ConfigError
from fairlead.wire.endpoint_list import parse_endpoints_text, read_endpoints
from fairlead.wire.plain_yaml import Node
from fairlead.wire.problem import Place

_TWICE = "leave one out, or give each a name and an address of its own"


class FileSource(Section, frozen=True, kw_only=True):
    file: Annotated[str, Meta(min_length=1)]
    watch: bool = True


def read_source(value: object, node: Node, place: Place, report: Report, base: Path | None) -> EndpointSource:
    """A list, or `{file, watch}` with a path relative to `base`; `node` is the same as `value`, as text.

    In a configuration the warnings of a list are problems: what stands twice there is a mistake.
    """
    if isinstance(value, list):
        listing = read_endpoints(node, place)
        report.extend([replace(one, hint=_TWICE, warning=False) if one.warning else one for one in listing.problems])
        return EndpointSource(static=listing.entries)
    if not isinstance(value, dict):
        report.add(place, f"expected a list, or file: and a path; got {describe(value)}")
        return EndpointSource()
    found = struct(FileSource, value, place, report)
    if found is INVALID:
        return EndpointSource()
    return EndpointSource(file=str(base / found.file) if base else found.file, watch=found.watch)


def check_file(path: str, place: Place, report: Report, metrics: Metrics) -> None:
    """Reports what is wrong with an endpoints file, and notes what it warns of: who follows it goes on."""
    try:
        listing = parse_endpoints_text(read_bytes(Path(path)))
    except ConfigError as error:
        report.add(place, str(error))
        return
    for problem in listing.problems:
        tell = report.note if problem.warning else report.add
        tell(place, problem.render(path))
    note_unknown_engines(listing.entries, metrics, place, report, path)
