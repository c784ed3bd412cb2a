"""Filters for endpoints that can serve a request: by role, labels, context length, the gateway's subset, model."""

from collections.abc import Mapping
from typing import Literal

import numpy as np
from pydantic import Field

from fairlead.core.columns import BoolColumn
from fairlead.core.endpoint import MODEL_LABEL, STAGES
from fairlead.core.flow import NO_ENDPOINTS
from fairlead.core.models import MODEL_NOT_FOUND
from fairlead.core.policy import Cycle, Refused, Stage
from fairlead.core.request import Request
from fairlead.core.table import EndpointTable
from fairlead.core.view import FleetView
from fairlead.plugins.columns import LABEL, ContextRanges, unless_all
from fairlead.plugins.params import NoParams, Params, Plain


class RoleParams(Params):
    stage: Literal["decode", "prefill", "encode"] = Field(
        default="decode", description="The stage that the endpoint must be able to do."
    )


class Role:
    """Keeps endpoints whose role includes `stage`."""

    type = "role"
    Params = RoleParams
    stage = Stage.ABILITY
    steady = True

    def __init__(self, params: RoleParams, name: str = type) -> None:
        self.name = name
        self._key = ("role", params.stage)
        self._roles = STAGES[params.stage]

    def keep(self, request: Request, fleet: FleetView, cycle: Cycle) -> BoolColumn | None:
        return fleet.table.keeping(self._key, lambda _, e: e.role in self._roles)


class ByLabelParams(Params):
    label: str = Field(description="The label to look at.")
    valid_values: tuple[str, ...] = Field(default=(), description="Accepted values; none = any.")
    allows_no_label: bool = Field(default=False, description="Keep endpoints without the label too.")


class ByLabel:
    """Keeps endpoints whose `label` is one of `validValues`; `allowsNoLabel` also keeps those without the label."""

    type = "by-label"
    Params = ByLabelParams
    stage = Stage.ABILITY

    def __init__(self, params: ByLabelParams, name: str = type) -> None:
        self.name = name
        self._label = params.label
        values: set[str | None] = {*params.valid_values}
        if params.allows_no_label:
            values.add(None)
        self._values = frozenset(values)
        self._key = ("by label", self._label, self._values)

    def keep(self, request: Request, fleet: FleetView, cycle: Cycle) -> BoolColumn | None:
        return fleet.table.keeping(self._key, lambda _, e: e.labels.get(self._label) in self._values)


class Requirement(Params):
    key: str = Field(description="A label.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"] = Field(description="As in Kubernetes.")
    values: tuple[str, ...] = Field(default=(), description="For `In` and `NotIn`.")


class LabelSelectorParams(Params):
    match_labels: dict[str, str] = Field(default={}, description="Labels and the values they must have.")
    match_expressions: tuple[Requirement, ...] = Field(default=(), description="Conditions, all of which must hold.")


class LabelSelector:
    """Keeps endpoints that satisfy every label and every expression."""

    type = "label-selector"
    Params = LabelSelectorParams
    stage = Stage.ABILITY

    def __init__(self, params: LabelSelectorParams, name: str = type) -> None:
        self.name = name
        self._params = params
        self._key = ("labels", name, repr(params))

    def keep(self, request: Request, fleet: FleetView, cycle: Cycle) -> BoolColumn | None:
        return fleet.table.keeping(self._key, lambda _, e: self._matches(e.labels))

    def _matches(self, labels: Mapping[str, str]) -> bool:
        wanted = self._params.match_labels.items()
        return all(labels.get(key) == value for key, value in wanted) and all(
            _holds(requirement, labels) for requirement in self._params.match_expressions
        )


def _holds(requirement: Requirement, labels: Mapping[str, str]) -> bool:
    """Whether the requirement holds, with the semantics of Kubernetes: `NotIn` also holds for an absent key."""
    present = requirement.key in labels
    match requirement.operator:
        case "In":
            return present and labels[requirement.key] in requirement.values
        case "NotIn":
            return not present or labels[requirement.key] not in requirement.values
        case "Exists":
            return present
        case "DoesNotExist":
            return not present


class ContextLengthParams(Params):
    label: str = Field(default=LABEL, description="The label to look at.")


class ContextLength:
    """Keeps endpoints whose range includes the prompt's tokens, and those without a range."""

    type = "context-length"
    Params = ContextLengthParams
    stage = Stage.ABILITY

    def __init__(self, params: ContextLengthParams, name: str = type) -> None:
        self.name = name
        self._ranges = ContextRanges(params.label)

    def keep(self, request: Request, fleet: FleetView, cycle: Cycle) -> BoolColumn | None:
        ranges, tokens = self._ranges, request.prompt_tokens
        if not ranges.read(fleet):
            return None
        return unless_all(~((ranges.low > tokens) | (ranges.high < tokens)))  # both false for NaN


# `subset`: only endpoints in the gateway's subset hint.
#
# An entry is `ip:port` or `ip` (all ports). An IPv6 address is in brackets, which are optional without a port. No hint
# means no restriction; an empty hint allows no endpoint.
# Source: Gateway API Inference Extension, endpoint picker protocol 1.0.


