"""Hard filters: role, label-selector, model-compatibility, subset."""

from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from fairlead.core.columns import BoolColumn
from fairlead.core.endpoint import BaseModels, Endpoint, Sample
from fairlead.core.fleet import Fleet
from fairlead.core.policy import Context, Cycle, Filter, Stage
from fairlead.core.request import Request
from fairlead.core.table import ON_DEMAND
from fairlead.plugins.filters.ability import (
    LabelSelector,
    LabelSelectorParams,
    ModelCompatibility,
    Requirement,
    Role,
    RoleParams,
    Subset,
)
from fairlead.plugins.params import NoParams

ADDRESSES = ["10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.2:8000", "[fd00::1]:8000", "[fd00::2]:8000"]


def fleet_of(*labels: dict[str, str]) -> Fleet:
    fleet = Fleet()
    for number, entry in enumerate(labels):
        fleet.up(Endpoint(f"e{number}", f"10.0.0.{number}:8000", entry))
    return fleet


def kept(plugin: Filter, fleet: Fleet, request: Request | None = None) -> list[int]:
    """Slots kept among the living."""
    request = request or Request(id=1, arrived=0.0)
    mask: BoolColumn | None = plugin.keep(request, fleet, Cycle(Context(0.0, Random(0))))
    assert mask is None or not mask.all(), "`None` says it cheaper"
    return [slot for slot, _ in fleet.table.slots() if mask is None or mask[slot]]


ROLES = ["", "decode", "prefill", "encode", "prefill-decode", "both", "encode-prefill", "encode-prefill-decode", "odd"]


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ("decode", {"", "decode", "prefill-decode", "both", "encode-prefill-decode"}),
        ("prefill", {"prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode"}),
        ("encode", {"encode", "encode-prefill", "encode-prefill-decode"}),
    ],
)
def test_role(stage: str, expected: set[str]) -> None:
    fleet = fleet_of(*({"llm-d.ai/role": role} if role else {} for role in ROLES))
    plugin = Role(RoleParams(stage=stage))  # type: ignore[arg-type]
    assert {ROLES[slot] for slot in kept(plugin, fleet)} == expected
    assert plugin.stage is Stage.ABILITY


def test_role_follows_relabelling() -> None:
    fleet = fleet_of({}, {})
    plugin = Role(RoleParams())
    assert kept(plugin, fleet) == [0, 1]
    fleet.up(Endpoint("e0", "10.0.0.0:8000", {"llm-d.ai/role": "prefill"}))
    assert kept(plugin, fleet) == [1]


def expressions(*requirements: tuple[str, ...]) -> LabelSelectorParams:
    """From (key, operator, values…)."""
    return LabelSelectorParams(
        match_expressions=tuple(
            Requirement(key=key, operator=operator, values=tuple(values))  # type: ignore[arg-type]
            for key, operator, *values in requirements
        )
    )


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (LabelSelectorParams(), [0, 1, 2, 3]),
        (LabelSelectorParams(match_labels={"tier": "gold"}), [0, 1]),
        (LabelSelectorParams(match_labels={"tier": "gold", "zone": "a"}), [0]),
        (LabelSelectorParams(match_labels={"tier": "none"}), []),
        (expressions(("tier", "In", "gold", "tin")), [0, 1, 2]),
        (expressions(("tier", "In")), []),
        (expressions(("tier", "NotIn", "gold")), [2, 3]),
        (expressions(("zone", "Exists")), [0, 3]),
        (expressions(("tier", "DoesNotExist")), [3]),
        (expressions(("tier", "Exists"), ("tier", "NotIn", "tin")), [0, 1]),
        (
            LabelSelectorParams(
                match_labels={"zone": "a"}, match_expressions=(Requirement(key="tier", operator="Exists"),)
            ),
            [0],
        ),
    ],
)
def test_label_selector(params: LabelSelectorParams, expected: list[int]) -> None:
    fleet = fleet_of({"tier": "gold", "zone": "a"}, {"tier": "gold"}, {"tier": "tin"}, {"zone": "a"})
    assert kept(LabelSelector(params), fleet) == expected


def test_two_selectors_do_not_share_their_masks() -> None:
    fleet = fleet_of({"tier": "gold"}, {"tier": "tin"})
    gold = LabelSelector(LabelSelectorParams(match_labels={"tier": "gold"}))
    tin = LabelSelector(LabelSelectorParams(match_labels={"tier": "tin"}))
    assert (kept(gold, fleet), kept(tin, fleet), kept(gold, fleet)) == ([0], [1], [0])


