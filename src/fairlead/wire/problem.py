"""What is wrong with a document, and where: shared by all readers of files."""

from re import fullmatch

from msgspec import Struct

#: Where a value stands in a document: keys and indices from the root.
Place = tuple[str | int, ...]


class Problem(Struct, frozen=True):
    """One thing that is wrong, or (as a warning or note) worth knowing."""

    #: JSON path, e.g. `$.scorers[1].weight`; empty = not about the text.
    path: str
    #: Line in the file, from 1; 0 = unknown.
    line: int
    message: str
    hint: str = ""
    #: What it is about is used all the same.
    warning: bool = False

    def render(self, source: str = "") -> str:
        """`file:line: path: message (hint)`, on one line."""
        where = f"{source}:{self.line}: " if source and self.line else f"{source}: " if source else ""
        return f"{where}{self._said()}"

    def __str__(self) -> str:
        return f"line {self.line}, {self._said()}" if self.line else self._said()

    def _said(self) -> str:
        path = f"{self.path}: " if self.path else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{path}{self.message}{hint}"


def show(place: Place) -> str:
    """`("a", 1, "b.c")` → `$.a[1]["b.c"]`."""
    parts = ["$"]
    for key in place:
        if isinstance(key, int):
            parts.append(f"[{key}]")
        elif fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", key):
            parts.append(f".{shorten(key)}")
        else:
            parts.append(f'["{shorten(key)}"]')
    return "".join(parts)


def shorten(text: str, limit: int = 60) -> str:
    """Printable, on one line, and not too long."""
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(c if c.isprintable() else "�" for c in text)
