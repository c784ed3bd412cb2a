"""Serves a policy as a scheduler that gateways name in `scheduler:`. Loads the policy, listens, and answers streams."""

import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any, Protocol, runtime_checkable

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from fairlead import __version__
from fairlead.compat.load import load
from fairlead.config.plugins import build_policy, make
from fairlead.config.registry import Registry, declared
from fairlead.core.endpoint import Endpoint, host_port
from fairlead.core.errors import PLUGIN_FAILURES, ConfigError, PluginError, ProtocolError, cannot_listen
from fairlead.core.events import Outcome, RemotePick
from fairlead.core.mirror import MirrorFleet
from fairlead.core.outcomes import OutcomeObservers
from fairlead.core.policy import Context, OutcomeObserver, Picked, Policy, Refused, choose_or_raise, notified
from fairlead.core.profile import in_order, runner_up
from fairlead.core.request import Request
from fairlead.gateway.grpc_frames import Status
from fairlead.gateway.h2_limits import H2Limits
from fairlead.gateway.h2_server import H2Server
from fairlead.gateway.health import HealthService
from fairlead.gateway.ports import listen_address
from fairlead.gateway.stream import ServerStream
from fairlead.gateway.tls import ServerTls
from fairlead.plugins.policies.prefill_decode import PrefillDecode
from fairlead.server.remote.messages import (
    COLUMNS,
    MAX_ALTERNATIVES,
    PATH,
    Answer,
    Ask,
    Asked,
    Batch,
    Picks,
    Slots,
    State,
    Welcome,
    decode_ask,
    encode_answer,
)
from fairlead.server.remote.stream import UNIX
from fairlead.server.sdk.simple import PASSED, LearningPolicy, Scheduler, SimplePolicy


class SchedulerServer:
    """Call `await start(address)`, and `await close()` at the end. `make` makes a policy for each stream."""

    def __init__(self, make: Callable[[], Policy], tls: ServerTls | None = None) -> None:
        self.stats = SchedulerStats()
        self._health = HealthService()
        routes = {PATH: lambda stream, metadata: Session(stream, metadata, make, self.stats), **self._health.routes()}
        self._server = H2Server(routes, H2Limits(max_message=16 << 20, keepalive=20.0), tls=tls)

    async def start(self, address: str) -> str:
        """Listen on `host:port` (port 0 = any free port) or `unix:/path`. Returns the address to connect to.

        Raises `ConfigError`.
        """
        try:
            if address.startswith(UNIX):
                await self._server.listen_unix(address.removeprefix(UNIX))
                bound = address
            else:
                host, port = listen_address(address)
                bound = host_port(host, await self._server.listen(host, port))
        except ValueError as error:
            raise ConfigError(f"cannot listen on {address!r}: {error}, or unix:/PATH") from None
        except OSError as error:
            raise cannot_listen(address, error) from None
        self._health.set_ready(True)
        return bound

    async def close(self, grace_s: float = 0.0) -> None:
        self._health.set_ready(False)
        await self._server.close(grace_s)


# One stream of a gateway, on the scheduler's side: keeps a mirror of the gateway's fleet, and decides batches.
#
# Rules (those of the contract, from this side)
# * The first message has the hello and the whole state; state versions and batch numbers rise by one. If a gateway
#   breaks this, the stream ends with a gRPC status that says so. The gateway may connect again.
# * All requests of a batch are answered in one `Answer`, before the next message is read. If the policy raises, the
#   answer for that request is "no opinion".
# * Our own picks are charged in the mirror until the gateway's numbers include them.

log = logging.getLogger(__name__)


class SchedulerStats(Struct):
    """Counts over all streams of a server. `failures`: requests, and outcomes, for which the policy raised."""

    streams: int = 0
    batches: int = 0
    requests: int = 0
    failures: int = 0


