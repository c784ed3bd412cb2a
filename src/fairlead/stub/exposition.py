"""Prometheus text: numbers, labels and histograms, formatted as the Python client of the real server does."""

from collections.abc import Callable, Mapping, Sequence

from fairlead.engine.stats import Histogram


def number(value: float) -> str:
    """`7.0`, `1.5`, `1.795146e+09`: Go's notation, with an exponent from a million on."""
    text = repr(float(value))
    dot = text.find(".")
    if dot <= 6 or "e" in text or value <= 0:
        return text
    mantissa = f"{text[0]}.{text[1:dot]}{text[dot + 1 :]}".rstrip("0.")
    return f"{mantissa}e+{dot - 1:02d}"


def labels(values: Mapping[str, str]) -> str:
    """`{a="x",b="y"}` in alphabetical order, escaped; empty for none."""
    if not values:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(values[name])}"' for name in sorted(values)) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def header(name: str, kind: str, help_text: str) -> str:
    return f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n"


Read = Callable[[], float]


class Value:
    """One line of a gauge or counter, read anew on each page."""

    __slots__ = ("_prefix", "_read")

    def __init__(self, name: str, label_values: Mapping[str, str], read: Read) -> None:
        self._prefix = f"{name}{labels(label_values)} "
        self._read = read

    def text(self) -> str:
        return f"{self._prefix}{number(self._read())}\n"


class HistogramLines:
    """All lines of one histogram. Made again only after it has observed something."""

    __slots__ = ("_prefixes", "_read", "_seen", "_sum", "_text", "_total")

    def __init__(
        self, name: str, label_values: Mapping[str, str], read: Callable[[], Histogram], bounds: Sequence[float]
    ) -> None:
        bound_texts = [*(number(bound) for bound in bounds), "+Inf"]
        self._prefixes = [f"{name}_bucket{labels({**label_values, 'le': bound})} " for bound in bound_texts]
        self._total = f"{name}_count{labels(label_values)} "
        self._sum = f"{name}_sum{labels(label_values)} "
        self._read = read
        self._seen: tuple[Histogram, int] | None = None
        self._text = ""

    def text(self) -> str:
        histogram = self._read()
        if self._seen == (histogram, histogram.count):
            return self._text
        self._seen = histogram, histogram.count
        total = 0
        lines = []
        for prefix, count in zip(self._prefixes, histogram.buckets, strict=True):
            total += count
            # `number` for a count, without the detour through a float's text while it is small.
            lines.append(f"{prefix}{total}.0\n" if total < 1_000_000 else f"{prefix}{number(total)}\n")
        lines.append(f"{self._total}{number(histogram.count)}\n{self._sum}{number(histogram.sum)}\n")
        self._text = "".join(lines)
        return self._text


class Fixed:
    """Text that never changes."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def text(self) -> str:
        return self._text


class Made:
    """Text that is made on each page by a function."""

    __slots__ = ("text",)

    def __init__(self, make: Callable[[], str]) -> None:
        self.text = make


Part = Value | HistogramLines | Fixed | Made


def page(parts: Sequence[Part]) -> bytes:
    return "".join([part.text() for part in parts]).encode("utf-8", "replace")
