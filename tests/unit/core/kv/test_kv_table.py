"""The table of 64-bit keys against a dict, and at its limits."""

import random
from collections.abc import Iterable

import numpy as np
import pytest

from fairlead.core.kv.table import SEGMENT, Table, TableFull, spread


def filled(table: Table) -> dict[int, int]:
    found = {}
    for segment in range(table.segments):
        keys, positions = table.of_segment(segment)
        found.update(zip(keys.tolist(), table.vectors[0][positions].tolist(), strict=True))
    return found


def enter_all(table: Table, keys: Iterable[int]) -> None:
    for key in keys:
        table.enter(key)


@pytest.mark.parametrize("bits", [64, 12, 3])
def test_agrees_with_a_dict(bits: int) -> None:
    rng = random.Random(bits)
    table, model = Table(("u4", "u1")), {}
    for step in range(12_000):
        key = rng.getrandbits(bits)
        if rng.random() < (0.75 if step % 4000 < 2500 else 0.3):
            at = table.enter(key)
            assert (at >= 0) == (key not in model)
            if at >= 0:
                assert table.columns[0][at] == table.columns[1][at] == 0
                table.columns[0][at] = model[key] = step
        elif model and rng.random() < 0.9:
            key = rng.choice(list(model)) if step % 7 == 0 else key
            at = table.seek(key)
            assert (at >= 0) == (key in model)
            if at >= 0:
                assert table.columns[0][at] == model.pop(key)
                table.remove(at)
    assert table.live == len(model)
    assert filled(table) == {key if key >= 1 << 48 else spread(key): value for key, value in model.items()}
    keys = np.array([*model, *(rng.getrandbits(bits) for _ in range(3000))], np.uint64)
    positions = table.find_many(keys)
    for key, at in zip(keys.tolist(), positions.tolist(), strict=True):
        assert (table.columns[0][at] == model[key]) if key in model else at == -1


def test_many_at_once() -> None:
    table = Table(("u2",))
    rng = random.Random(1)
    keys = np.array([rng.getrandbits(64) for _ in range(5000)], np.uint64)
    for key in keys.tolist():
        at = table.enter(key)
        table.columns[0][at] = 7
    positions = table.find_many(keys)
    assert (table.vectors[0][positions] == 7).all() and len(set(positions.tolist())) == 5000
    table.remove_many(positions[:4000])
    assert table.live == 1000
    assert (table.find_many(keys[:4000]) == -1).all() and (table.find_many(keys[4000:]) >= 0).all()
    before = table.segments
    for key in keys.tolist():
        table.enter(key)
    assert table.live == 5000 and table.segments == before
    assert len(table.find_many(np.zeros(0, np.uint64))) == 0


def test_counting_keys_and_colliding_ones() -> None:
    table = Table(("u1",))
    for key in range(20_000):
        table.enter(key)
    assert table.live == 20_000 and table.segments < 64
    collide = Table(("u1",))
    top = 0xABCDEF0123 << 24
    with pytest.raises(TableFull):
        enter_all(collide, range(top, top + 5000))
    assert SEGMENT // 2 < collide.live <= SEGMENT
    assert collide.seek(top) >= 0
    assert collide.enter(top ^ 1 << 63) >= 0


def test_keys_with_equal_top_bits_do_not_grow_the_directory() -> None:
    rng = random.Random(1)
    colliding = Table(("u8", "u2"))
    top = 0xFFFFF << 44
    enter_all(colliding, (top | rng.getrandbits(44) for _ in range(900)))
    assert colliding.nbytes < 1_000_000
    # Hashes of 56 bits are only uneven.
    uneven = Table(("u8", "u2"))
    enter_all(uneven, (rng.getrandbits(56) | 1 << 48 for _ in range(20_000)))
    assert uneven.live == 20_000


def test_limit() -> None:
    table = Table(("u1",), limit=2)
    rng = random.Random(1)
    with pytest.raises(TableFull):
        enter_all(table, (rng.getrandbits(64) for _ in range(5000)))
    assert 1500 < table.live <= 2 * SEGMENT and table.segments == 2


def test_memory_is_what_is_used() -> None:
    table = Table(("u8", "u2"), reserve=4096)
    assert table.nbytes < 25_000
    rng = random.Random(1)
    for _ in range(50_000):
        table.enter(rng.getrandbits(64))
    assert 18 * 50_000 / 0.76 < table.nbytes < 18 * 50_000 / 0.37
