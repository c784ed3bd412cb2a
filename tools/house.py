"""How big the house is, counted: modules, lines, long functions, owners of requests' state, hooks, rooms.

    python tools/house.py             a table, and where what should not be is
    python tools/house.py --json      one JSON object: `modules`, `src_lines`, `functions_over_60`,
                                      `request_state_owners`, `getattr_hooks`, `rooms`, and `where` they are

* `functions_over_60`: functions and methods of more than 60 lines, their docstring included.
* `request_state_owners`: dictionaries and sets of the scheduler's objects that are looked up by a request's id: the one
  of the registry, and any other. Not counted: what only records the past (`RECORDS`), and programs that only use the
  scheduler (`OTHERS`).
* `getattr_hooks`: calls of `hasattr` and `getattr` that are not in `ALLOWED`.
* `rooms`: folders directly under `src/fairlead` with Python in them.
"""

import argparse
import ast
import json
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "fairlead"
LONGEST = 60
#: Files that look up finished or shown requests by id, and why that is nobody's state.
RECORDS: dict[str, str] = {
    "server/observe/metrics.py": "decisions that are counted when their requests end; bounded",
    "server/observe/decisions.py": "records of the last decisions, for the debug pages; bounded",
    "server/observe/tracing.py": "trace ids of the last requests, to name them beside figures; bounded",
    "server/live/shadows.py": "cases that a policy on trial was shown, until it answers; bounded",
}
#: Rooms of programs around the scheduler.
OTHERS = ("cli", "doctor", "lab", "testing")
#: (file, argument): calls of `hasattr` and `getattr` that are no hooks, and why. Five at most.
ALLOWED: dict[tuple[str, str], str] = {
    ("template.py", "'__self__'"): "a template calls any object, and what it is bound to decides whether it may",
    ("yaml.py", "'CBaseLoader'"): "PyYAML has its fast loader only where it was compiled with libyaml",
    ("server.py", "name"): "the user names a function of his module in the command line",
    ("client.py", "option"): "which options a TCP socket has depends on the operating system",
    ("h2_server.py", "'SO_RCVLOWAT'"): "which options a socket has depends on the operating system",
}
_CONTAINERS = ("dict", "set", "OrderedDict", "defaultdict", "deque", "list")
_LOOK_UPS = ("get", "pop", "setdefault", "discard", "add", "remove")


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def long_functions(tree: ast.Module, name: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > LONGEST:
                yield f"{name}:{node.lineno} {node.name} {lines}"


def hooks(tree: ast.Module, name: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("hasattr", "getattr"):
            argument = ast.unparse(node.args[1])
            if (name.rpartition("/")[2], argument) not in ALLOWED:
                yield f"{name}:{node.lineno} {ast.unparse(node)}"


def owners(tree: ast.Module, name: str) -> Iterator[str]:
    if name.partition("/")[0] in OTHERS or name in RECORDS:
        return
    for holder in ast.walk(tree):
        if isinstance(holder, ast.ClassDef):
            found = {attribute for node in ast.walk(holder) for attribute in _looked_up(node)}
            if found:
                found &= {attribute for node in ast.walk(holder) for attribute in _containers(node)}
            yield from (f"{name} {holder.name}.{attribute}" for attribute in sorted(found))


def _containers(node: ast.AST) -> Iterator[str]:
    """Attributes of `self` that this statement makes a dictionary or a set."""
    match node:
        case ast.AnnAssign(target=ast.Attribute(value=ast.Name(id="self"), attr=attribute), annotation=kind):
            if ast.unparse(kind).startswith(_CONTAINERS):
                yield attribute
        case ast.Assign(targets=targets, value=ast.Dict() | ast.Set() | ast.Call(func=ast.Name(id="dict" | "set"))):
            for target in targets:
                match target:
                    case ast.Attribute(value=ast.Name(id="self"), attr=attribute):
                        yield attribute


def _looked_up(node: ast.AST) -> Iterator[str]:
    """Attributes of `self` that this expression looks up by a request's id."""
    match node:
        case ast.Subscript(value=container, slice=key):
            pairs = [(container, key)]
        case ast.Call(func=ast.Attribute(value=container, attr=method), args=[key, *_]) if method in _LOOK_UPS:
            pairs = [(container, key)]
        case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[container]):
            pairs = [(container, key)]
        case _:
            return
    for container, key in pairs:
        match container:
            case ast.Attribute(value=ast.Name(id="self"), attr=attribute) if _is_id(key):
                yield attribute


def _is_id(key: ast.expr) -> bool:
    match key:
        case ast.Name(id="request_id") | ast.Attribute(attr="request_id"):
            return True
        case ast.Attribute(value=ast.Name(id="request") | ast.Attribute(attr="request"), attr="id"):
            return True
        case ast.UnaryOp(operand=inner):
            return _is_id(inner)
        case ast.BinOp(left=left, right=right):
            return _is_id(left) or _is_id(right)
    return False


def measure() -> dict[str, object]:
    paths = modules()
    lines = 0
    where: dict[str, list[str]] = {"functions_over_60": [], "request_state_owners": [], "getattr_hooks": []}
    for path in paths:
        text = path.read_text()
        lines += text.count("\n")
        name, tree = path.relative_to(SOURCE).as_posix(), ast.parse(text)
        where["functions_over_60"] += long_functions(tree, name)
        # Most modules say none of these words, and walking through them takes long.
        if "request_id" in text or ".id" in text:
            where["request_state_owners"] += owners(tree, name)
        if "getattr" in text or "hasattr" in text:
            where["getattr_hooks"] += hooks(tree, name)
    rooms = sorted({path.relative_to(SOURCE).parts[0] for path in paths if path.parent != SOURCE})
    return {
        "modules": len(paths),
        "src_lines": lines,
        **{name: len(found) for name, found in where.items()},
        "rooms": len(rooms),
        "where": {**where, "rooms": rooms},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    found = measure()
    if options.json:
        print(json.dumps(found))
        return
    where = found.pop("where")
    assert isinstance(where, dict)
    for name, value in found.items():
        print(f"{name:22}{value:>8,}")
    for name, places in where.items():
        if places:
            print(f"\n{name}:", *places, sep="\n  ")


if __name__ == "__main__":
    main()
