"""Renders instruments in the Prometheus text format 0.0.4 or in OpenMetrics 1.0.

Rules
* A view shows a family under a name. It can show all labels, or some of them (children are summed), or rename them. For
  histograms it can show all bounds or some of them (cumulative counts stay exact). One family can have several views,
  so a name and its deprecated twin cost one update, not two.
* The constant part of each line is made once per child, and the text of `Readings` that have not changed is kept.
  bench/metrics.py measures the whole page.
* Labels are sorted by name, as Go's client does, because published tools match on that.
* Children of labelled histograms appear with their first observation.
* OpenMetrics adds exemplars to buckets (the last decision counted in the bucket). Series are the same in both formats:
  `le="1"` is kept, though OpenMetrics prescribes `1.0`. Prometheus 2 keeps the label as written, so with `1.0` series
  would change their names when a scraper begins to ask for OpenMetrics.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from fairlead.server.observe.instruments import Counter, Family, Gauge, Histogram, Readings

#: Takes a request's number, and returns the labels that identify the request in exemplars.
Naming = Callable[[int], Mapping[str, str]]

#: A piece of the page has about this many lines.
_PIECE = 500
_SPECIAL = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf", "-0": "0"}
_ESCAPES = {ord("\\"): "\\\\", ord('"'): '\\"', ord("\n"): "\\n"}
_HELP_ESCAPES = {ord("\\"): "\\\\", ord("\n"): "\\n"}


def number(value: float) -> str:
    """The text of a sample value; whole numbers have no fraction."""
    if type(value) is int:
        return str(value)
    text = repr(float(value))  # without `float`, the text of numpy's floats would include their type
    if text.endswith(".0"):
        text = text[:-2]
    return _SPECIAL.get(text, text)


def label_text(names: Iterable[str], values: Iterable[str], sparse: bool = False) -> str:
    """`a="1",b="2"`, escaped and sorted by name. `sparse`: as for `View`."""
    pairs = sorted(zip(names, values, strict=True))
    return ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in pairs if value or not sparse)


class View:
    """A family under a name. `labels`: the family's label → its shown name; `None` = all under their own names.
    `bounds`: those that are shown; `None` = all. `constant`: further labels with constant values. `sparse`: labels
    without a value are left out."""

    def __init__(
        self,
        name: str,
        help_text: str,
        family: Family[Any] | Readings,
        labels: Mapping[str, str] | None = None,
        bounds: tuple[float, ...] | None = None,
        constant: Mapping[str, str] | None = None,
        sparse: bool = False,
    ) -> None:
        shown = {label: label for label in family.labels} if labels is None else dict(labels)
        self.name = name
        self.family = family
        self._constant, self._sparse = dict(constant or {}), sparse
        self._names = (*shown.values(), *self._constant)
        self._indexes = tuple(family.labels.index(label) for label in shown)
        self._all_labels = self._indexes == tuple(range(len(family.labels)))
        self.help = help_text
        self.kind = family.kind
        self.shown_labels = (*sorted(self._names),)
        self._head = self._heading(name)
        # In OpenMetrics a counter's name is the name of its samples without the ending `_total`.
        self._open_head = self._heading(name.removesuffix("_total") if family.kind == "counter" else name)
        self._prefixes: dict[tuple[str, ...], str] = {}
        self._last: tuple[Mapping[tuple[str, ...], float], str] = {}, ""
        bounds = family.bounds if bounds is None else bounds
        self._stops = [family.bounds.index(bound) + 1 for bound in bounds]
        self._suffixes = [f'="{number(bound)}"}} ' for bound in bounds]

    def _heading(self, name: str) -> str:
        return f"# HELP {name} {self.help.translate(_HELP_ESCAPES)}\n# TYPE {name} {self.kind}\n"

    def pieces(self, naming: Naming | None = None, headed: bool = True) -> Iterator[str]:
        """The family's text, in pieces of about `_PIECE` lines. `naming`: `None` = Prometheus text, else OpenMetrics.
        `headed`: whether it begins with the lines `# HELP` and `# TYPE`."""
        out = [(self._head if naming is None else self._open_head) if headed else ""]
        family = self.family
        if isinstance(family, Readings):
            yield out[0] + self._readings(family.values)
            return
        rows = family.children if self._all_labels else self._summed(family)
        self._trim(len(rows))
        if self.kind == "histogram":
            for values, histogram in list(rows.items()):  # copied: counting continues between pieces
                self._histogram(out, values, histogram, naming)
                if len(out) >= _PIECE:
                    yield "".join(out)
                    out.clear()
        else:
            out += [f"{self._prefix(values)}{number(child.value)}\n" for values, child in rows.items()]
        yield "".join(out)

    def _readings(self, values: Mapping[tuple[str, ...], float]) -> str:
        if values != self._last[0]:
            self._trim(len(values))
            self._last = values, "".join([f"{self._prefix(key)}{number(value)}\n" for key, value in values.items()])
        return self._last[1]

    def _trim(self, rows: int) -> None:
        if len(self._prefixes) > 2 * rows + 64:
            self._prefixes.clear()

    def _prefix(self, values: tuple[str, ...]) -> str:
        prefix = self._prefixes.get(values)
        if prefix is None:
            text = self._labels(values)
            prefix = self._prefixes[values] = f"{self.name}{{{text}}} " if text else f"{self.name} "
        return prefix

    def _labels(self, values: tuple[str, ...]) -> str:
        return label_text(self._names, (*values, *self._constant.values()), self._sparse)

    def _histogram(self, out: list[str], values: tuple[str, ...], histogram: Histogram, naming: Naming | None) -> None:
        reached = list(accumulate(histogram.counts))
        total = reached[-1]
        if not total and self._names:
            return
        text = self._prefixes.get(values)
        if text is None:
            text = self._prefixes[values] = self._labels(values)
        head = f"{self.name}_bucket{{{text},le" if text else f"{self.name}_bucket{{le"
        braces = f"{{{text}}}" if text else ""
        if naming is None or histogram.examples is None:
            stops = zip(self._stops, self._suffixes, strict=True)
            out += [f"{head}{suffix}{reached[stop - 1]}\n" for stop, suffix in stops]
            out.append(f'{head}="+Inf"}} {total}\n')
        else:
            self._with_examples(out, head, reached, histogram.examples, naming)
        out.append(f"{self.name}_sum{braces} {number(histogram.sum)}\n{self.name}_count{braces} {total}\n")

    def _with_examples(
        self, out: list[str], head: str, reached: list[int], examples: list[tuple[float, int] | None], naming: Naming
    ) -> None:
        start = 0
        stops = (*self._stops, len(reached))
        for stop, suffix in zip(stops, (*self._suffixes, '="+Inf"} '), strict=True):
            example = next((candidate for candidate in reversed(examples[start:stop]) if candidate is not None), None)
            start = stop
            beside = ""
            if example is not None:
                labels = naming(example[1])
                beside = f" # {{{label_text(labels, labels.values())}}} {number(example[0])}"
            out.append(f"{head}{suffix}{reached[stop - 1]}{beside}\n")

    def _summed(self, family: Family[Any]) -> dict[tuple[str, ...], Any]:
        """The family's children by their shown labels; those with the same shown labels are added up."""
        rows: dict[tuple[str, ...], Any] = {}
        for values, child in family.children.items():
            key = tuple(values[i] for i in self._indexes)
            row = rows.get(key)
            if row is None:
                row = rows[key] = Histogram(child.bounds) if isinstance(child, Histogram) else type(child)()
            _add(row, child)
        return rows


