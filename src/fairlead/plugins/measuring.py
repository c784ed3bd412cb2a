"""Asks metric sources about a page; no source can break a scrape."""

from collections.abc import Callable, Sequence
from math import isinf

from fairlead.model.endpoint import Endpoint
from fairlead.model.errors import PluginError
from fairlead.plugins.contracts import MetricSource

#: Larger values are cut: sums over them stay finite.
_MOST = 1e300


class Measuring:
    """The further columns of a page. A source that raises or says nonsense is left out for that page and reported."""

    def __init__(self, sources: Sequence[MetricSource], report: Callable[[PluginError], None] | None = None) -> None:
        self._sources = tuple(sources)
        self._report = report

    def __call__(self, endpoint: Endpoint, page: bytes) -> dict[str, float]:
        found: dict[str, float] = {}
        for source in self._sources:
            try:
                given = {name: float(value) for name, value in source.measure(endpoint, page).items()}
                stray = given.keys() - {*source.provides}
                if stray:
                    raise ValueError(f"gave {min(stray)!r}, which it does not provide")
            except Exception as error:
                if self._report is not None:
                    self._report(PluginError(source.name, f"{type(error).__name__}: {error}"))
                continue
            found |= {n: (_MOST if v > 0 else -_MOST) if isinf(v) else v for n, v in given.items()}
        return found
