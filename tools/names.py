"""Lists names in `src/fairlead` that say nothing of what they stand for, or that nobody in the field uses.

    python tools/names.py             new ones, with what to say instead; exit code 1 if there are any
    python tools/names.py --all       those of the baseline too
    python tools/names.py --lower     take what has gone out of the baseline; it never grows

A name is that of a module, class, function, argument, variable or attribute. It counts once in each function or class
that binds it. `docs/glossary.md` has the words to use. `tools/names_baseline.txt` has what is left of older names: a
file, and how often each word may still occur in it.
"""

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "fairlead"
BASELINE = Path(__file__).with_name("names_baseline.txt")

_HOLDS = "what it holds: endpoint, match, findings, …"
_WHO = "who or what: endpoint, request, client, …"
#: Words that are no names by themselves, and what to say instead. As a part of a longer name they may be clear.
ALONE: Mapping[str, str] = {
    "again": "what is done again: retry, replay, retry_at",
    "anew": "what is done anew: restarted, rebuilt",
    "at": "place, path, time, position, index",
    "found": _HOLDS,
    "heard": "received, events, or what it holds",
    "nobody": "none, empty, unclaimed, or what it holds",
    "one": _WHO,
    "other": "peer, or " + _WHO,
    "others": "peers, or " + _WHO,
    "past": "unscheduled, or history",
    "rest": "tail, remainder, or what is left",
    "room": "reservation, capacity, window, component",
    "second": "fallback, runner_up, or what it holds (beside `first` it is fine)",
    "some": _HOLDS,
    "somebody": _WHO,
    "thing": _HOLDS,
    "told": "reported, notify, on_change, or what it holds",
    "whole": "full, complete, body, message",
}
#: Words that are none in any name.
ANYWHERE: Mapping[str, str] = {
    "asking": "query, lookup",
    "beacon": "EndpointSlice publisher",
    "coast": "fast-forward, decode run",
    "coasting": "fast-forward, decode run",
    "desk": "flow controller",
    "parity": "token check, agreement",
    "wish": "client hints, desired replicas, options",
    "wishes": "client hints, desired replicas, options",
}
#: A scope's names, by the line where each is bound first.
Names = dict[str, int]


def names(tree: ast.Module) -> Iterator[Names]:
    """The names that the module, and each class and function in it, binds."""
    scopes: list[Names] = []
    _bound(tree, {}, {}, scopes)
    yield from scopes


def _bound(scope: ast.AST, own: Names, attributes: Names, scopes: list[Names]) -> None:
    scopes.append(own)
    pending = list(ast.iter_child_nodes(scope))
    for node in pending:  # grows
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.setdefault(node.name, node.lineno)
            is_class = isinstance(node, ast.ClassDef)
            inner: Names = {}
            _bound(node, inner, inner if is_class else attributes, scopes)
            continue
        match node:
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                own.setdefault(name, node.lineno)
            case ast.Attribute(attr=name, ctx=ast.Store()):
                attributes.setdefault(name, node.lineno)
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                own.setdefault(name, node.lineno)
            case ast.alias(asname=str(name)):
                own.setdefault(name, node.lineno)
        pending += ast.iter_child_nodes(node)


def unclear(name: str, beside: Mapping[str, int] = {}) -> str:
    """The word in a name that is none; empty = the name is fine. `beside`: all names of its scope."""
    bare = name.strip("_").lower()
    if bare in ALONE and not (bare == "second" and "first" in beside):
        return bare
    words = [word.lower() for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", name)]
    return next((word for word in words if word in ANYWHERE), "")


def of_file(path: str, source: str) -> list[tuple[int, str, str]]:
    """(line, name, word) of each name that says nothing; the module's own name stands in line 1."""
    module = path.rpartition("/")[2].removesuffix(".py")
    listed = [(1, module, word)] if (word := unclear(module)) else []
    for scope in names(ast.parse(source)):
        listed += [(line, name, word) for name, line in scope.items() if (word := unclear(name, scope))]
    return sorted(listed)


def read_baseline(text: str) -> dict[str, Counter[str]]:
    """Lines `path word=count …`."""
    allowed = {}
    for line in text.splitlines():
        path, *counts = line.split()
        allowed[path] = Counter({word: int(count) for word, _, count in (item.partition("=") for item in counts)})
    return allowed


def write_baseline(counts: Mapping[str, Counter[str]]) -> str:
    rows = {
        path: " ".join(f"{word}={n}" for word, n in sorted(words.items())) for path, words in counts.items() if words
    }
    return "".join(f"{path} {row}\n" for path, row in sorted(rows.items()))


def new(path: str, listed: list[tuple[int, str, str]], allowed: Mapping[str, int]) -> list[str]:
    """A line for each name with a word that occurs in this file more often than the baseline allows."""
    counts = Counter(word for _, _, word in listed)
    lines = []
    for line, name, word in listed:
        if counts[word] > allowed.get(word, 0):
            older = f" ({counts[word]} here, {allowed[word]} are older)" if allowed.get(word) else ""
            lines.append(f"{path}:{line}: {name}{older}: say {(ALONE | ANYWHERE)[word]}")
    return lines


def main(arguments: list[str], source: Path = SOURCE, baseline: Path = BASELINE) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="list those of the baseline too")
    parser.add_argument("--lower", action="store_true", help="take what has gone out of the baseline")
    options = parser.parse_args(arguments)
    allowed = read_baseline(baseline.read_text()) if baseline.is_file() else {}
    left: dict[str, Counter[str]] = {}
    lines: list[str] = []
    for file in sorted(source.rglob("*.py")):
        if file.name.endswith(("_pb2.py", "_pb2_grpc.py")):
            continue
        path = file.relative_to(source).as_posix()
        listed = of_file(path, file.read_text())
        left[path] = Counter(word for _, _, word in listed) & allowed.get(path, Counter())
        lines += new(path, listed, {} if options.all else allowed.get(path, {}))
    print(*lines, sep="\n", end="\n" if lines else "")
    print(f"{len(lines)} {'names' if options.all else 'new names'}; words: docs/glossary.md", file=sys.stderr)
    if options.lower:
        baseline.write_text(write_baseline(left))
    return int(bool(lines) and not options.all)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
