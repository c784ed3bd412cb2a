"""Reads the metrics page of a model server (Prometheus text format) into a `Sample`. Decodes only what is needed."""

import re
from collections.abc import Callable, Iterable
from functools import cache
from math import inf, isfinite

from msgspec import Struct
from msgspec.structs import replace

from fairlead.apis.engine_metrics import EngineSpecs
from fairlead.core.endpoint import Sample

# One sample line of the Prometheus text format: `name{labels} value [timestamp] [# exemplar]`.
#
# Numbers are read as the format's parsers do, but only finite ones count: a queue length of NaN or infinity is treated
# as unreadable.

# Possessive quantifiers cannot backtrack, so even a hostile page costs only linear time.
_LABELS_AND_VALUE = re.compile(
    rb'[ \t]*+(\{(?:[^"}\n]*+"(?:[^"\\\n]++|\\.)*+")*+[^"}\n]*+\})?[ \t]*+([^\s#]++)'
    rb"(?:[ \t]++[0-9.eE+-]++)?[ \t\r]*+(?:#.*+)?"
)
_LABEL = re.compile(rb'[ \t]*+([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*+=[ \t]*+"((?:[^"\\]++|\\.)*+)"[ \t]*+(,|$)')
_ESCAPE = re.compile(rb'\\([\\"n])')
MOST_LABELS = 1024


def came_instead(page: bytes) -> str:
    """What a page is, in words, that is surely no metrics page; empty = it may be one. A proxy's login page is HTML
    with status 200."""
    start = page.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"<"):
        return "an HTML page"
    if start.startswith((b"{", b"[")):
        return "JSON"
    return "" if start else "an empty page"


def parse_sample(line: bytes, begin: int) -> tuple[bytes, float] | None:
    """(text between the braces, value) of a line whose name ends at `begin`; `None` = malformed or not finite."""
    match = _LABELS_AND_VALUE.fullmatch(line, begin)
    if match is None:
        return None
    value = parse_value(match[2])
    if value is None:
        return None
    braces: bytes | None = match[1]
    return (braces[1:-1] if braces else b""), value


