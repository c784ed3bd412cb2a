"""Endpoints as a running scheduler tells them on its admin port."""

from typing import Any

import msgspec
from msgspec import Struct


class Row(Struct, frozen=True):
    """An endpoint as the admin page tells it; see `fairlead.observe.status.EndpointStatus`."""

    id: str
    address: str
    labels: dict[str, str] = {}
    fresh: bool = True
    age_s: float | None = None
    waiting: float | None = None
    running: float | None = None
    leases: float = 0.0

    @property
    def load(self) -> float:
        """Requests that it has, as it says itself."""
        return (self.waiting or 0.0) + (self.running or 0.0)


class _Rows(Struct):
    endpoints: list[Row] = []


def rows_of(page: Any) -> list[Row]:
    """Of the decoded page `/debug/endpoints`; empty where it is another one."""
    try:
        return msgspec.convert(page, _Rows, strict=False).endpoints
    except msgspec.ValidationError:
        return []
