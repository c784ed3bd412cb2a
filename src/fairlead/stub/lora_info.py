"""The `vllm:lora_requests_info` gauge with the real one's habits: see `LoraInfo`."""

#: The real server keeps label sets for ever.
_MAX_SERIES = 1000


class LoraInfo:
    """Label sets and when each was last true, in unix seconds: the newest value is the current one.

    As measured on vLLM 0.32.0, an old label set stays on the page, and the list of waiting adapters repeats the running
    ones; an adapter that has only queued requests is never listed.
    """

    __slots__ = ("_series", "max_loras")

    def __init__(self, max_loras: int) -> None:
        self.max_loras = max_loras
        self._series: dict[str, float] = {}

    def note(self, running: tuple[str, ...], unix: float) -> None:
        names = ",".join(running)
        if names not in self._series and len(self._series) >= _MAX_SERIES:
            del self._series[next(iter(self._series))]
        self._series[names] = unix

    def series(self) -> list[tuple[str, float]]:
        """Comma list of adapters, and its time; in the order of first appearance."""
        return list(self._series.items())