def parse_value(text: bytes) -> float | None:
    """A finite decimal number, else `None`. Python's digit separators (`1_0`) are not part of the format."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) and b"_" not in text else None


def parse_labels(inner: bytes) -> dict[str, str] | None:
    """The labels in the text between the braces; `None` = malformed, or more than `MOST_LABELS`. If a label is
    repeated, its last value counts."""
    labels: dict[str, str] = {}
    position = 0
    while position < len(inner):
        if len(labels) > MOST_LABELS:
            return None
        match = _LABEL.match(inner, position)
        if match is None:
            return labels if not inner[position:].strip() and labels else None
        value = match[2]
        if b"\\" in value:
            value = _ESCAPE.sub(lambda m: b"\n" if m[1] == b"n" else m[1], value)
        labels[match[1].decode()] = value.decode("utf-8", "replace")
        position = match.end()
    return labels


# Finds a metric family on a metrics page, and finds it again cheaply on the next page.
#
# Rules
# * A sample line starts with the family's name, followed by `{`, a space or a tab. HELP and TYPE lines start with `#`,
#   so a name in a help text never counts.
# * A page whose last line has no newline was cut off. That line is not read as a sample, and its family is incomplete.
# * `find_family` searches the whole page, so it also reads scattered samples and pages without TYPE lines.
# * `Family.still_at` is the cheap check, for families whose lines are contiguous: a TYPE line, the samples, then the
#   next comment or the end of the page. Pages of one server differ little, so the check looks for the old text where
#   it was. It compares from the TYPE line to the following `#`, so a series that was added at either end is noticed.
#   Measured on a 51 kB page of vLLM 0.32: 0.15 µs if found, against 7 to 13 µs for a search of the rest of the page.

#: How far (bytes) a family may have moved between two pages and still be found without a full search.
SLACK = 256
#: A family with more series is not read. An engine has one per rank; only `lora_requests_info` keeps growing.
MOST_SERIES, MOST_ADAPTER_SERIES = 1024, 10_000


class Series(Struct):
    """One sample: the raw text between its braces, and its value. `None` = malformed, not finite, or cut off."""

    inner: bytes
    value: float | None
    _labels: dict[str, str] | None = None
    _parsed: bool = False

    def labels(self) -> dict[str, str] | None:
        """The labels, parsed at the first call; `None` = malformed."""
        if not self._parsed:
            self._labels = parse_labels(self.inner)
            self._parsed = True
        return self._labels

    def has(self, wanted: tuple[tuple[str, str], ...]) -> bool:
        if not wanted:
            return True
        labels = self.labels()
        return labels is not None and all(labels.get(name, "") == value for name, value in wanted)


#: Stands for all samples of a family that has more than are read.
ENDLESS = Series(b"", None)


class Family(Struct):
    """All samples of a metric family on one page."""

    name: bytes
    series: list[Series]
    #: The TYPE line, the samples and the `#` behind them; empty if the family's lines are not contiguous.
    text: bytes = b""
    at: int = 0
    #: Whether the page ends right behind the family.
    last: bool = False

    @property
    def endless(self) -> bool:
        """Whether the family has too many samples. Then it is read again only when the whole page is."""
        return self.series[0] is ENDLESS

    def still_at(self, page: bytes) -> bool:
        """Whether the same text is on `page` where it was, or nearby. Remembers the new place."""
        text, start = self.text, self.at
        if not page.startswith(text, start):
            start = page.find(text, max(start - SLACK, 0), start + len(text) + SLACK)
            if start < 0:
                return False
            self.at = start
        return not self.last or start + len(text) == len(page)

    def nearby(self, page: bytes) -> "Family | None":
        """The family as it is now, searched only around its old place. `None` = not found, or not contiguous."""
        anchor = b"\n# TYPE " + self.name + b" "
        position = page.find(anchor, max(self.at - SLACK - 1, 0), self.at + len(anchor) + SLACK)
        if position < 0:
            return None
        start = end = page.find(b"\n", position + 1) + 1
        for _ in range(len(self.series) + SLACK):
            stop = _sample_end(page, self.name, end) if start else 0
            if not stop:
                break
            end = stop
        return _in_one_piece(page, self.name, start, end) if end > start else None


def find_family(page: bytes, name: bytes, before: Family | None = None, most: int = MOST_SERIES) -> Family | None:
    """Find all samples of the family `name`; `None` = not on the page. Time is linear in the page. If there are more
    than `most` samples, the result has only `ENDLESS`.

    `before`: the family on an earlier page. If its text is the same, its series are reused instead of parsed again.
    """
    spans: list[tuple[int, int]] = []
    if end := _sample_end(page, name, 0):
        spans.append((0, end))
    while match := _begin(name).search(page, max(end - 1, 0)):
        end = page.find(b"\n", match.end()) + 1 or len(page)
        spans.append((match.start() + 1, end))
        if len(spans) > most:
            return Family(name, [ENDLESS])
    if not spans:
        return None
    start, end = spans[0][0], spans[-1][1]
    in_one_piece = end - start == sum(stop - begin for begin, stop in spans)
    if in_one_piece and (family := _in_one_piece(page, name, start, end, before)):
        return family
    return Family(name, [_series(page, name, begin, stop) for begin, stop in spans])


@cache
def _begin(name: bytes) -> re.Pattern[bytes]:
    """Where a line before a sample of the family ends and the sample begins. As fast as `bytes.find`, also on a page
    full of names that begin alike."""
    return re.compile(b"\n" + re.escape(name) + rb"(?=[{ \t])")


def _sample_end(page: bytes, name: bytes, start: int) -> int:
    """Where the line behind a sample begins, if a sample of the family begins at `start`; 0 = none does."""
    behind = start + len(name)
    if not page.startswith(name, start) or page[behind : behind + 1] not in (b"{", b" ", b"\t"):
        return 0
    return page.find(b"\n", behind) + 1 or len(page)


def _in_one_piece(page: bytes, name: bytes, start: int, end: int, before: Family | None = None) -> Family | None:
    """The family with the samples `start:end`; `None` unless a TYPE line precedes and a comment or nothing follows."""
    type_at = page.rfind(b"\n", 0, max(start - 1, 0)) + 1
    last = end == len(page)
    if not page.startswith(b"# TYPE " + name + b" ", type_at) or not (last or page[end : end + 1] == b"#"):
        return None
    if page[end - 1 : end] != b"\n":
        return None
    text = page[type_at : end if last else end + 1]
    if before is not None and before.text == text:
        return Family(name, before.series, text, type_at, last)
    series = []
    position = start
    while position < end:
        stop = page.find(b"\n", position) + 1
        series.append(_series(page, name, position, stop))
        position = stop
    return Family(name, series, text, type_at, last)


def _series(page: bytes, name: bytes, start: int, end: int) -> Series:
    line = page[start:end]
    if not line.endswith(b"\n"):
        return Series(line, None)
    sample = parse_sample(line[:-1], len(name))
    return Series(line, None) if sample is None else Series(sample[0], sample[1])


# Reads a model server's metrics page (Prometheus text) into a `Sample`, decoding only the families that matter.
#
# Rules
# * A field that cannot be read is `None`, and `Reading.problems` says why. Nothing here raises, whatever the bytes.
# * If a field has several series (data-parallel engines on one page), counts are summed and the highest KV usage
#   counts. If one series is unreadable, the field is `None`: half a sum would look like an idle endpoint. The number of
#   engines is the number of different values of the rank label.
# * `lora_requests_info` keeps old label sets forever; the value of a series is the time when its labels were true. So
#   the series with the highest value counts.
# * A process never removes that family from its page. If an endpoint had it before and a complete page lacks it, the
#   process is new and has loaded nothing yet: `adapters` is empty, not `None`.
# * A reader remembers one endpoint's page. `read(page, full=False)` compares the families where they were before and
#   parses only what changed. It does not notice a family that is new on the page; the next full read does.

#: How far a share may exceed 1 by rounding. A value of 37 would be a percentage, and every endpoint would look full.
_SHARE_TOLERANCE = 1e-3
_MAX_SHOWN = 100
#: A label with more adapter names is not read.
MOST_NAMES = 10_000
#: Largest count that is accepted, so that `int()` and sums stay exact.
_MAX_COUNT = 1e15
#: The load gauges. The first of them that is on the page tells how many ranks there are.
_LOADS = ("running", "waiting", "kv_usage")


class Reading(Struct, frozen=True):
    """The content of a page. `problems` name the fields of the engine's table that are missing or unreadable."""

    sample: Sample
    problems: tuple[str, ...] = ()
    #: The page says that no engine behind it takes requests.
    asleep: bool = False

    @property
    def empty(self) -> bool:
        """Whether the page has none of the load gauges, so that it is not a page of this engine."""
        return self.sample.waiting is None and self.sample.running is None and self.sample.kv_usage is None


