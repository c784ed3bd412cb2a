"""The scheduling objects that are built from a configuration, at the start of a pipeline and at each `Reconfigured`."""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from fairlead.core.binding import WaitingRules
from fairlead.core.flow_control import FlowController
from fairlead.core.policy import Policy
from fairlead.core.remote import RemotePolicy
from fairlead.core.shadow import CaseTaker


class Scheduling(Struct, frozen=True, kw_only=True):
    """Replaced as a whole on a reload. Objects whose configuration did not change are the same in both."""

    #: The policy that decides: that of the file, wrapped by the canary and by schedulers in other processes.
    policy: Policy
    #: The policy of the file itself. Flow control records its decisions under this policy's name.
    base: Policy
    #: The slots that can serve a request, by the filters of `base`. One of them is drawn for a request if `policy`
    #: fails.
    able: WaitingRules
    #: The rules that flow control follows: `able`, and those of a canary for its requests.
    waiting: WaitingRules
    #: `None` = requests never wait.
    flow: FlowController | None
    #: Seconds until a lease expires.
    lease_ttl: float
    #: Schedulers in other processes, by name.
    remotes: Mapping[str, RemotePolicy] = {}
    #: Takes the cases that shadows judge; `None` = there are no shadows.
    shadows: CaseTaker | None = None
    #: Policies on trial in this process, by the names of their shadows. Used by the code that judges them, not by the
    #: core.
    on_trial: Mapping[str, Policy] = {}


#: Builds the objects from a document. Raises `PluginError` or `ConfigError`; then nothing has changed.
Build = Callable[[Any], Scheduling]
