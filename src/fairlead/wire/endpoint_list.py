"""A list of endpoints to `Endpoint`s: the one reader of configurations and of endpoints files (YAML or JSON).

    endpoints:
    - 10.0.0.1:8000
    - {name: vllm-1, address: 10.0.0.2, port: 8000, labels: {model-id: llama}}    # all fields: see `endpoint_entry`

Rules
* Nothing raises. Whatever is wrong becomes a `Problem` with a JSON path and a line.
* A wrong entry costs only itself; `Listing.broken` names it if its id could be read, so that a reload can keep what
  it knew of it. `Listing.ok` is false when the text as a whole could not be read.
* Of two entries with one id the last counts, with a warning. One address for two ids is used, with a warning too.
"""

from msgspec import Struct

from fairlead.model.endpoint import Endpoint
from fairlead.wire.endpoint_entry import Listed, WrongEntry, read_entry
from fairlead.wire.plain_yaml import Node, YamlError, parse_yaml
from fairlead.wire.problem import Place, Problem, show

MAX_ENDPOINTS = 10_000


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
    """A file's content: a mapping with the key `endpoints`, or a list alone. JSON is read as the YAML that it is."""
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
    """A list that stands at `place` in a larger document."""
    if not isinstance(node.value, list):
        return _unreadable(Problem(show(place), node.line, "expected a list of endpoints"))
    if len(node.value) > MAX_ENDPOINTS:
        line = node.value[MAX_ENDPOINTS].line
        return _unreadable(Problem(show(place), line, f"more than {MAX_ENDPOINTS} endpoints"))
    reader = _Reader()
    for i, entry in enumerate(node.value):
        reader.take(entry, (*place, i))
    return reader.listing()


def _unreadable(problem: Problem) -> Listing:
    return Listing(problems=(problem,), ok=False)


class _Reader:
    """Takes entries one after the other."""

    def __init__(self) -> None:
        self._entries: dict[str, Listed] = {}
        self._problems: list[Problem] = []
        self._broken: set[str] = set()
        self._nameless = False
        #: Who has an address.
        self._owners: dict[str, str] = {}

    def listing(self) -> Listing:
        entries = tuple(entry for name, entry in self._entries.items() if name not in self._broken)
        return Listing(entries, tuple(self._problems), frozenset(self._broken), self._nameless)

    def take(self, node: Node, place: Place) -> None:
        try:
            listed = read_entry(node, place)
        except WrongEntry as wrong:
            self._problems.append(wrong.problem)
            if wrong.endpoint_id:
                self._broken.add(wrong.endpoint_id)
            else:
                self._nameless = True
            return
        name, address = listed.endpoint.id, listed.endpoint.address
        warning = hint = ""
        if self._entries.pop(name, None) is not None:
            warning, hint = f"{name} is listed twice", "the last counts"
        elif address in self._owners:
            warning = f"{address} is the address of {self._owners[address]} already"
        if warning:
            self._problems.append(Problem(show(place), node.line, warning, hint, warning=True))
        self._owners.setdefault(address, name)
        self._broken.discard(name)
        self._entries[name] = listed
