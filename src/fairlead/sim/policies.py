"""The policies that there are, by the name that a configuration calls them."""

from pathlib import Path

from fairlead.config.builtins import BUILTINS
from fairlead.config.defaults import POLICIES
from fairlead.model.errors import FairleadError
from fairlead.sim.policy_file import source_text
from fairlead.sim.run import policy_from

#: The default with a queue before it. No limits, and nobody runs out of time: the same requests are compared.
WITH_FLOW = "default+flow"
_FLOW = "policy: default\nflowControl: {ttl: 590s, limits: {band: {requests: null, bytes: null}}}\n"


def known_policies() -> dict[str, str]:
    """Name → text of a configuration. `default` comes first, then the same with flow control; what cannot be made
    without parameters is left out."""
    names = dict.fromkeys(["default", WITH_FLOW, *POLICIES, *BUILTINS["policy"]])
    texts = {name: f"policy: {name}\n" for name in names} | {WITH_FLOW: _FLOW}
    return {name: text for name, text in texts.items() if _works(text)}


def policy_text(name: str) -> str:
    """The configuration text of a known policy, or of the file of that name: `tuned=path.yaml` and `path.yaml` alike.
    A Python file with a policy in it counts as one, see `policy_file`.

    Raises `ValueError` when it is neither, `ConfigError` or `PluginError` when the file is wrong, `OSError`.
    """
    texts = known_policies()
    if name in texts:
        return texts[name]
    path = Path(name.partition("=")[2] or name)
    if not path.is_file():
        raise ValueError(f"{name!r} is neither a policy nor a file; policies: {', '.join(texts)}")
    if path.suffix == ".py":
        return source_text(path)
    policy_from(path)
    return path.read_text()


def _works(text: str) -> bool:
    try:
        policy_from(text)
    except FairleadError:
        return False
    return True