class Session:
    """One stream, as a handler for `gateway.h2_server`. `make` makes its policy."""

    def __init__(
        self, stream: ServerStream, metadata: Mapping[str, str], make: Callable[[], Policy], stats: SchedulerStats
    ) -> None:
        self._stream = stream
        self._policy = make()
        self._stats = stats
        self._observers = OutcomeObservers(self._policy, self._failed)
        self._fleet = MirrorFleet()
        self._rng = Random()
        self._greeted = False
        self._alternatives = 1
        self._version = 0
        self._batch = 0
        stats.streams += 1

    def on_message(self, message: bytes) -> None:
        try:
            self._take(decode_ask(message))
        except (ProtocolError, ValueError) as error:
            self._stream.finish(Status.INVALID_ARGUMENT, str(error))

    def on_half_close(self) -> None:
        self._stream.finish()

    def on_lost(self, why: str) -> None:
        """Ignored: all state is in this session, which ends with the stream."""

    def _take(self, ask: Ask) -> None:
        if not self._greeted:
            if ask.hello is None or ask.hello.version < 1:
                raise ProtocolError("the first message has no hello with a version")
            self._greeted = True
            self._alternatives = min(max(ask.hello.max_endpoints - 1, 1), MAX_ALTERNATIVES)
            name, wants = self._policy.name, bool(self._observers)
            welcome = Welcome(scheduler=f"fairlead {__version__}", policy=name, wants_outcomes=wants)
            self._stream.send(encode_answer(Answer(welcome=welcome)))
        elif ask.hello is not None:
            raise ProtocolError("a second hello")
        if ask.state is not None:
            self._learn(ask.state)
        for outcome in ask.ended:
            self._observers.tell(outcome, outcome.at)
        if ask.batch is not None:
            self._decide(ask.batch)

    def _learn(self, state: State) -> None:
        if state.version != self._version + 1 or not (state.full or self._version):
            raise ProtocolError(f"state {state.version} after state {self._version}")
        self._version = state.version
        fleet = self._fleet
        if state.full:
            fleet.forget()
        for slot in state.gone:
            fleet.leave(slot)
        for endpoint in state.endpoints:
            adapters = None if endpoint.adapters is None else frozenset(endpoint.adapters)
            fleet.join(endpoint.slot, Endpoint(endpoint.id, endpoint.address, endpoint.labels), adapters)
        if len(state.slots):
            columns = {COLUMNS[number]: column for number, column in state.columns.items()}
            fleet.load(state.slots.tolist(), columns)
        if state.speeds is not None:
            fleet.learned(state.speeds.hold_ms, state.speeds.answer_steps)
        fleet.settle(state.settled)

    def _decide(self, batch: Batch) -> None:
        if batch.number != self._batch + 1:
            raise ProtocolError(f"batch {batch.number} after batch {self._batch}")
        self._batch = batch.number
        self._stats.batches += 1
        self._stats.requests += len(batch.requests)
        context = Context(batch.now, self._rng)
        picks = tuple(self._pick(asked, context) for asked in batch.requests)
        self._stream.send(encode_answer(Answer(picks=Picks(batch=batch.number, picks=picks))))

    def _pick(self, asked: Asked, context: Context) -> RemotePick:
        fleet = self._fleet
        request = asked.request
        if asked.candidates is not None:
            request = replace(request, subset=self._allowed(asked.candidates, asked.prefill_candidates))
        if len(asked.hit_slots):
            column = np.zeros(len(fleet.table))
            column[fleet.slots_of(asked.hit_slots.tolist())] = asked.hit_shares
            request = replace(request, blocks=column)
        try:
            pick = notified(choose_or_raise(self._policy, request, fleet, context), request, fleet)
            return self._answer(request, asked.expected_output, pick)
        except PLUGIN_FAILURES:
            self._stats.failures += 1
            log.exception("policy %s failed; the gateway's own policy decides", self._policy.name)
            return RemotePick(request.id, Outcome.PASSED)

    def _failed(self, error: PluginError) -> None:
        self._stats.failures += 1
        log.error("a policy could not learn from an outcome: %s", error)

    def _allowed(self, candidates: Slots, prefills: Slots | None) -> frozenset[str]:
        """Return the addresses of the candidates. They write the answer. Who only prefills is none of them, and a
        policy that splits requests may choose it too, if it is in `prefills` (`None` = all are)."""
        fleet, table = self._fleet, self._fleet.table
        allowed = set(fleet.slots_of(candidates.tolist()).tolist())
        if isinstance(self._policy, PrefillDecode):
            only = np.flatnonzero(table.only_prefills).tolist()
            may = only if prefills is None else fleet.slots_of(prefills.tolist()).tolist()
            allowed.update(slot for slot in only if slot in may)
        return frozenset(each.address for slot in allowed if (each := table.endpoints[slot]) is not None)

    def _answer(self, request: Request, expected_output: float, pick: Picked | Refused) -> RemotePick:
        fleet = self._fleet
        if isinstance(pick, Refused):
            if pick.reason == PASSED:
                return RemotePick(request.id, Outcome.PASSED)
            return RemotePick(request.id, Outcome.REFUSED, reason=pick.message or pick.reason)
        prefiller = fleet.table.endpoints[pick.prefill_slot] if pick.prefill_slot >= 0 else None
        _, *behind = in_order(pick, runner_up(pick, fleet.table), fleet.table, self._alternatives + 1)
        hits, computing = fleet.match(request), pick.prefill_slot if prefiller else pick.slot
        share = 0.0 if hits is None else float(hits[computing])
        if computing != pick.slot:  # which receives the whole prompt
            fleet.take(request, computing, share, 0.0, self._batch)
            share = 1.0
        fleet.take(request, pick.slot, share, expected_output, self._batch)
        alternatives = tuple((fleet.table.ids[slot], 0.0) for slot in behind)
        prefill = prefiller.id if prefiller else ""
        return RemotePick(
            request.id, Outcome.PICKED, fleet.table.ids[pick.slot], alternatives=alternatives, prefill=prefill
        )