def _add(row: Counter | Gauge | Histogram, child: Any) -> None:
    if isinstance(row, Histogram):
        row.counts = [mine + theirs for mine, theirs in zip(row.counts, child.counts, strict=True)]
        row.sum += child.sum
    else:
        row.value += child.value


class Registry:
    """All metrics that are shown. `constant`: labels with constant values that every series has."""

    def __init__(self, constant: Mapping[str, str] | None = None) -> None:
        self._constant = dict(constant or {})
        #: All views, in the order in which they are shown.
        self.views: list[View] = []
        self._names: set[str] = set()
        #: Names the request of an observation in exemplars of OpenMetrics.
        self.naming: Naming = lambda request_id: {}
        self._before: list[Callable[[], object]] = []

    def show(self, name: str, help_text: str, family: Family[Any] | Readings, **how: Any) -> None:
        """Show a family under a name; `how` as for `View`. Raises `ValueError` if the name is taken."""
        if name in self._names:
            raise ValueError(f"metric {name} is shown twice")
        self._names.add(name)
        if self._constant:
            how["constant"] = {**self._constant, **(how.get("constant") or {})}
        self.views.append(View(name, help_text, family, **how))

    def before(self, refresh: Callable[[], object]) -> None:
        """Call `refresh` at the beginning of every rendering, to set gauges that are not updated otherwise."""
        self._before.append(refresh)

    def follow(
        self, kind: str, name: str, help_text: str, read: Callable[[], Any], *labels: str, **how: Any
    ) -> Readings:
        """Show what `read` returns at every rendering: a number, or numbers by the label's value (with several labels,
        by the tuple of their values); `None` = nothing. `how` as for `View`. Returns the family, for more views."""
        family = Readings(kind, *labels)

        def refresh() -> None:
            figure = read()
            numbers = figure if labels else {(): figure}
            if figure is None:
                numbers = {}
            elif len(labels) == 1:
                numbers = {(key,): value for key, value in figure.items()}
            family.take(numbers)

        self.before(refresh)
        self.show(name, help_text, family, **how)
        return family

    def refresh(self) -> Iterator[None]:
        """Call the functions of `before`, one per step."""
        for refresh in self._before:
            refresh()
            yield

    def parts(self, openmetrics: bool = False) -> Iterator[bytes]:
        """The metrics page, in pieces of one refresh or some hundred lines, so that a server can do other work in
        between."""
        return page_of([self], openmetrics)

    def render(self) -> bytes:
        return b"".join(self.parts())