@pytest.mark.parametrize(
    ("subset", "expected"),
    [
        (None, [0, 1, 2, 3, 4]),
        ([], []),
        (["10.0.0.1:8001"], [1]),
        (["10.0.0.1"], [0, 1]),
        (["10.0.0.1", "10.0.0.2:8000"], [0, 1, 2]),
        (["10.0.0.2:9999"], []),
        (["10.0.0"], []),
        (["[fd00::1]:8000"], [3]),
        (["[fd00::1]"], [3]),
        (["fd00::1"], [3]),
        (["[fd00::1]:9"], []),
        (["elsewhere", "[fd00::2]:8000"], [4]),
    ],
)
def test_subset(subset: list[str] | None, expected: list[int]) -> None:
    fleet = Fleet()
    for number, address in enumerate(ADDRESSES):
        fleet.up(Endpoint(f"e{number}", address))
    request = Request(id=1, arrived=0.0, subset=None if subset is None else frozenset(subset))
    plugin = Subset(NoParams())
    assert kept(plugin, fleet, request) == expected
    assert plugin.stage is Stage.ABILITY


def model_fleet() -> Fleet:
    """0 and 1 serve llama, 1 with adapters; 2 serves qwen with adapters; 3 says nothing of itself."""
    fleet = fleet_of({"model-id": "llama"}, {"model-id": "llama"}, {"model-id": "qwen"}, {})
    for slot in (1, 2):
        fleet.sampled(f"e{slot}", 0.0, 0.0, Sample(adapters=frozenset(), max_adapters=4))
    return fleet


@pytest.mark.parametrize(
    ("model", "expected", "why"),
    [
        ("", [0, 1, 2, 3], "no model asked for"),
        ("llama", [0, 1, 3], "a base model: its label, or unlabelled; the adapter slots of qwen do not help"),
        ("poet", [1, 2, 3], "nobody reports it: whoever may load it on demand, and who says nothing"),
    ],
)
def test_model_compatibility_without_reports(model: str, expected: list[int], why: str) -> None:
    request = Request(id=1, arrived=0.0, model=model)
    assert kept(ModelCompatibility(NoParams()), model_fleet(), request) == expected, why


def test_a_model_that_is_only_a_label() -> None:
    fleet = fleet_of({"model-id": "llama"}, {"model-id": "qwen"})
    plugin = ModelCompatibility(NoParams())
    assert kept(plugin, fleet, Request(id=1, arrived=0.0, model="qwen")) == [1]
    assert kept(plugin, fleet, Request(id=1, arrived=0.0, model="other")) == []


def test_an_adapter_that_is_reported_must_be_loaded() -> None:
    fleet = model_fleet()
    for name in ("e0", "e1", "e2", "e3"):
        fleet.adapters_listed(name, frozenset())
    plugin = ModelCompatibility(NoParams())
    request = Request(id=1, arrived=0.0, model="poet")
    fleet.sampled("e2", 1.0, 1.0, Sample(adapters=frozenset({"poet", "critic"}), max_adapters=4))
    assert kept(plugin, fleet, request) == [2]
    fleet.sampled("e1", 1.0, 1.0, Sample(adapters=frozenset({"poet"}), max_adapters=4))
    assert kept(plugin, fleet, request) == [1, 2]
    fleet.down("e2")
    assert kept(plugin, fleet, request) == [1]
    fleet.sampled("e1", 2.0, 2.0, Sample(adapters=frozenset(), max_adapters=4))
    assert kept(plugin, fleet, request) == [1, 3], "no report left"


