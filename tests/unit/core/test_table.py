"""Slots, masks and columns of the endpoint table."""

import numpy as np
import pytest

from fairlead.core import table as module
from fairlead.core.endpoint import BaseModels, Endpoint, Sample
from fairlead.core.table import EndpointTable


def endpoint(number: int, **labels: str) -> Endpoint:
    return Endpoint(f"e{number}", f"10.0.0.{number}:8000", labels)


def table_of(count: int) -> EndpointTable:
    table = EndpointTable()
    for number in range(count):
        table.add(endpoint(number))
    return table


def test_slots_are_kept_for_life_and_reused_after_it() -> None:
    table = table_of(3)
    table.remove(1)
    assert (table.count, len(table), table.ids) == (2, 3, ("e0", "", "e2"))
    assert table.alive.tolist() == [True, False, True]
    assert table.slot("e1") is None
    assert [slot for slot, _ in table.slots()] == [0, 2]
    assert table.add(endpoint(7)) == 1
    assert table.add(endpoint(8)) == 3
    assert table.ids == ("e0", "e7", "e2", "e8")
    assert table.slot("e7") == 1


def test_a_slot_begins_with_a_clean_row() -> None:
    table = table_of(2)
    assert np.isnan(table.extra("gpu_temperature")).all()
    for name in ("kv", "queue", "active", "failures", "errors", "capacity_tokens", "waiting"):
        getattr(table, name)[1] = 9.0
    table.sampled_at[1] = table.ejected_until[1] = 5.0
    table.set_adapters(1, frozenset({"poet"}))
    table.sampled(1, Sample(extra={"gpu_temperature": 80.0}))
    table.remove(1)
    for moment in ("after it left", "with its successor"):
        assert table.kv[1] == table.queue[1] == table.failures[1] == table.loaded_adapters[1] == 0, moment
        assert table.sampled_at[1] == table.ejected_until[1] == -np.inf
        assert table.adapters[1] is None
        assert table.holders("poet") is None
        assert np.isnan(table.extra("gpu_temperature")[1])
        if moment == "after it left":
            table.add(endpoint(5))


def test_bool_columns_that_a_trace_may_keep_never_change() -> None:
    table = table_of(2)
    table.set_adapters(0, frozenset({"poet"}))
    alive, poets = table.alive, table.holders("poet")
    mask = table.mask(("all",), lambda slot, e: True)
    table.set_adapters(1, frozenset({"poet"}))
    table.remove(0)
    assert alive.tolist() == [True, True]
    assert poets is not None
    assert poets.tolist() == [True, False]
    assert mask.tolist() == [True, True]
    now = table.holders("poet")
    assert now is not None
    assert now.tolist() == [False, True]


def test_a_mask_is_computed_once_until_endpoints_change() -> None:
    table = table_of(3)
    asked: list[int] = []

    def odd(slot: int, e: Endpoint) -> bool:
        asked.append(slot)
        return slot % 2 == 1

    for _ in range(3):
        assert table.mask(("odd",), odd).tolist() == [False, True, False]
    table.set_adapters(0, frozenset({"poet"}))
    assert table.mask(("odd",), odd).tolist() == [False, True, False]
    assert asked == [0, 1, 2], "adapters come and go with every scrape; label masks do not hang on them"
    table.replace(0, endpoint(0, tier="gold"))
    table.mask(("odd",), odd)
    assert len(asked) == 6
    table.remove(1)
    assert table.mask(("odd",), odd).tolist() == [False, False, False]
    table.add(endpoint(9))
    table.add(endpoint(10))
    assert table.mask(("odd",), odd).tolist() == [False, True, False, True]


def test_keeping_says_none_for_all() -> None:
    table = table_of(2)
    for _ in range(2):
        assert table.keeping(("all",), lambda slot, e: True) is None
        some = table.keeping(("some",), lambda slot, e: slot == 0)
        assert some is not None
        assert some.tolist() == [True, False]
    table.remove(1)
    all_that_live = table.keeping(("all",), lambda slot, e: True)
    assert all_that_live is not None
    assert all_that_live.tolist() == [True, False]


@pytest.mark.parametrize("size", [10, 100_000], ids=["many short names", "many long names"])
def test_names_that_clients_choose_do_not_fill_the_memory(size: int) -> None:
    table = table_of(2)
    for number in range(1500):
        key = ("model", f"{number:0{size}}")
        assert table.keeping(key, lambda slot, e: slot == 0) is not None
    held = sum(len(part) for key in table._masks for part in key if isinstance(part, str))
    assert len(table._masks) <= 1024
    assert len(table._keeping) <= 1024
    assert held < 100_000


