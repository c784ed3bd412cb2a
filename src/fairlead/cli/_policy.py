"""Options that replace a recorded policy: `--policy NAME|FILE` and `--set NAME=VALUE`."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fairlead.config.schema import Config

Policy = Annotated[
    str,
    typer.Option("--policy", "-p", help="Another policy: its name, or a configuration file whose policy is used."),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="SCORER=WEIGHT, PARAMETER=VALUE or PLUGIN.PARAMETER=VALUE; repeat.", metavar="NAME=VALUE"
    ),
]


def change(policy: str, settings: Sequence[str] | None) -> "Callable[[Config], Config] | None":
    """What the options do to a recorded configuration; `None` = nothing. Raises `ConfigError` or `ValueError`."""
    from msgspec.structs import replace

    from fairlead.config.load import load
    from fairlead.config.recorded import changed
    from fairlead.sim.policies import policy_text

    if not policy and not settings:
        return None
    if policy.endswith(".py"):
        raise ValueError(f"{policy}: a Python file can be simulated; here name an installed policy or a configuration")
    other = load(policy_text(policy), need_endpoints=False) if policy else None

    def apply(config: "Config") -> "Config":
        if other is not None:
            config = replace(config, policy=other.policy, flow_control=other.flow_control)
        for setting in settings or ():
            config = changed(config, setting)
        return config

    return apply