def test_an_adapter_that_is_loaded_but_not_running_is_loaded() -> None:
    fleet, plugin = model_fleet(), ModelCompatibility(NoParams())
    poet = Request(id=1, arrived=0.0, model="poet")
    fleet.sampled("e1", 1.0, 1.0, Sample(adapters=frozenset({"poet"}), max_adapters=4))
    assert kept(plugin, fleet, poet) == [0, 1, 2, 3], "what the others have loaded is not known"
    fleet.adapters_listed("e1", frozenset())
    fleet.adapters_listed("e2", frozenset({"poet", "critic"}))
    fleet.adapters_listed("e3", frozenset({"critic"}))
    assert kept(plugin, fleet, poet) == [0, 1, 2]
    fleet.adapters_listed("e0", frozenset())
    assert kept(plugin, fleet, poet) == [1, 2], "the page of one and the list of the other"
    fleet.adapters_listed("e2", None)
    fleet.sampled("e1", 2.0, 2.0, Sample(adapters=frozenset(), max_adapters=4))
    assert kept(plugin, fleet, poet) == [1, 2, 3], "nobody has it: whoever may load it"
    assert kept(plugin, fleet, Request(id=1, arrived=0.0, model="critic")) == [2, 3]
    fleet.down("e3")
    assert kept(plugin, fleet, Request(id=1, arrived=0.0, model="critic")) == [1, 2]


def test_a_promise_holds_where_lists_are_not_known() -> None:
    fleet, plugin = fleet_of({"lora-adapters": "poet"}, {}, {}), ModelCompatibility(NoParams())
    fleet.adapters_listed("e1", frozenset({"poet"}))
    assert kept(plugin, fleet, Request(id=1, arrived=0.0, model="poet")) == [0, 1]


def test_a_promised_adapter_counts_like_a_reported_one() -> None:
    fleet = fleet_of({"lora-adapters": "poet, critic"}, {"lora-adapters": "critic"}, {"model-id": "critic"}, {})
    plugin = ModelCompatibility(NoParams())
    assert kept(plugin, fleet, Request(id=1, arrived=0.0, model="poet")) == [0]
    assert kept(plugin, fleet, Request(id=1, arrived=0.0, model="critic")) == [0, 1, 2]
    assert kept(plugin, fleet, Request(id=1, arrived=0.0, model="poe")) == [0, 1, 3]


def listed(fleet: Fleet, *bases: BaseModels) -> Fleet:
    for number, base in enumerate(bases):
        fleet.adapters_listed(f"e{number}", frozenset(), base)
    return fleet


TINY, LARGE = BaseModels(frozenset({"tiny", "t"})), BaseModels(frozenset({"large"}))


@pytest.mark.parametrize(
    ("model", "expected", "why"),
    [
        ("tiny", [0, 2, 3], "its list has it, the label says it, or nothing is known"),
        ("t", [0, 3], "the label counts before the list"),
        ("large", [1, 3], "its list has it, or nothing is known"),
        ("poet", [0, 1, 3], "nobody has it: whoever has no other label"),
    ],
)
def test_without_a_label_the_list_says_which_model_it_is(model: str, expected: list[int], why: str) -> None:
    fleet, plugin = fleet_of({}, {}, {"model-id": "tiny"}, {}), ModelCompatibility(NoParams())
    request = Request(id=1, arrived=0.0, model=model)
    assert kept(plugin, fleet, request) == ([0, 1, 2, 3] if model == "tiny" else [0, 1, 3]), "no list was read yet"
    listed(fleet, TINY, LARGE, TINY)
    assert kept(plugin, fleet, request) == expected, why


def awaited(lists: int, of: int) -> Fleet:
    """Endpoints whose lists are about to be read, except for the first ones, which list `tiny` and an adapter."""
    fleet = Fleet()
    for number in range(of):
        fleet.up(Endpoint(f"e{number}", f"10.0.0.{number}:8000"), listing=True)
    for number in range(lists):
        fleet.adapters_listed(f"e{number}", frozenset({"poet"}), TINY)
    return fleet


@pytest.mark.parametrize("model", ["tiny", "poet"])
def test_an_endpoint_whose_list_is_about_to_be_read_does_not_get_what_others_have(model: str) -> None:
    fleet, plugin, asked = awaited(2, 3), ModelCompatibility(NoParams()), Request(id=1, arrived=0.0, model=model)
    assert kept(plugin, fleet, asked) == [0, 1]
    assert kept(plugin, fleet, replace(asked, model="nobody's")) == [0, 1, 2]
    fleet.adapters_listed("e2", None)
    assert kept(plugin, fleet, asked) == [0, 1, 2], "it has no list"
    fleet.adapters_listed("e2", frozenset({"poet"}), TINY)
    assert kept(plugin, fleet, asked) == [0, 1, 2]
    fleet.up(Endpoint("e2", "10.0.0.2:8001"), listing=True)
    assert kept(plugin, fleet, asked) == [0, 1], "another address, another server"