def test_holders_follow_the_reports() -> None:
    table = table_of(3)
    table.set_adapters(0, frozenset({"a", "b"}))
    table.set_adapters(2, frozenset({"b"}))
    table.add(endpoint(3))
    found = {name: held.tolist() for name in "abc" if (held := table.holders(name)) is not None}
    assert found == {"a": [True, False, False, False], "b": [True, False, True, False]}
    assert table.loaded_adapters.tolist() == [2, 0, 1, 0]
    table.set_adapters(0, frozenset())
    table.set_adapters(2, None)
    assert table.holders("a") is None
    assert table.holders("b") is None
    assert not table._holders, "nothing is kept of adapters that nobody has"


def test_further_gauges_keep_the_last_value() -> None:
    table = table_of(2)
    table.sampled(0, Sample(extra={"x": 3.0}))
    assert table.extra("x")[0] == 3.0
    assert np.isnan(table.extra("x")[1])
    table.sampled(0, Sample(extra={"y": 1.0}))
    table.sampled(1, Sample(extra={"x": 5.0}))
    table.add(endpoint(2))
    assert table.extra("x")[:2].tolist() == [3.0, 5.0]
    assert np.isnan(table.extra("x")[2])


def test_labels_are_those_of_the_present_endpoint() -> None:
    table, decoding = table_of(1), endpoint(0, **{"llm-d.ai/role": "decode"})
    table.replace(0, decoding)
    assert table.endpoints == [decoding]
    table.remove(0)
    assert table.endpoints == [None]


def test_names_that_endpoints_had_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_MODELS", 3)
    table = table_of(1)
    table.set_listed(0, frozenset("z"))
    table.set_listed(0, frozenset("a"))
    table.remove(0)
    assert (table.had("a"), table.had("z")) == (True, False), "only one had it when it left"
    for name in "bcdef":
        table.add(endpoint(0))
        table.set_listed(0, frozenset(name))
        table.remove(0)
    assert table.had("z"), "it may have been among them"
    assert [name for name in "abcdef" if table.was(name)[1]] == ["a", "b", "c"]


def test_adapters_have_the_base_models_of_their_endpoints() -> None:
    table = table_of(3)
    qwen, gemma = frozenset({"qwen", "qwen-latest"}), frozenset({"gemma"})
    assert table.bases("sql") == table.bases("qwen") == frozenset()
    table.set_based(0, BaseModels(qwen))
    table.set_based(1, BaseModels(gemma))
    table.set_listed(0, frozenset({"sql"}))
    assert table.bases("sql") == table.bases("qwen") == {qwen}
    table.set_listed(1, frozenset({"sql"}))
    assert table.bases("sql") == {qwen, gemma}
    assert table.bases("gemma") == {gemma}
    table.set_listed(2, frozenset({"sql"}))
    assert table.bases("sql") == {qwen, gemma}, "that of an endpoint whose list names no base model is not known"


def test_endpoints_that_join_cost_the_others_nothing() -> None:
    """A file may add thousands at once."""
    table, rooms = EndpointTable(), []
    for number in range(100):
        slot = table.add(Endpoint(f"e{number}", f"10.0.0.{number}:8000"))
        table.waiting[slot] = number
        rooms.append(table.floats if table.floats.base is None else table.floats.base)
        table.set_adapters(0, frozenset({f"poet-{number}"}))
    assert table.waiting.tolist() == table.by_slot[:, 0].tolist() == list(range(100))
    assert len({id(room) for room in rooms}) < 10, "the columns are copied now and then only"
    held = table.holders("poet-99")
    assert held is not None and held.tolist() == [True] + [False] * 99


def test_an_adapter_is_known_everywhere_after_other_endpoints_joined() -> None:
    table = table_of(2)
    table.set_adapters(1, frozenset({"poet"}))
    table.add(endpoint(2))
    for held in (table.holders("poet"), table.loaded("poet")):
        assert held is not None and held.tolist() == [False, True, False]
    table.add(endpoint(3))
    table.set_adapters(3, frozenset({"poet"}))
    held = table.holders("poet")
    assert held is not None and held.tolist() == [False, True, False, True]


def test_context_lengths_differ_as_long_as_two_endpoints_say_so() -> None:
    table = table_of(3)
    for slot, tokens in enumerate((8192.0, 8192.0, 4096.0)):
        assert not table.mixed_contexts
        table.set_based(slot, BaseModels(frozenset({"m"}), {"m": tokens}))
    assert table.mixed_contexts
    table.remove(0)
    assert table.mixed_contexts
    table.remove(1)
    assert not table.mixed_contexts
