"""Problems of a configuration: all of them, each with its path, its line and, where we can guess, the cure."""

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches

from fairlead.model.errors import ConfigError, PluginError
from fairlead.wire.problem import Place, Problem, shorten, show

#: Further problems are only counted: a hostile file must not cost minutes of guessing names.
MAX_PROBLEMS = 200


class InvalidConfig(ConfigError):
    """A configuration with `problems`, of which there is at least one. `str()` has one line for each."""

    def __init__(self, problems: Sequence[Problem], source: str = "") -> None:
        first = problems[0]
        super().__init__(first.message, first.path, source)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join(problem.render(self.source) for problem in self.problems)


class Report:
    """Collects problems and notes while a document is checked. Knows the line of each place, so that checkers need not.

    `line` gives it: from 1, 0 = unknown. `prefix` is where the document stands if it is part of another one.
    """

    def __init__(self, line: Callable[[Place], int], prefix: Place = ()) -> None:
        self.problems: list[Problem] = []
        self._omitted = 0
        #: Not wrong, but worth knowing: what is accepted and has no effect.
        self.notes: list[Problem] = []
        #: Plugins that were found and could not be loaded; each is in `problems` too.
        self.plugin_errors: list[PluginError] = []
        self.line = line
        self._prefix = prefix

    def path(self, place: Place) -> str:
        """The JSON path of a place."""
        return show((*self._prefix, *place))

    def take(self, inner: "Report") -> None:
        """What the report about a part of the document says."""
        self.extend(inner.problems)
        self._omitted += inner._omitted
        self.notes += inner.notes
        self.plugin_errors += inner.plugin_errors

    def add(self, place: Place, message: str, hint: str = "") -> None:
        self.extend([self._problem(place, message, hint)])

    def extend(self, problems: Sequence[Problem]) -> None:
        room = MAX_PROBLEMS - len(self.problems)
        self.problems.extend(problems[:room])
        self._omitted += max(len(problems) - room, 0)

    def close(self) -> None:
        """Sort by line, and say how many problems were left out."""
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
        """`name` is none of the `known` ones; unless there is a better hint, the nearest or all of them are named."""
        known = sorted(known)
        if not hint and len(self.problems) < MAX_PROBLEMS:
            lowered = {candidate.lower(): candidate for candidate in known}
            nearest = get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
            if nearest:
                hint = f"did you mean '{lowered[nearest[0]]}'?"
            elif known:
                hint = f"known: {', '.join(known)}"
        self.add(place, f"unknown {what} '{shorten(name)}'", hint)

    def _problem(self, place: Place, message: str, hint: str) -> Problem:
        return Problem(self.path(place), self.line(place), message, hint)


def describe(node: object) -> str:
    """A value from a file in a few words, safe to print."""
    match node:
        case None:
            return "nothing"
        case bool():
            return "true" if node else "false"
        case int():
            return str(node) if node.bit_length() <= 64 else "a huge number"
        case str():
            return f"'{shorten(node)}'"
        case list():
            return "a list"
        case dict():
            return "a mapping"
    return shorten(str(node))
