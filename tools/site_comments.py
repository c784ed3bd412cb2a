"""A griffe extension for the site's Python page: an attribute without a docstring gets the `#:` comment above it."""

from pathlib import Path
from typing import Any

from griffe import Attribute, Docstring, Extension

_MARK = "#:"


class Comments(Extension):
    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        path = attr.filepath
        if attr.docstring is not None or attr.lineno is None or not isinstance(path, Path):
            return
        above: list[str] = []
        for line in reversed(attr.lines_collection[path][: attr.lineno - 1]):
            if not line.strip().startswith(_MARK):
                break
            above.insert(0, line.strip().removeprefix(_MARK).strip())
        if above:
            attr.docstring = Docstring("\n".join(above), parent=attr)