class Subset(Plain[NoParams]):
    """Keeps endpoints whose address, or its host part, is in the request's subset."""

    type = "subset"
    stage = Stage.ABILITY
    steady = True

    def keep(self, request: Request, fleet: FleetView, cycle: Cycle) -> BoolColumn | None:
        subset = request.subset
        if subset is None:
            return None
        return fleet.table.keeping(("subset", subset), lambda _, e: _named(e.address, subset))


def _named(address: str, subset: frozenset[str]) -> bool:
    if address in subset:
        return True
    host = address.rpartition(":")[0]
    return host in subset or host.strip("[]") in subset


# `model-compatibility`: only endpoints that serve the requested model or adapter.
#
# vLLM's metrics page lists an adapter only while requests use it (`vllm:lora_requests_info`); `/v1/models` lists all
# that are loaded. An endpoint is kept if
#
# * its label `model-id` is the requested model, or
# * its metrics page, its `/v1/models` or its label `lora-adapters` (comma-separated) has the requested name, or
# * another endpoint has the adapter loaded, no label has it, and this endpoint's list of models is not known (not all
#   requests should go to the only endpoint that happens to run the adapter), or
# * another endpoint has the adapter loaded, no label has it, and this endpoint loads adapters on demand
#   (`core.adapters`), or
# * no endpoint has the name as an adapter, and this one has no label `model-id` and no list of models, or
# * no endpoint has the name as an adapter or as `model-id` or in its list of models, and this one has no label
#   `model-id`, or has adapter slots (it may load it on demand). If an endpoint that left had the name, this one must
#   have no list of models either, unless it was an adapter, and this one has slots, loads on demand, or has no other
#   label and a page that does not show (yet) whether it has slots. Names that only went from a list do not count.
#
# "Not known" does not include a list that is about to be read for the first time, if the endpoints that are known
# differ, or as many have the name as are about to be read. At the start, when little is known, these get requests too.
#
# Without a label, the model's name in the endpoint's list of models counts like the label. If endpoints serve the model
# with different context lengths, those too short for the prompt and the longest answer are left out, unless all are.


class ModelCompatibility(Plain[NoParams]):
    """Keeps endpoints that can serve the request's model, and whose context is long enough if that of another is."""

    type = "model-compatibility"
    stage = Stage.ABILITY
    steady = True

    def keep(self, request: Request, fleet: FleetView, cycle: Cycle) -> BoolColumn | None:
        table, model = fleet.table, request.target_model
        able = table.answer(("compatible", model), lambda: _compatible(table, model)) if model else None
        contexts = table.contexts(model)
        if contexts is None:
            return able
        return _long_enough(
            table.alive if able is None else able,
            contexts >= request.prompt_tokens + request.max_tokens,
            table.alive if cycle.left is None else cycle.left,
        )

    def refusal(self, request: Request, fleet: FleetView, cycle: Cycle) -> Refused | None:
        """A name that no endpoint had when it left is the client's mistake. One that some had may be back soon: clients
        know it by the name that they asked for."""
        model = request.target_model
        able = self.keep(request, fleet, cycle)
        if able is None or np.count_nonzero(able):
            return None
        if fleet.table.had(model):
            return Refused(NO_ENDPOINTS, f"no endpoint serves the model `{request.model or model}` now")
        return Refused(MODEL_NOT_FOUND, f"The model `{model}` does not exist.", status=404)


def _compatible(table: EndpointTable, model: str) -> BoolColumn | None:
    promised = table.mask(("promised", model), lambda _, e: model in e.promised)
    loaded = table.loaded(model)
    if np.count_nonzero(promised):
        able = promised | table.base(model)
        return unless_all(able if loaded is None else able | loaded)
    if loaded is not None:
        could_load = table.dynamic & (table.max_adapters > 0)
        return unless_all(loaded | _unknown(table, table.unlisted, loaded) | could_load | table.base(model))
    has = table.base(model)
    silent = table.mask(("silent",), lambda slot, endpoint: not table.base_names(slot, endpoint))
    if np.count_nonzero(has):
        return unless_all(has | _unknown(table, silent, has))
    was_base, was_adapter = table.was(model)
    if was_base and not was_adapter:
        return unless_all(silent)
    plain = table.mask(("serves", model), lambda _, e: e.labels.get(MODEL_LABEL, model) == model)
    if was_adapter:
        unknown = np.array([adapters is None for adapters in table.adapters], dtype=np.bool_)
        plain = silent | plain & unknown | table.dynamic
    return unless_all(plain | (table.max_adapters > 0))


def _unknown(table: EndpointTable, silent: BoolColumn, has: BoolColumn) -> BoolColumn:
    """The endpoints among the `silent` ones, whose models are not known, that may serve a name like those of `has`."""
    unread = silent & table.mask(("unread",), lambda slot, _: table.based[slot].unread)
    differ = np.count_nonzero(has | silent) < table.count
    return silent & ~unread if differ or np.count_nonzero(unread) <= np.count_nonzero(has) else silent


def _long_enough(able: BoolColumn, long: BoolColumn, left: BoolColumn) -> BoolColumn:
    """The able endpoints whose context is long enough; all able ones if none of these is left. Never returns `None`: a
    profile would remember that for the model, and not call the filter again."""
    fits = able & long
    return fits if np.count_nonzero(fits & left) else able
