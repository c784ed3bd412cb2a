"""What a configuration says about scheduling, built: a pipeline begins with one, a `Reconfigured` brings another."""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from fairlead.core.flow_control import FlowController
from fairlead.core.policy import Policy
from fairlead.core.remote import Able, RemotePolicy
from fairlead.core.shadow import CaseTaker


class Scheduling(Struct, frozen=True, kw_only=True):
    """One is replaced by the next as a whole. What did not change in the configuration is the same object in both."""

    #: Decides: the policy of the file, with the canary and schedulers in other processes around it.
    policy: Policy
    #: The policy of the file itself. Flow control records its decisions under this name.
    base: Policy
    #: Where a request can be served, by the filters of `base`. Flow control follows it.
    able: Able
    #: `None` = requests never wait.
    flow: FlowController | None
    #: Seconds until a lease expires.
    lease_ttl: float
    #: Schedulers in other processes, by name.
    remotes: Mapping[str, RemotePolicy] = {}
    #: Takes down what shadows judge; `None` = there are no shadows.
    shadows: CaseTaker | None = None
    #: Policies on trial in this process, by the names of their shadows. Not for the core: whoever judges takes them.
    on_trial: Mapping[str, Policy] = {}


#: Builds what a document says. Raises `PluginError` or `ConfigError`; then nothing has changed.
Build = Callable[[Any], Scheduling]
