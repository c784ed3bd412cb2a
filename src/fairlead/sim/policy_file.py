"""A policy that is one Python file: `fairlead compare -p my_policy.py`.

The file's source stands where a configuration's text stands otherwise, behind a first line that says so. So it goes to
other processes and machines as it is, and a changed file is another policy for results that were kept.
"""

import sys
from collections.abc import Iterable
from hashlib import sha256
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

from fairlead.config.registry import GROUP, Registry
from fairlead.model.errors import ConfigError

_MARK = "# a policy of the file "


def source_text(path: Path) -> str:
    """What stands for the file. Raises `OSError` or `ConfigError`."""
    text = f"{_MARK}{path}\n{path.read_text(encoding='utf-8')}"
    configuration(text)
    return text


def configuration(text: str) -> tuple[str, Registry | None]:
    """The text of a configuration, and the plugins that it may name besides the installed ones.

    Raises `ConfigError` when the file cannot be run or has no policy in it, or several.
    """
    if not text.startswith(_MARK):
        return text, None
    first, _, source = text.partition("\n")
    path = first.removeprefix(_MARK)
    found = _policies(_module(path, source))
    if len(found) != 1:
        has = "no policy" if not found else f"several policies: {', '.join(sorted(found))}"
        raise ConfigError(
            f"has {has}; give one class the attribute `type` and the method `choose` or `cost`", "$", path
        )
    ((name, cls),) = found.items()
    point = EntryPoint(name, f"{cls.__module__}:{cls.__qualname__}", GROUP)
    return f"policy: {name}\n", Registry(lambda: [point])


def _module(path: str, source: str) -> ModuleType:
    """Runs the file. It can import what stands beside it."""
    module = ModuleType(f"fairlead_policy_{sha256(source.encode()).hexdigest()[:16]}")
    module.__file__ = path
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, path, "exec"), vars(module))
    except Exception as error:
        line = _line(error, path)
        raise ConfigError(f"cannot be run: {type(error).__name__}: {error}{line}", "$", path) from error
    return module


def _line(error: Exception, path: str) -> str:
    if isinstance(error, SyntaxError):
        return ""
    trace, line = error.__traceback__, 0
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == path else line
        trace = trace.tb_next
    return f" (line {line})" if line else ""


def _policies(module: ModuleType) -> dict[str, type]:
    """Those that the file defines, not those that it imports."""
    own: Iterable[Any] = (one for one in vars(module).values() if isinstance(one, type))
    return {
        one.type: one
        for one in own
        if one.__module__ == module.__name__
        and callable(getattr(one, "choose", None))
        and isinstance(getattr(one, "type", None), str)
    }