class PageReader:
    """Reads the pages of one endpoint, one after another."""

    def __init__(self, specs: EngineSpecs) -> None:
        self._specs = specs
        self._families: dict[bytes, Family | None] = {}
        self._steady = False
        self._last: Reading | None = None
        self._had_adapters = False

    def read(self, page: bytes, full: bool = True) -> Reading:
        """Read a page. Returns the same object as last time if nothing of interest changed."""
        changed: bool | None = None
        if not full and self._steady and self._last is not None and page.endswith(b"\n"):
            changed = self._refresh(page)
            if changed is False:
                return self._last
        before = self._families
        if changed is None:
            self._families = {}
        reading = _Interpreter(self._specs, page, self._families, before, self._had_adapters).reading()
        self._had_adapters = self._had_adapters or reading.sample.adapters is not None
        self._steady = all(family is None or family.text or family.endless for family in self._families.values())
        if reading != self._last:
            self._last = reading
        assert self._last is not None
        return self._last

    def _refresh(self, page: bytes) -> bool | None:
        """Update the known families from `page`. Returns whether any changed; `None` = one was not found."""
        changed = False
        for name, family in self._families.items():
            if family is None or family.still_at(page):
                continue
            now = family.nearby(page)
            if now is None:
                return None
            self._families[name] = now
            changed = True
        return changed


def read_page(page: bytes, specs: EngineSpecs) -> Reading:
    """Read one page without an earlier one."""
    return PageReader(specs).read(page)


