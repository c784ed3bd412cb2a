"""`my.module:Name`, or the name of a built-in policy → something that makes policies."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from fairlead.config.load import load
from fairlead.config.registry import build_policy
from fairlead.model.errors import ConfigError, PluginError
from fairlead.schedule.framework import Policy
from fairlead.scheduler_sdk.simple import SimplePolicy

_FORMS = "give the name of a built-in policy, a configuration file (.yaml), or MODULE:NAME"


def policy_maker(target: str, report: Callable[[PluginError], None] | None = None) -> Callable[[], Policy]:
    """One policy per stream. Raises `ConfigError` that says what to give; everything is tried once right here."""
    if ":" in target:
        make = _from_module(*target.rsplit(":", 1))
    elif target.endswith((".yaml", ".yml", ".json")):
        config = load(Path(target), need_endpoints=False)
        make = lambda: build_policy(config, report)  # noqa: E731
    else:
        try:
            named = load(f"policy: {target}", need_endpoints=False)
        except ConfigError as error:
            raise ConfigError(f"{error}; {_FORMS}") from None
        make = lambda: build_policy(named, report)  # noqa: E731
    make()
    return make


def _from_module(module: str, name: str) -> Callable[[], Policy]:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does
    try:
        found = importlib.import_module(module)
    except Exception as error:
        raise ConfigError(f"module {module!r} cannot be imported: {type(error).__name__}: {error}; {_FORMS}") from error
    thing = getattr(found, name, None)
    if thing is None:
        raise ConfigError(f"module {module!r} has no {name!r}")
    return lambda: _as_policy(thing, name)


def _as_policy(thing: Any, name: str) -> Policy:
    if isinstance(thing, type):
        try:
            thing = thing()
        except Exception as error:
            raise ConfigError(f"{name} could not be made: {type(error).__name__}: {error}") from error
    if callable(getattr(thing, "choose", None)):
        if not isinstance(getattr(thing, "name", None), str):
            raise ConfigError(f"{name} has the method choose, but no name")
        return cast(Policy, thing)
    if callable(getattr(thing, "pick", None)):
        return SimplePolicy(thing.pick, name)
    if callable(thing):
        return SimplePolicy(thing, name)
    raise ConfigError(f"{name} has neither the method choose (a Policy) nor pick (a Scheduler), and is no function")