@pytest.mark.parametrize("model", ["tiny", "poet"])
def test_at_the_start_the_first_list_does_not_draw_all_requests(model: str) -> None:
    asked = Request(id=1, arrived=0.0, model=model)
    fleet, plugin = awaited(0, 5), ModelCompatibility(NoParams())
    assert kept(plugin, fleet, asked) == [0, 1, 2, 3, 4]
    for number, expected in ((0, [0, 1, 2, 3, 4]), (1, [0, 1, 2, 3, 4]), (2, [0, 1, 2]), (3, [0, 1, 2, 3])):
        fleet.adapters_listed(f"e{number}", frozenset({"poet"}), TINY)
        assert kept(plugin, fleet, asked) == expected


@pytest.mark.parametrize("model", ["tiny", "poet"])
def test_at_the_start_of_a_mixed_pool_no_list_is_guessed(model: str) -> None:
    fleet, plugin = awaited(1, 5), ModelCompatibility(NoParams())
    fleet.adapters_listed("e1", frozenset(), LARGE)
    assert kept(plugin, fleet, Request(id=1, arrived=0.0, model=model)) == [0]


def test_a_model_whose_endpoints_have_left_goes_where_no_list_was_read() -> None:
    fleet, plugin = listed(fleet_of({}, {}, {}), TINY, LARGE), ModelCompatibility(NoParams())
    asked, unseen = Request(id=1, arrived=0.0, model="tiny"), Request(id=2, arrived=0.0, model="unseen")
    fleet.sampled("e1", 0.0, 0.0, Sample(adapters=frozenset(), max_adapters=4))
    assert kept(plugin, fleet, asked) == [0, 2]
    fleet.down("e0")
    assert kept(plugin, fleet, asked) == [2]
    fleet.adapters_listed("e2", frozenset(), LARGE)
    assert kept(plugin, fleet, asked) == []
    assert kept(plugin, fleet, unseen) == [1, 2], "they may know it by another name"
    refusal = plugin.refusal(asked, fleet, Cycle(Context(0.0, Random(0))))
    assert refusal is not None and refusal.status == 503, "it may be back soon"
    fleet.up(Endpoint("new", "10.0.0.9:8000"), listing=True)
    assert kept(plugin, fleet, asked) == [0], "it is about to be read"


def test_a_label_that_has_left_is_not_an_adapter() -> None:
    fleet, plugin = model_fleet(), ModelCompatibility(NoParams())
    fleet.down("e3")
    asked = Request(id=1, arrived=0.0, model="llama")
    fleet.down("e0")
    assert kept(plugin, fleet, asked) == [1]
    fleet.down("e1")
    assert kept(plugin, fleet, asked) == [], "qwen has slots for adapters"


def test_an_adapter_whose_endpoints_have_left_goes_where_it_may_be_loaded() -> None:
    fleet, plugin = listed(fleet_of({}, {}, {}, {}), TINY, TINY, LARGE), ModelCompatibility(NoParams())
    asked = Request(id=1, arrived=0.0, model="poet")
    fleet.adapters_listed("e0", frozenset({"poet"}), TINY)
    fleet.sampled("e1", 0.0, 0.0, Sample(adapters=frozenset(), max_adapters=4))
    fleet.sampled("e2", 0.0, 0.0, Sample(adapters=frozenset()))
    fleet.down("e0")
    assert kept(plugin, fleet, asked) == [1, 3], "it has slots, or no list"


def test_an_adapter_whose_endpoints_have_left_goes_where_slots_are_not_known() -> None:
    fleet, plugin = listed(fleet_of({}), TINY), ModelCompatibility(NoParams())
    asked, base = Request(id=1, arrived=0.0, model="poet"), Request(id=2, arrived=0.0, model="tiny")
    fleet.adapters_listed("e0", frozenset({"poet"}), TINY)
    fleet.up(Endpoint("new", "10.0.0.9:8000"), listing=True)
    fleet.adapters_listed("new", frozenset(), LARGE)
    fleet.down("e0")
    assert kept(plugin, fleet, asked) == [1] and kept(plugin, fleet, base) == []
    fleet.sampled("new", 0.0, 0.0, Sample())
    assert kept(plugin, fleet, asked) == [1], "its page does not say"
    fleet.sampled("new", 1.0, 1.0, Sample(adapters=frozenset()))
    assert kept(plugin, fleet, asked) == [], "it has no slots"
    fleet.table.set_listed(1, frozenset({ON_DEMAND}))
    assert kept(plugin, fleet, asked) == [1], "it loads adapters on demand"


