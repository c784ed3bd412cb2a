"""`context-length`: only endpoints that are meant for prompts of this length, by a label such as `0-8192`."""

from fairlead.fleet.columns import BoolColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.context_ranges import LABEL, ContextRanges
from fairlead.plugins.masks import unless_all
from fairlead.plugins.params import Params
from fairlead.schedule.cycle import Cycle


class ContextLengthParams(Params, frozen=True, kw_only=True):
    #: Label with the range, in tokens.
    label: str = LABEL


class ContextLength:
    """Keeps endpoints whose range includes the prompt's tokens, and those without a range."""

    type = "context-length"
    Params = ContextLengthParams
    hard = True

    def __init__(self, params: ContextLengthParams, name: str = type) -> None:
        self.name = name
        self._ranges = ContextRanges(params.label)

    def keep(self, request: Request, fleet: Fleet, cycle: Cycle) -> BoolColumn | None:
        ranges, tokens = self._ranges, request.prompt_tokens
        if not ranges.read(fleet):
            return None
        return unless_all(~((ranges.low > tokens) | (ranges.high < tokens)))  # both false for NaN
