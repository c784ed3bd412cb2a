"""Tells the plugins of a policy how requests ended, so that they can learn from it (`OutcomeObserver`)."""

from collections.abc import Callable, Iterator
from typing import Any

from fairlead.core.clock import Clock
from fairlead.core.errors import PLUGIN_FAILURES, PluginError, of_plugin
from fairlead.core.instructions import Instruction
from fairlead.core.policy import Delegates, Filter, Guard, OutcomeObserver, Picker, Policy, Scorer, own
from fairlead.core.profile import Profile
from fairlead.core.records import OutcomeRecord

Handler = Callable[..., list[Instruction]]


class OutcomeObservers:
    """The observers among a policy, the policies that it asks, and their plugins. False if there are none. One that has
    failed to return twice rests."""

    def __init__(self, policy: Policy, report: Callable[[PluginError], None] | None) -> None:
        observers = dict[int, tuple[Guard, OutcomeObserver]]()
        for part in _parts(policy):
            plugin = part.plugin if isinstance(part, Guard) else part
            if isinstance(plugin, OutcomeObserver):
                observers[id(plugin)] = part if isinstance(part, Guard) else Guard(part.name), plugin
        self._observers, self._report = tuple(observers.values()), report

    def __bool__(self) -> bool:
        return bool(self._observers)

    def after(self, handler: Handler, clock: Clock) -> Handler:
        """Return the handler of an event, which also tells the observers of the outcomes among its instructions."""

        def handled(*given: Any) -> list[Instruction]:
            instructions = handler(*given)
            for instruction in instructions:
                if isinstance(instruction, OutcomeRecord):
                    self.tell(instruction, clock.time())
            return instructions

        return handled

    def tell(self, outcome: OutcomeRecord, now: float) -> None:
        """Tell them of one outcome. Never raises."""
        for guard, observer in self._observers:
            if guard.rests(now):
                continue
            try:
                guard.call_apart(now, observer.ended, outcome)
            except PLUGIN_FAILURES as error:
                if self._report is not None:
                    self._report(of_plugin(guard.name, error))


def _parts(policy: Policy) -> Iterator[Policy | Filter | Scorer | Picker]:
    if own(policy) and isinstance(policy, Delegates):
        for asked in policy.asks():
            yield from _parts(asked)
    if isinstance(policy, Profile):
        yield from policy.filters
        yield from (scorer for scorer, _ in policy.scorers)
        yield policy.picker
    yield policy