# From `my.module:Name`, a configuration file or the name of a built-in policy to a function that makes policies.

_FORMS = "give the name of a policy, a configuration file (.yaml), or MODULE:NAME"


def policy_maker(target: str) -> Callable[[], Policy]:
    """Return a function that makes a policy for each stream. It is called once here as a test. Raises `ConfigError`,
    which says what to give as `target`."""
    if ":" in target:
        make = _from_module(*target.rsplit(":", 1))
    elif target.endswith((".yaml", ".yml", ".json")):
        config = load(Path(target), need_endpoints=False)
        make = lambda: build_policy(config)  # noqa: E731
    elif target.endswith(".py"):
        raise ConfigError(f"write {Path(target).stem}:CLASS, where Python finds the module", "$", target)
    else:
        try:
            named = load(f"policy: {target}", need_endpoints=False)
        except ConfigError as error:
            raise ConfigError(f"{error}; {_FORMS}") from None
        make = lambda: build_policy(named)  # noqa: E731
    make()
    return make


@runtime_checkable
class _Chooses(Protocol):
    """An object with a policy's method `choose`, which may lack the other members of a policy."""

    def choose(self, request: Any, fleet: Any, context: Any) -> Any: ...


def _from_module(module: str, name: str) -> Callable[[], Policy]:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does
    try:
        loaded = importlib.import_module(module)
    except Exception as error:
        raise ConfigError(f"module {module!r} cannot be imported: {type(error).__name__}: {error}; {_FORMS}") from error
    member = getattr(loaded, name, None)
    if member is None:
        raise ConfigError(f"module {module!r} has no {name!r}")
    return lambda: _as_policy(member, name)


def _as_policy(member: Any, name: str) -> Policy:
    if isinstance(member, type):
        try:
            member = member(filters=_filters()) if declared(member, "takes_filters") is True else member()
        except Exception as error:
            raise ConfigError(f"{name} could not be made: {type(error).__name__}: {error}") from error
    if isinstance(member, Policy) and isinstance(member.name, str):
        return member
    if isinstance(member, _Chooses):
        raise ConfigError(f"{name} has the method choose, but no name")
    if isinstance(member, Scheduler) and isinstance(member, OutcomeObserver):
        return LearningPolicy(member, member, name)
    if isinstance(member, Scheduler):
        return SimplePolicy(member.pick, name)
    if callable(member):
        return SimplePolicy(member, name)
    raise ConfigError(f"{name} has neither the method choose (a Policy) nor pick (a Scheduler), and is not a function")


def _filters() -> list[Any]:
    """The filters that a configuration which names only a policy plugin gives it."""
    registry = Registry()
    return [make(spec, registry) for spec in load("policy: cost-model", need_endpoints=False).policy.filters]
