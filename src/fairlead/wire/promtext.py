"""A model server's metrics page (Prometheus text) to a `Sample`, reading only the families that matter.

Rules
* A field that cannot be read is `None` and says so in `Reading.problems`; nothing here raises, whatever the bytes.
* With several series (data-parallel engines on one page) counts are summed and KV usage is the highest. If one of
  them is unreadable the whole field is: half a sum would look like an idle endpoint.
* `lora_requests_info` keeps old label sets for ever and its value is the time they were true: the newest counts.
* Within one process that family never leaves the page. A whole page without it, of an endpoint that had it before, is
  that of a new process, which has loaded nothing yet: `adapters` is empty, not `None`.
* A reader remembers one endpoint's page. `read(page, full=False)` compares the families where they stood before and
  parses only what changed; a family that is new on the page is seen at the next full read.
"""

from collections.abc import Callable, Iterable
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from fairlead.model.endpoint import Sample
from fairlead.wire.engine_metrics import EngineSpecs, Spec
from fairlead.wire.promfamily import Family, Series, find_family

#: A share may exceed 1 by rounding, not by more: 37 would be a percentage, and every endpoint would look full.
_SHARE_TOLERANCE = 1e-3
_MAX_SHOWN = 100
#: Largest count believed; keeps `int()` and sums sane.
_MAX_COUNT = 1e15


class Reading(Struct, frozen=True):
    """What a page said. `problems` name fields of the engine's table that it lacks or that are unreadable."""

    sample: Sample
    problems: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """None of the load gauges is there: not a page of this engine."""
        return self.sample.waiting is None and self.sample.running is None and self.sample.kv_usage is None


class PageReader:
    """Reads the pages of one endpoint."""

    def __init__(self, specs: EngineSpecs) -> None:
        self._specs = specs
        self._families: dict[bytes, Family | None] = {}
        self._steady = False
        self._last: Reading | None = None
        self._had_adapters = False

    def read(self, page: bytes, full: bool = True) -> Reading:
        """The very same object as last time is returned when nothing of interest changed."""
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
        self._steady = all(family is None or family.text for family in self._families.values())
        if reading != self._last:
            self._last = reading
        assert self._last is not None
        return self._last

    def _refresh(self, page: bytes) -> bool | None:
        """Update the known families from `page`: whether any changed, `None` = not found where they were."""
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
    """Read one page from nothing."""
    return PageReader(specs).read(page)


class _Interpreter:
    """One page's families to one reading. Families that `known` lacks are searched for, and added to it."""

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
        specs = self._specs
        if self._page and not self._page.endswith(b"\n"):
            self._problems.append("the page is cut off: its last line has no end")
        running_adapters, waiting_adapters, max_adapters = self._adapters()
        block_size, num_blocks = self._cache()
        sample = Sample(
            waiting=self._number("waiting", specs.waiting, sum, required=True),
            running=self._number("running", specs.running, sum, required=True),
            kv_usage=self._number("kv_usage", specs.kv_usage, max, required=True, limit=1.0 + _SHARE_TOLERANCE),
            adapters=running_adapters,
            waiting_adapters=waiting_adapters,
            max_adapters=max_adapters,
            block_size=block_size,
            num_blocks=num_blocks,
            prefix_queries=self._number("prefix_queries", specs.prefix_queries, sum),
            prefix_hits=self._number("prefix_hits", specs.prefix_hits, sum),
            extra=self._extra(),
        )
        if self._had_adapters and not self._series(specs.lora) and self._whole(sample):
            sample = replace(sample, adapters=frozenset())
        return Reading(sample, tuple(self._problems))

    def _whole(self, sample: Sample) -> bool:
        """The page has its end, and every load gauge that this engine has."""
        wanted = (self._specs.waiting, self._specs.running, self._specs.kv_usage)
        found = (sample.waiting, sample.running, sample.kv_usage)
        there = all(value is not None for specs, value in zip(wanted, found, strict=True) if specs)
        return there and self._page.endswith(b"\n")

    def _series(self, specs: tuple[Spec, ...]) -> list[Series]:
        """Series of the first spec that has any on the page."""
        for spec in specs:
            if spec.family not in self._known:
                self._known[spec.family] = find_family(self._page, spec.family, self._before.get(spec.family))
            family = self._known[spec.family]
            if family is not None:
                series = [one for one in family.series if one.value is None or one.has(spec.labels)]
                if series:
                    return series
        return []

    def _number(
        self,
        field: str,
        specs: tuple[Spec, ...],
        combine: Callable[[Iterable[float]], float],
        required: bool = False,
        limit: float = _MAX_COUNT,
        floor: float = 0.0,
    ) -> float | None:
        series = self._series(specs)
        if not series:
            if required and specs:
                self._problems.append(f"{field}: {specs[0].family.decode()} is not on the page")
            return None
        values: list[float] = []
        for one in series:
            if one.value is None:
                self._unreadable(field, one)
                return None
            if not floor <= one.value <= limit:
                self._problems.append(f"{field}: {one.value:g} is out of range")
                return None
            values.append(one.value)
        total = combine(values)
        return min(total, 1.0) if limit < 2 else total

    def _extra(self) -> dict[str, float]:
        found = {}
        for name, spec in self._specs.extra:
            value = self._number(f"extra.{name}", (spec,), sum, required=True, limit=inf, floor=-inf)
            if value is not None:
                found[name] = value
        return found

    def _adapters(self) -> tuple[frozenset[str] | None, frozenset[str], int]:
        newest: dict[str, str] | None = None
        newest_at = -inf
        for one in self._series(self._specs.lora):
            labels = one.labels() if one.value is not None else None
            if labels is None or one.value is None:
                self._unreadable("adapters", one)
            elif one.value >= newest_at:
                newest, newest_at = labels, one.value
        if newest is None:
            return None, frozenset(), 0
        waiting = _names(newest.get("waiting_lora_adapters", ""))
        return _names(newest.get("running_lora_adapters", "")), waiting, _count(newest.get("max_lora", ""))

    def _cache(self) -> tuple[int, int]:
        specs = self._specs
        sizes: list[int] = []
        counts: list[int] = []
        for one in self._series(specs.cache_info):
            labels = one.labels() if one.value is not None else None
            if labels is None:
                self._unreadable("cache_info", one)
                return 0, 0
            sizes.append(_count(labels.get(specs.block_size_label, "")))
            counts.append(_count(labels.get(specs.num_blocks_label, "")))
        size = max(sizes, default=0) or int(self._number("block_size", specs.block_size, max) or 0)
        count = sum(counts) if all(counts) else 0
        return size, count or int(self._number("num_blocks", specs.num_blocks, sum) or 0)

    def _unreadable(self, field: str, series: Series) -> None:
        shown = series.inner[:_MAX_SHOWN].decode("utf-8", "replace")
        self._problems.append(f"{field}: unreadable line {shown!r}")


def _names(text: str) -> frozenset[str]:
    return frozenset(name for part in text.split(",") if (name := part.strip()))


def _count(text: str) -> int:
    """A label such as `16`; 0 when it is `None`, empty or anything else (vLLM says `None` before it has profiled)."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0
