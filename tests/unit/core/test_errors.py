"""How what a plugin raises is described."""

import pickle

from fairlead.core import errors
from fairlead.core.errors import NeverReturned, PluginError, described, hung


def raised(source: str, file: str) -> str:
    try:
        exec(compile(source, file, "exec"), {})
    except Exception as error:
        trace = error.__traceback__
        assert trace is not None
        return described(error.with_traceback(trace.tb_next))
    raise AssertionError


def test_the_line_is_that_of_the_plugins_file() -> None:
    folder = errors.__file__.rpartition("/fairlead/")[0]
    assert raised("\n1 / 0\n", f"{folder}/fairlead_acme/policy.py").endswith("division by zero (policy.py, line 2)")
    assert raised("\n1 / 0\n", f"{folder}/fairlead/core/cost.py") == "ZeroDivisionError: division by zero"


def test_an_error_of_a_plugin_passes_from_one_process_to_another() -> None:
    error = pickle.loads(pickle.dumps(PluginError("p", "no")))
    assert (type(error), error.plugin, str(error)) == (PluginError, "p", "plugin p: no")


def test_it_hung_however_deep_the_cause_is() -> None:
    outer, inner, cause = ValueError("outer"), KeyError("inner"), NeverReturned()
    outer.__context__, inner.__context__ = inner, cause
    assert hung(outer) and hung(cause)
    inner.__context__ = None
    assert not hung(outer)


def test_causes_in_a_circle_come_to_an_end() -> None:
    outer, inner = ValueError("outer"), KeyError("inner")
    outer.__context__, inner.__context__ = inner, outer
    assert not hung(outer)
