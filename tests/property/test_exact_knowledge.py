"""Exact knowledge against a plain model of what each engine holds, whatever comes and goes."""

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_blocks import apply_all
from leases import lease_of

from fairlead.apis.tokens import PromptTokens
from fairlead.core.endpoint import Endpoint
from fairlead.core.events import EndpointDown, EndpointUp, RequestArrived, ResponseEnded
from fairlead.core.exact import ExactKnowledge
from fairlead.core.fleet import Fleet
from fairlead.core.kv.events import AllCleared, BlocksRemoved, BlocksStored
from fairlead.core.kv.recipe import ANY_MODEL
from fairlead.core.request import Request, Usage
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.plugins.policies.cost_model import CostModel
from fairlead.testing import SimClock

BLOCK, POOL = 4, 3
#: Prompts that share beginnings.
PROMPTS = [[1] * shared + [10 + number] * (24 - shared) for number in range(4) for shared in (4, 8, 14)]


class Machine:
    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.clock = SimClock()
        self.exact = ExactKnowledge()
        self.fleet = Fleet(exact=self.exact)
        self.pipeline = Pipeline(self.clock, Random(1), self.fleet, CostModel(), TokenEstimator())
        #: Per endpoint the beginnings (in whole blocks) that it holds; `None` = it is not there.
        self.held: list[set[tuple[int, ...]] | None] = [None] * POOL
        self.last = 0

    def step(self) -> None:
        number = self.chance.randrange(POOL)
        held = self.held[number]
        if held is None or self.chance.random() < 0.03:
            self._come_or_go(number)
            return
        kind = self.chance.choices(("store", "forget", "clear", "ask"), (5, 3, 0.3, 5))[0]
        getattr(self, f"_{kind}")(number, held)
        self.exact.refresh()

    def _slot(self, number: int) -> int:
        slot = self.fleet.table.slot(f"e{number}")
        assert slot is not None
        return slot

    def _come_or_go(self, number: int) -> None:
        if self.held[number] is not None:
            self.pipeline.handle(EndpointDown(f"e{number}"))
            self.held[number] = None
            return
        self.pipeline.handle(EndpointUp(Endpoint(f"e{number}", f"10.0.0.{number + 1}:80")))
        cache = self.exact.index.rank(self._slot(number), 0, ANY_MODEL)
        cache.heard = cache.linked = True
        self.held[number] = set()

    def _tell(self, number: int, event: BlocksStored | BlocksRemoved | AllCleared) -> None:
        cache = self.exact.index.rank(self._slot(number), 0, ANY_MODEL)
        apply_all(self.exact.index, cache, event, self.clock.time())

    def _store(self, number: int, held: set[tuple[int, ...]]) -> None:
        prompt = self.chance.choice(PROMPTS)
        parts = [tuple(prompt[: BLOCK * (at + 1)]) for at in range(len(prompt) // BLOCK)]
        known = 0
        while known < len(parts) and parts[known] in held:
            known += 1
        new = [part for part in parts[known:] if part not in held]
        if new != parts[known:] or not new:  # an engine would find the later blocks in use, or nothing to store
            return
        tokens = np.array(prompt[known * BLOCK : len(parts) * BLOCK], "<u4").tobytes()
        parent = _name(parts[known - 1]) if known else 0
        self._tell(number, BlocksStored([_name(part) for part in new], parent, tokens, BLOCK))
        held.update(new)

    def _forget(self, number: int, held: set[tuple[int, ...]]) -> None:
        tails = [part for part in held if not any(len(o) > len(part) and o[: len(part)] == part for o in held)]
        if tails:
            gone = self.chance.choice(sorted(tails))
            held.discard(gone)
            self._tell(number, BlocksRemoved([_name(gone)]))

    def _clear(self, number: int, held: set[tuple[int, ...]]) -> None:
        held.clear()
        self._tell(number, AllCleared())

    def _ask(self, number: int, held: set[tuple[int, ...]]) -> None:
        prompt = self.chance.choice(PROMPTS)
        self.last += 1
        ids = np.array(prompt, "<u4").tobytes()
        blocks = self.exact.offer(PromptTokens(ids=ids, total=len(prompt)))
        request = Request(id=self.last, arrived=self.clock.time(), prompt_tokens=len(prompt), model="m", blocks=blocks)
        column = self.fleet.match(request)
        for other, blocks in enumerate(self.held):
            if blocks is not None:
                share = 0.0 if column is None else column[self._slot(other)]
                assert int(share * len(prompt)) == _hit(prompt, blocks), (other, self.exact.source(self._slot(other)))
        self.pipeline.handle(RequestArrived(request))
        lease = lease_of(self.fleet, self.last)
        there = self.held[int(lease.endpoint_id[1:])]
        assert there is not None
        assert lease.hit_tokens == _hit(prompt, there)
        status = self.chance.choice((200, 200, 200, 500))
        usage = Usage(prompt_tokens=len(prompt), cached_tokens=lease.hit_tokens) if status == 200 else None
        self.pipeline.handle(ResponseEnded(request_id=self.last, status=status, usage=usage))
        self.clock.advance(1.0)
        self.exact.first_token(None, self.clock.time())  # settles what is due


def _name(part: tuple[int, ...]) -> int:
    return hash(part) & ((1 << 63) - 1) | 1


def _hit(prompt: list[int], held: set[tuple[int, ...]]) -> int:
    blocks = 0
    while blocks < (len(prompt) - 1) // BLOCK and tuple(prompt[: BLOCK * (blocks + 1)]) in held:
        blocks += 1
    return blocks * BLOCK


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32))
def test_shares_are_what_the_engines_hold(seed: int) -> None:
    machine = Machine(Random(seed))
    for _ in range(120):
        machine.step()
    machine.pipeline.validate()
    machine.exact.validate()
    for slot, _ in machine.fleet.table.slots():
        assert not machine.exact.check.trust(slot).distrusted