def page_of(registries: Iterable[Registry], openmetrics: bool = False) -> Iterator[bytes]:
    """The metrics page of several registries, in pieces. A metric of several registries is shown once, with the rows of
    all of them. The registries' constant labels must make the rows distinct."""
    shown: dict[str, list[tuple[View, Naming | None]]] = {}
    for registry in registries:
        for _ in registry.refresh():
            yield b""
        for view in registry.views:
            shown.setdefault(view.name, []).append((view, registry.naming if openmetrics else None))
    for views in shown.values():
        for i, (view, naming) in enumerate(views):
            for piece in view.pieces(naming, headed=not i):
                yield piece.encode("utf-8", "replace")
    if openmetrics:
        yield b"# EOF\n"


# The form of the page that a client wants by its Accept header (RFC 9110, 12.5.1).

OPENMETRICS = "application/openmetrics-text"
OPENMETRICS_TYPE = f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def wants_openmetrics(accept: str) -> bool:
    """Whether the header names OpenMetrics, with at least the quality of plain text.

    A client that accepts anything (`*/*`) gets plain text, which every client reads. A quality that is not a number
    counts as 0.
    """
    open_quality = text_quality = any_quality = 0.0
    for entry in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in entry.split(";"))
        quality = _quality(parameters)
        if kind == OPENMETRICS:
            open_quality = max(open_quality, quality)
        elif kind in ("text/plain", "text/*"):
            text_quality = max(text_quality, quality)
        elif kind == "*/*":
            any_quality = quality
    return open_quality > 0.0 and open_quality >= (text_quality or any_quality)


def _quality(parameters: list[str]) -> float:
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return min(max(float(parameter[2:]), 0.0), 1.0)
            except ValueError:
                return 0.0
    return 1.0
