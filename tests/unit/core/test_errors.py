"""How what a plugin raises is described."""

import pickle

from fairlead.core import errors
from fairlead.core.errors import PluginError, described


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
