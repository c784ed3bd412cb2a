"""One stream of a gateway, on the scheduler's side: its fleet mirrored, its batches decided.

Rules (those of the contract, seen from here)
* The first message brings the hello and everything; versions of the state and numbers of batches rise by one. A peer
  that breaks this is told so with a gRPC status, and may connect again.
* Every request of a batch is answered in one `Answer`, before the next message is looked at. A policy that raises has
  no opinion on that request.
* Own picks are charged in the mirror until the gateway's figures include them.
"""

import logging
from collections.abc import Callable, Mapping
from random import Random

import numpy as np
from msgspec.structs import replace

from fairlead import __version__
from fairlead.fleet.mirror import MirrorFleet
from fairlead.io.receive.stream import ServerStream
from fairlead.model.endpoint import Endpoint
from fairlead.model.errors import ProtocolError
from fairlead.model.remote import Outcome, RemotePick
from fairlead.schedule.cycle import Context
from fairlead.schedule.framework import Pick, Policy
from fairlead.schedule.second import runner_up
from fairlead.scheduler_sdk.simple import PASSED
from fairlead.wire.grpc_frames import Status
from fairlead.wire.scheduler import COLUMNS, Answer, Ask, Asked, Batch, Picks, State, Welcome
from fairlead.wire.scheduler_answer import encode_answer
from fairlead.wire.scheduler_ask import decode_ask

log = logging.getLogger(__name__)


class SchedulerStats:
    """Sums over all streams of a server."""

    def __init__(self) -> None:
        self.streams = 0
        self.batches = 0
        self.requests = 0
        self.failures = 0


class Session:
    """A handler for `io.receive.h2_server`."""

    def __init__(
        self, stream: ServerStream, metadata: Mapping[str, str], make: Callable[[], Policy], stats: SchedulerStats
    ) -> None:
        self._stream = stream
        self._policy = make()
        self._stats = stats
        self._fleet = MirrorFleet()
        self._rng = Random()
        self._greeted = False
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
        """Nothing is held but the mirror, which goes with us."""

    def _take(self, ask: Ask) -> None:
        if not self._greeted:
            if ask.hello is None or ask.hello.version < 1:
                raise ProtocolError("the first message has no hello with a version")
            self._greeted = True
            welcome = Welcome(scheduler=f"fairlead {__version__}", policy=self._policy.name)
            self._stream.send(encode_answer(Answer(welcome=welcome)))
        elif ask.hello is not None:
            raise ProtocolError("a second hello")
        if ask.state is not None:
            self._learn(ask.state)
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
        for one in state.endpoints:
            adapters = None if one.adapters is None else frozenset(one.adapters)
            fleet.join(one.slot, Endpoint(one.id, one.address, one.labels), adapters)
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
        picks = tuple(self._pick(one, context) for one in batch.requests)
        self._fleet.hits.clear()
        self._stream.send(encode_answer(Answer(picks=Picks(batch=batch.number, picks=picks))))

    def _pick(self, asked: Asked, context: Context) -> RemotePick:
        fleet = self._fleet
        request = asked.request
        if asked.candidates is not None:
            here = fleet.slots_of(asked.candidates.tolist())
            allowed = (fleet.table.endpoints[slot] for slot in here.tolist())
            request = replace(request, subset=frozenset(one.address for one in allowed if one is not None))
        if len(asked.hit_slots):
            column = np.zeros(len(fleet.table))
            column[fleet.slots_of(asked.hit_slots.tolist())] = asked.hit_shares
            fleet.hits[request.id] = column
        try:
            pick = self._policy.choose((request,), fleet, context)[0]
            return self._answer(asked, pick)
        except Exception:
            self._stats.failures += 1
            log.exception("policy %s failed; the gateway's own policy decides", self._policy.name)
            return RemotePick(request.id, Outcome.PASSED)

    def _answer(self, asked: Asked, pick: Pick) -> RemotePick:
        request, fleet = asked.request, self._fleet
        if pick.slot < 0:
            if pick.reason == PASSED:
                return RemotePick(request.id, Outcome.PASSED)
            return RemotePick(request.id, Outcome.REFUSED, reason=pick.message or pick.reason)
        endpoint = fleet.table.endpoints[pick.slot]
        if endpoint is None:
            raise IndexError(f"slot {pick.slot} has no endpoint")
        hits = fleet.hits.get(request.id)
        share = 0.0 if hits is None else float(hits[pick.slot])
        second = runner_up(pick, fleet.table)
        fleet.take(request, pick.slot, share, asked.expected_output, self._batch)
        other = fleet.table.endpoints[pick.prefill_slot] if pick.prefill_slot >= 0 else None
        alternatives = ((fleet.table.ids[second], 0.0),) if second >= 0 else ()
        prefill = other.id if other else ""
        return RemotePick(request.id, Outcome.PICKED, endpoint.id, alternatives=alternatives, prefill=prefill)