@pytest.mark.parametrize("labels", [{}, {"model-id": "other"}])
def test_a_name_that_only_went_from_a_list_counts_as_one_that_nobody_had(labels: dict[str, str]) -> None:
    fleet, plugin = listed(fleet_of({}, labels), TINY), ModelCompatibility(NoParams())
    fleet.adapters_listed("e0", frozenset({"poet"}), TINY)
    fleet.adapters_listed("e0", frozenset(), LARGE)
    names = ("tiny", "poet", "unseen")
    tiny, poet, unseen = (kept(plugin, fleet, Request(id=1, arrived=0.0, model=name)) for name in names)
    assert tiny == poet == unseen == ([0] if labels else [0, 1]), "the server answers 404"


def lengths(*contexts: int) -> Fleet:
    """Endpoints with these contexts; the last one has no list."""
    known = [{"m": tokens} if tokens else {} for tokens in contexts]
    return listed(fleet_of(*({} for _ in contexts), {}), *(BaseModels(frozenset({"m"}), named) for named in known))


@pytest.mark.parametrize(
    ("prompt", "most", "expected"),
    [(500, 12, {0, 1, 2, 3}), (500, 13, {1, 2, 3}), (513, 0, {1, 2, 3}), (4000, 0, {2, 3}), (9000, 0, {2, 3})],
)
def test_a_context_that_is_too_short(prompt: int, most: int, expected: set[int]) -> None:
    asked = Request(id=1, arrived=0.0, model="m", prompt_tokens=prompt, max_tokens=most)
    mask = ModelCompatibility(NoParams()).keep(asked, lengths(512, 2048, 0), Cycle(Context(0.0, Random(0))))
    assert mask is not None and set(mask.nonzero()[0].tolist()) == expected


@pytest.mark.parametrize(
    ("model", "expected"),
    [("chat", [0, 1]), ("embed", [1, 2]), ("poet", [0, 1, 2]), ("", [0, 1, 2])],
)
def test_contexts_are_those_of_the_model(model: str, expected: list[int]) -> None:
    bases = ({"chat": 4096, "embed": 512}, {"chat": 8192, "embed": 8192}, {"embed": 8192}, {"chat": 512})
    fleet = listed(fleet_of({}, {}, {}, {}), *(BaseModels(frozenset(known), known) for known in bases))
    asked, cycle = Request(id=1, arrived=0.0, model=model, prompt_tokens=1000), Cycle(Context(0.0, Random(0)))
    cycle.left = fleet.table.alive
    mask = ModelCompatibility(NoParams()).keep(asked, fleet, cycle)
    assert np.arange(4)[... if mask is None else mask].tolist() == expected


def test_a_request_that_is_too_long_for_all_goes_anywhere() -> None:
    fleet, cycle = lengths(512, 2048), Cycle(Context(0.0, Random(0)))
    fleet.down("e2")
    for model in ("m", ""):
        asked = Request(id=1, arrived=0.0, model=model, prompt_tokens=600)
        mask = ModelCompatibility(NoParams()).keep(asked, fleet, cycle)
        assert mask is not None and mask.tolist() == [False, True, False]
        mask = ModelCompatibility(NoParams()).keep(replace(asked, prompt_tokens=6000), fleet, cycle)
        assert mask is not None and mask.tolist() == [True, True, False]
    cycle.left = np.array([True, False, False])
    mask = ModelCompatibility(NoParams()).keep(asked, fleet, cycle)
    assert mask is not None and mask.tolist() == [True, True, False], "other filters took the long one"


@pytest.mark.parametrize("plugin", [Role(RoleParams()), ModelCompatibility(NoParams()), Subset(NoParams())])
def test_slots_of_departed_endpoints_are_never_named(plugin: Filter) -> None:
    fleet = fleet_of({}, {}, {"model-id": "other", "llm-d.ai/role": "prefill"})
    fleet.down("e1")
    request = Request(id=1, arrived=0.0, model="m", subset=frozenset({"10.0.0.0", "10.0.0.1"}))
    mask = plugin.keep(request, fleet, Cycle(Context(0.0, Random(0))))
    assert mask is not None
    assert mask.tolist() == [True, False, False]