class _Interpreter:
    """Makes a `Reading` of one page. Families that `known` lacks are searched for, and added to it."""

    def __init__(
        self,
        specs: EngineSpecs,
        page: bytes,
        known: dict[bytes, Family | None],
        before: dict[bytes, Family | None],
        had_adapters: bool,
    ) -> None:
        self._specs = specs
        self._page = page
        self._known = known
        self._before = before
        self._had_adapters = had_adapters
        self._problems: list[str] = []

    def reading(self) -> Reading:
        if self._page and not self._page.endswith(b"\n"):
            self._problems.append("the page is cut off: its last line has no end")
        running_adapters, waiting_adapters, max_adapters = self._adapters()
        block_size, num_blocks, prefix_caching = self._cache()
        sample = Sample(
            ranks=self._ranks(),
            each_step=self._specs.metrics.each_step,
            waiting=self._number("waiting", sum, required=True),
            running=self._number("running", sum, required=True),
            kv_usage=self._number("kv_usage", max, required=True, limit=1.0 + _SHARE_TOLERANCE),
            adapters=running_adapters,
            waiting_adapters=waiting_adapters,
            max_adapters=max_adapters,
            block_size=block_size,
            num_blocks=num_blocks,
            prefix_caching=prefix_caching,
            prefix_queries=self._number("prefix_queries", sum),
            prefix_hits=self._number("prefix_hits", sum),
            generation_tokens=self._number("generation_tokens", sum),
            started=self._number("started", max),
            extra=self._extra(),
        )
        if self._had_adapters and not self._series("lora") and self._complete(sample):
            sample = replace(sample, adapters=frozenset())
        asleep = self._number("awake", max) == 0.0
        return Reading(sample, tuple(self._problems), asleep)

    def _complete(self, sample: Sample) -> bool:
        """Whether the page has its end, and every load gauge that this engine reports."""
        values = {"waiting": sample.waiting, "running": sample.running, "kv_usage": sample.kv_usage}
        there = all(value is not None for field, value in values.items() if self._specs.parsed[field])
        return there and self._page.endswith(b"\n")

    def _series(self, field: str) -> list[Series]:
        """The series of the first of this field's specs that has any on the page; empty = none has."""
        for spec in self._specs.parsed[field]:
            if spec.family not in self._known:
                most = MOST_ADAPTER_SERIES if field == "lora" else MOST_SERIES
                self._known[spec.family] = find_family(self._page, spec.family, self._before.get(spec.family), most)
            family = self._known[spec.family]
            if family is not None:
                series = [row for row in family.series if row.value is None or row.has(spec.labels)]
                if series:
                    return series
        return []

    def _ranks(self) -> int:
        """The number of engines that report their load."""
        series, label = next(filter(None, map(self._series, _LOADS)), []), self._specs.metrics.rank_label
        if len(series) < 2 or not label:
            return min(len(series), 1)
        return len({(row.labels() or {}).get(label) for row in series})

    def _number(
        self,
        field: str,
        combine: Callable[[Iterable[float]], float],
        required: bool = False,
        limit: float = _MAX_COUNT,
        floor: float = 0.0,
    ) -> float | None:
        series, specs = self._series(field), self._specs.parsed[field]
        if not series:
            if required and specs:
                self._problems.append(f"{field}: {specs[0].family.decode()} is not on the page")
            return None
        values: list[float] = []
        for row in series:
            if row.value is None:
                self._unreadable(field, row)
                return None
            if not floor <= row.value <= limit:
                self._problems.append(f"{field}: {row.value:g} is out of range")
                return None
            values.append(row.value)
        total = combine(values)
        return min(total, 1.0) if limit < 2 else total

    def _extra(self) -> dict[str, float]:
        values = {}
        for name in self._specs.metrics.extra:
            value = self._number(f"extra.{name}", sum, required=True, limit=inf, floor=-inf)
            if value is not None:
                values[name] = value
        return values

    def _adapters(self) -> tuple[frozenset[str] | None, frozenset[str], int]:
        rows = self._series("lora")
        unread = next((row for row in rows if row.value is None), None)
        newest: dict[str, str] | None = None
        rows.reverse()
        # Only the newest series is read. If several have the same age, the last of them on the page counts.
        for row in sorted(rows, key=_age):
            newest = row.labels() if row.value is not None else None
            if newest is not None:
                break
            unread = unread or row
        if unread is not None:
            self._unreadable("adapters", unread)
        if newest is None:
            return None, frozenset(), 0
        running, waiting = (_names(newest.get(f"{state}_lora_adapters", "")) for state in ("running", "waiting"))
        if running is None or waiting is None:
            self._problems.append(f"adapters: more than {MOST_NAMES} names")
            return None, frozenset(), 0
        return running, waiting, _count(newest.get("max_lora", ""))

    def _cache(self) -> tuple[int, int, bool]:
        metrics, caching = self._specs.metrics, True
        sizes: list[int] = []
        counts: list[int] = []
        for row in self._series("cache_info"):
            labels = row.labels() if row.value is not None else None
            if labels is None:
                self._unreadable("cache_info", row)
                return 0, 0, True
            caching = caching and labels.get("enable_prefix_caching") != "False"
            sizes.append(_count(labels.get(metrics.block_size_label, "")))
            counts.append(_count(labels.get(metrics.num_blocks_label, "")))
        size = max(sizes, default=0) or int(self._number("block_size", max) or 0)
        # Each engine's labels name the blocks of all engines of the page.
        count = max(counts, default=0)
        return size, count or int(self._number("num_blocks", sum) or 0), caching

    def _unreadable(self, field: str, series: Series) -> None:
        if series is ENDLESS:
            self._problems.append(f"{field}: more series than are read")
            return
        shown = series.inner[:_MAX_SHOWN].decode("utf-8", "replace")
        self._problems.append(f"{field}: unreadable line {shown!r}")


def _names(text: str) -> frozenset[str] | None:
    """The names in a comma-separated list; `None` = more than `MOST_NAMES`."""
    if text.count(",") >= MOST_NAMES:
        return None
    return frozenset(name for part in text.split(",") if (name := part.strip()))


def _age(series: Series) -> float:
    return inf if series.value is None else -series.value


def _count(text: str) -> int:
    """The number in a label such as `16`; 0 for anything else (vLLM writes `None` before it has profiled)."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0
