"""The section `kubernetes`: which pool is served, how the API server is reached, who leads."""

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta

from fairlead.config.problems import Report
from fairlead.config.section import Section
from fairlead.config.units import PositiveSeconds, Seconds
from fairlead.wire.kube_pool import MAX_PORTS

KEY = "kubernetes"
_PORTS = Meta(max_length=MAX_PORTS)
#: Renewals are jittered downward; this much room there must be between two of them and the deadline.
_JITTER = 1.2

KubeName = Annotated[str, Meta(max_length=253)]


class LeaderElection(Section, frozen=True, kw_only=True):
    """One of several replicas answers, the others stand by."""

    enabled: bool = False
    #: Empty = `epp-NAMESPACE-POOL.fairlead`.
    lease_name: KubeName = ""
    #: A replica that dies is replaced after this.
    lease_duration: PositiveSeconds = 10.0
    #: A leader whose renewals are refused for so long stops leading.
    renew_deadline: PositiveSeconds = 7.0
    retry_period: PositiveSeconds = 2.0
    #: A leader that ends answers beside its successor for so long: gateways must find that one before they lose it.
    overlap: Seconds = 5.0
    #: A Service without a selector that leads to the leader; needs $POD_IP. Empty = gateways go by readiness.
    service: KubeName = ""


class Kubernetes(Section, frozen=True, kw_only=True):
    """Endpoints and model names from an API server. Off without `pool` and `selector`."""

    #: Name of the InferencePool.
    pool: KubeName = ""
    #: Empty = $NAMESPACE, else that of the service account or of the kubeconfig's context, else `default`.
    namespace: KubeName = ""
    group: Literal["inference.networking.k8s.io", "inference.networking.x-k8s.io"] = "inference.networking.k8s.io"
    #: Without an InferencePool object: labels of the pods, and their ports.
    selector: dict[str, str] = {}
    target_ports: Annotated[tuple[Annotated[int, Meta(ge=1, le=65535)], ...], _PORTS] = ()
    #: Follow InferenceModels, InferenceObjectives and InferenceModelRewrites too.
    models: bool = True
    #: Write conditions to their status.
    status: bool = True
    #: Empty = the service account in a pod, else $KUBECONFIG, else ~/.kube/config.
    kubeconfig: str = ""
    context: str = ""
    leader_election: LeaderElection = LeaderElection()

    @property
    def on(self) -> bool:
        return bool(self.pool or self.selector)


def check_kubernetes(section: Kubernetes, endpoints_given: bool, report: Report) -> None:
    """What must fit together."""
    if section.pool and section.selector:
        report.add((KEY, "selector"), "give 'pool' or 'selector', not both")
    if bool(section.selector) != bool(section.target_ports):
        lacks = "targetPorts" if section.selector else "selector"
        report.add((KEY,), f"field '{lacks}' is missing", "pods without an InferencePool need both")
    if len({*section.target_ports}) < len(section.target_ports):
        report.add((KEY, "targetPorts"), "port numbers must be unique")
    if len(section.target_ports) > MAX_PORTS:
        report.add((KEY, "targetPorts"), f"at most {MAX_PORTS} ports, got {len(section.target_ports)}")
    if section.on and endpoints_given:
        report.add(("endpoints",), "endpoints come from Kubernetes already", "leave out endpoints: or kubernetes:")
    election = section.leader_election
    if election.enabled and not section.on:
        report.add((KEY, "leaderElection"), "there is no pool to lead", "name it: pool:")
    if election.renew_deadline >= election.lease_duration:
        report.add((KEY, "leaderElection", "renewDeadline"), "must be shorter than leaseDuration")
    if election.retry_period * _JITTER >= election.renew_deadline:
        report.add((KEY, "leaderElection", "retryPeriod"), f"times {_JITTER} must be shorter than renewDeadline")
    if election.service and not election.enabled:
        report.add((KEY, "leaderElection", "service"), "there is no leader to lead to", "enabled: true")
    if election.lease_duration < 1:
        report.add((KEY, "leaderElection", "leaseDuration"), "must be at least 1s, as leases count whole seconds")


def overlaid(root: Mapping[str, object], flags: Mapping[str, object]) -> dict[str, object]:
    """A configuration's mapping with the values of command-line flags in it; nested mappings are merged."""
    merged = dict(root)
    for key, value in flags.items():
        inner = merged.get(key)
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            merged[key] = overlaid(inner, value)
        else:
            merged[key] = value
    return merged
