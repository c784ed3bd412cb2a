"""Every request walks the table of its states, whatever comes: flow control, eviction, remote schedulers, endpoints
that leave, shutting down, clients that fail, events that come late, twice or for nobody."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import precondition, rule
from tests.property.test_flow_pipeline import NAMES, STEPS, Answer, Machine

from fairlead.core import events as ev
from fairlead.core.endpoint import Sample
from fairlead.core.request import Usage
from fairlead.core.requests import OF_REQUEST, TRANSITIONS, RequestState

pytestmark = pytest.mark.failing_instructions


class States(Machine):
    def __init__(self):
        super().__init__()
        self.failing = False
        self._move = self.pipeline.requests.move
        self.pipeline.requests.move = self.moved

    def moved(self, entry, trigger, state):
        """What the table allows, and one state after the other."""
        assert state in TRANSITIONS[entry.state][trigger]
        assert entry.state is not RequestState.ENDED
        self._move(entry, trigger, state)
        assert entry.state is state

    def client(self, number, breaks):
        return Answer(self, number, "route" if self.failing else breaks)

    @rule(failing=st.booleans())
    def sessions_fail(self, failing):
        self.failing = failing

    @precondition(lambda self: self.arrived)
    @rule(data=st.data(), port=st.integers(1, 3), what=st.sampled_from(["usage", "move", "lost"]))
    def tell(self, data, port, what):
        number = data.draw(st.sampled_from(self.arrived[-20:]))
        if what == "usage":
            self.driver.feed(ev.UsageReported(number, Usage(prompt_tokens=7, completion_tokens=3)))
        elif what == "move":
            self.driver.feed(ev.RequestMoved(number, f"10.0.0.1:{port}"))
        elif number not in self.waiting:
            self.driver.feed(ev.StreamLost(number))

    @rule(kind=st.sampled_from(OF_REQUEST))
    def nobody(self, kind):
        """An event about a request that never was."""
        fields = {"address": "10.0.0.1:1"} if kind is ev.RequestMoved else {}
        fields |= {"usage": Usage(prompt_tokens=1)} if kind is ev.UsageReported else {}
        self.driver.feed(kind(request_id=10**9, **fields))

    @rule(name=NAMES)
    def idle(self, name):
        """It shows itself idle for as long as nobody can overlook."""
        for _ in range(5):
            self.clock.advance(9.0)
            sample = Sample(waiting=0.0, running=0.0)
            self.driver.feed(ev.MetricsSampled(name, self.clock.time(), sample))

    @rule(really=st.integers(0, 40))
    def stop(self, really):
        if not really:
            self.driver.feed(ev.StopAsked())


TestRequestStates = States.TestCase
TestRequestStates.settings = settings(max_examples=max(STEPS // 40, 1), stateful_step_count=40, deadline=None)
