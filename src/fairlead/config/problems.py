"""Collects all problems in a file that people write, each with its path, its line and, if possible, a suggestion."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from re import fullmatch

from msgspec import Struct
from msgspec.structs import replace

from fairlead.core.errors import ConfigError, PluginError
from fairlead.core.text import masked

#: The place of a value in a document: keys and indices from the root.
Place = tuple[str | int, ...]
_LONGEST = 60


class Problem(Struct, frozen=True):
    """An error in a file, or a warning or note about it."""

    #: JSON path, e.g. `$.scorers[1].weight`. `$`, the whole document, is not shown. Empty = not about the text.
    path: str
    #: Line in the file, from 1; 0 = unknown.
    line: int
    message: str
    hint: str = ""
    #: Whether this is only a warning: the value is used nevertheless.
    warning: bool = False

    def render(self, source: str = "") -> str:
        """`file:line: path: message (hint)`, on one line. Without the file if the path names a flag."""
        if self.path.startswith("--"):
            return self._said()
        where = f"{source}:{self.line}: " if source and self.line else f"{source}: " if source else ""
        return f"{where}{self._said()}"

    def __str__(self) -> str:
        between = ", " if self._shown_path() else ": "
        return f"line {self.line}{between}{self._said()}" if self.line else self._said()

    def _said(self) -> str:
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self._shown_path()}{self.message}{hint}"

    def _shown_path(self) -> str:
        return f"{self.path}: " if self.path not in ("", "$") else ""


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


def shorten(text: str) -> str:
    """The text, printable, on one line, and not too long."""
    text = text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
    return "".join(c if c.isprintable() else "�" for c in text)


#: Problems beyond this number are only counted: to find suggestions for all names of a hostile file takes minutes.
MAX_PROBLEMS = 200


class InvalidConfig(ConfigError):
    """A configuration with at least one problem. `str()` has one line per problem."""

    def __init__(self, problems: Sequence[Problem], source: str = "") -> None:
        first = problems[0]
        super().__init__(first.message, first.path, source)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join(problem.render(self.source) for problem in self.problems)


def moved(problem: Problem, places: Mapping[str, tuple[str, int]]) -> Problem:
    """The problem at another place, if `places` has its JSON path, or that of a value around it."""
    for path, (where, line) in places.items():
        if problem.path == path or problem.path.startswith((f"{path}.", f"{path}[")):
            return replace(problem, path=where, line=line)
    return problem


class Report:
    """Collects problems and notes while a document is checked, and finds their lines, so that checks need only places.

    `line` returns the line of a place, from 1; 0 = unknown. `prefix`: the place of the document, if it is part of
    another one.
    """

    def __init__(self, line: Callable[[Place], int], prefix: Place = ()) -> None:
        self.problems: list[Problem] = []
        self._omitted = 0
        #: Useful information about values that are not wrong, for example what has no effect.
        self.notes: list[Problem] = []
        #: Errors of plugins that exist but could not be loaded; each is in `problems` too.
        self.plugin_errors: list[PluginError] = []
        self.line = line
        self._prefix = prefix

    def path(self, place: Place) -> str:
        return show((*self._prefix, *place))

    def take(self, inner: "Report") -> None:
        """Add the content of a report about a part of the document."""
        self.extend(inner.problems)
        self._omitted += inner._omitted
        self.notes += inner.notes
        self.plugin_errors += inner.plugin_errors

    def add(self, place: Place, message: str, hint: str = "") -> None:
        self.extend([self._problem(place, message, hint)])

    def move(self, places: Mapping[str, tuple[str, int]]) -> None:
        """Move problems and notes. `places`: by JSON path, the path and line where the file has the value."""
        for problems in (self.problems, self.notes):
            problems[:] = [moved(problem, places) for problem in problems]

    def extend(self, problems: Sequence[Problem]) -> None:
        left = MAX_PROBLEMS - len(self.problems)
        self.problems.extend(problems[:left])
        self.omit(max(len(problems) - left, 0))

    def omit(self, count: int) -> None:
        """Count problems that are not listed."""
        self._omitted += count

    def close(self) -> None:
        """Sort by line, and add the number of omitted problems."""
        self.problems.sort(key=lambda problem: problem.line)
        if self._omitted:
            self.problems.append(Problem("$", 0, f"there are {self._omitted} problems more"))
            self._omitted = 0

    def note(self, place: Place, message: str) -> None:
        self.notes.append(self._problem(place, message, ""))

    def plugin(self, place: Place, error: PluginError) -> None:
        self.plugin_errors.append(error)
        self.add(place, str(error))

    def unknown(self, place: Place, what: str, name: str, known: Iterable[str], hint: str = "") -> None:
        """Report that `name` is not one of `known`. Without a better hint, the nearest or all of these are listed."""
        if not hint and len(self.problems) < MAX_PROBLEMS:
            hint = suggestion(name, known)
        self.add(place, f"unknown {what} '{shorten(name)}'", hint)

    def _problem(self, place: Place, message: str, hint: str) -> Problem:
        return Problem(self.path(place), self.line(place), message, hint)


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is most like `name`, whatever its case; empty = none is like it."""
    lowered = {candidate.lower(): candidate for candidate in sorted(known)}
    like = get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return lowered[like[0]] if like else ""


def suggestion(name: str, known: Iterable[str]) -> str:
    """A suggestion for `name`, which is not one of `known`: the nearest known name, otherwise all of them."""
    known = sorted(known)
    if like := nearest(name, known):
        return f"did you mean '{like}'?"
    return f"known: {', '.join(known)}" if known else ""


def describe(node: object) -> str:
    """A short description of a value from a file, safe to print."""
    match node:
        case None:
            return "nothing"
        case bool():
            return "true" if node else "false"
        case int():
            return str(node) if node.bit_length() <= 64 else "a huge number"
        case str():
            return f"'{shorten(masked(node))}'"
        case list():
            return "a list"
        case dict():
            return "a mapping"
    return shorten(str(node))
