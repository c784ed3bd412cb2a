"""What the steps of one call did."""

from fairlead.engine.request import EngineRequest


class StepResult:
    """What the steps of one `Engine.step` call did. Who decodes also got a token per step, see `output_tokens`."""

    __slots__ = ("finished", "first", "steps")

    def __init__(self) -> None:
        #: Steps that ended.
        self.steps = 0
        #: Requests that got their first token, in order; one that also ended is in both lists.
        self.first: list[EngineRequest] = []
        #: Requests that are complete, in order, with `finish_reason` and `finished_at`.
        self.finished: list[EngineRequest] = []
