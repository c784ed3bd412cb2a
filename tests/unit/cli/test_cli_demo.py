"""The options of `fairlead demo` stand in the command itself, so that `--help` needs no heavy import."""

from inspect import signature

from msgspec import structs

from fairlead.cli.demo import demo
from fairlead.demo.plan import Plan


def test_defaults_are_those_of_the_plan():
    options = {name: parameter.default for name, parameter in signature(demo).parameters.items()}
    del options["as_json"]
    plan = structs.asdict(Plan())
    assert options == {name: plan[name] for name in options}
