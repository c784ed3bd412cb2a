"""Who decides beside the policy: another process (`scheduler`), for some requests (`canary`), on trial (`shadows`)."""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from fairlead.config.section import Section
from fairlead.config.units import PositiveSeconds

Name = Annotated[str, Meta(max_length=100)]
Percent = Annotated[float, Meta(ge=0, le=100)]


class SchedulerTls(Section, frozen=True, kw_only=True):
    """TLS to a scheduler. PEM files; empty = the system's authorities, no certificate of our own."""

    ca_file: str = ""
    #: False accepts any certificate.
    verify: bool = True
    #: Name in its certificate; empty = the host of `address`.
    server_name: str = ""
    #: Directory with `tls.crt` and `tls.key` that we show.
    cert_dir: str = ""


class BreakerSettings(Section, frozen=True, kw_only=True):
    #: Late or unusable answers in a row after which the scheduler is left alone.
    failures: Annotated[int, Meta(ge=1, le=10_000)] = 5
    cooldown: PositiveSeconds = 1.0


class SchedulerSettings(Section, frozen=True, kw_only=True):
    """A scheduler in another process; docs/replacement-scheduler.md."""

    #: `host:port` or `unix:/path`; empty = none.
    address: str = ""
    #: How long a request waits for its answer; then the built-in policy decides.
    budget: PositiveSeconds = 0.005
    tls: SchedulerTls | None = None
    breaker: BreakerSettings = BreakerSettings()

    def __post_init__(self) -> None:
        address = self.address
        if not address:
            return
        host, _, port = address.rpartition(":")
        plain = bool(host) and port.isdecimal() and 0 < int(port) < 65_536
        if not (plain or (address.startswith("unix:") and len(address) > len("unix:"))):
            raise ValueError("field 'address' is neither host:port nor unix:/path")
        if self.budget > 10.0:
            raise ValueError("field 'budget' is above 10s: requests wait that long when the scheduler hangs")


#: The name of a policy, or `{type: …, parameters: {…}}`, as under `policy`.
PolicyEntry = str | dict[str, Any]


class Canary(Section, frozen=True, kw_only=True):
    """Another policy, or a scheduler, decides a share of the requests; those of one session go one way."""

    policy: PolicyEntry = ""
    scheduler: SchedulerSettings | None = None
    percent: Percent = 0.0

    def __post_init__(self) -> None:
        _one_of(self.policy, self.scheduler, self.percent > 0)


class Shadow(Section, frozen=True, kw_only=True):
    """Decides the same requests, and nothing comes of it but figures."""

    #: In metrics and records; empty = that of the policy.
    name: Name = ""
    policy: PolicyEntry = ""
    scheduler: SchedulerSettings | None = None

    def __post_init__(self) -> None:
        _one_of(self.policy, self.scheduler, True)
        if not self.name and self.scheduler is not None:
            raise ValueError("a shadow with a scheduler needs a name")

    @property
    def label(self) -> str:
        if self.name:
            return self.name
        return self.policy if isinstance(self.policy, str) else str(self.policy.get("type", ""))


class Shadows(Section, frozen=True, kw_only=True):
    #: Share of the decisions that shadows see.
    sample: Annotated[float, Meta(ge=0, le=1)] = 1.0
    #: Share of one CPU that all of them may use; decisions beyond it are left out.
    cpu: Annotated[float, Meta(gt=0, le=1)] = 0.2
    #: A shadow that takes longer for one decision is cut off.
    limit: PositiveSeconds = 0.1
    policies: tuple[Shadow, ...] = ()

    def __post_init__(self) -> None:
        labels = [one.label for one in self.policies]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"two shadows are named '{twice[0]}': give one another name")


def _one_of(policy: PolicyEntry, scheduler: SchedulerSettings | None, needed: bool) -> None:
    if policy and scheduler is not None:
        raise ValueError("give policy or scheduler, not both")
    if scheduler is not None and not scheduler.address:
        raise ValueError("field 'scheduler.address' is missing")
    if needed and not policy and scheduler is None:
        raise ValueError("give policy: or scheduler:")


#: Sections of the file.
CHOOSERS: Mapping[str, type[Section]] = {"scheduler": SchedulerSettings, "canary": Canary, "shadows": Shadows}
__all__ = ["CHOOSERS", "Canary", "SchedulerSettings", "Shadow", "Shadows"]
