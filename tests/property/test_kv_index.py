"""The exact index against a naive model: random stores, copies, removals, clears, gaps, tiers, ranks, groups, orphans.

The default run is short; FAIRLEAD_KV_STEPS sets the number of steps.
"""

import os
import random
from array import array
from collections import Counter

import numpy as np
from kv_blocks import apply_all

from fairlead.core.kv.events import AllCleared, BlocksRemoved, BlocksStored
from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.keys import OwnSpace, prompt_keys
from fairlead.core.kv.match import BlockChain

STEPS = int(os.environ.get("FAIRLEAD_KV_STEPS", "1500"))
SLOTS, BLOCK = 5, 4
MEDIA = ("GPU", "CPU", "DISK", "weird")
MODELS = ("base", "base", "base", "other", "base")
Path = tuple[int, ...]


class Naive:
    """(slot, rank) → (group, tier) → path of block contents → copies; and what waits for a parent."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], dict[tuple[int, int], Counter[Path]]] = {}
        self.waiting: dict[tuple[int, int], dict[tuple[int, int], Counter[Path]]] = {}

    def knows(self, model: str, path: Path) -> bool:
        return any(
            path in copies
            for (slot, _), shelves in self.held.items()
            if MODELS[slot] == model
            for copies in shelves.values()
        )

    def store(self, cache: tuple[int, int], shelf: tuple[int, int], path: Path, known: bool) -> None:
        self.held.setdefault(cache, {}).setdefault(shelf, Counter())
        side = self.held if known else self.waiting
        if path in self.held[cache][shelf]:
            side = self.held
        side.setdefault(cache, {}).setdefault(shelf, Counter())[path] += 1

    def adopt(self) -> None:
        """Whatever waits for a path that is known now is held."""
        again = True
        while again:
            again = False
            for cache, shelves in self.waiting.items():
                for shelf, copies in shelves.items():
                    for path in list(copies):
                        if self.knows(MODELS[cache[0]], path[:-1]):
                            held = self.held.setdefault(cache, {}).setdefault(shelf, Counter())
                            held[path] += copies.pop(path)
                            again = True

    def remove(self, cache: tuple[int, int], shelf: tuple[int, int], path: Path) -> None:
        for side in (self.held, self.waiting):
            copies = side.get(cache, {}).get(shelf, Counter())
            if path in copies:
                copies[path] -= 1
                if not copies[path]:
                    del copies[path]
                return

    def clear(self, cache: tuple[int, int]) -> None:
        self.held.pop(cache, None)
        self.waiting.pop(cache, None)

    def match(self, slot: int, model: str, path: Path, rank: int | None = None) -> tuple[int, list[int]]:
        """Of one rank, or of the best."""
        best: tuple[int, list[int]] = (0, [0] * 4)
        if MODELS[slot] != model:
            return best
        for (owner, which), shelves in self.held.items():
            if owner != slot or not shelves or rank not in (None, which):
                continue
            least: tuple[int, list[int]] | None = None
            for group in {group for group, _ in shelves}:
                depth, tiers = 0, [0] * 4
                for end in range(1, len(path) + 1):
                    found = [tier for tier in range(4) if path[:end] in shelves.get((group, tier), ())]
                    if not found:
                        break
                    depth += 1
                    tiers[found[0]] += 1
                if least is None or depth < least[0]:
                    least = (depth, tiers)
            if least is not None and least[0] > best[0]:
                best = least
        return best


def digest(model: str, path: Path) -> int:
    return hash((model, path)) & (2**64 - 1) if len(path) != 2 else (hash(path) & 0xFFFF) + 2


def tokens(path: Path) -> bytes:
    return b"".join(array("I", [content] * BLOCK).tobytes() for content in path)


class Run:
    """One random history, applied to both."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.index = KvIndex(max_blocks=200_000)
        self.naive = Naive()
        for slot in range(SLOTS):
            self.index.add_slot(slot)

    def path(self) -> Path:
        rng = self.rng
        return tuple(rng.choice((1, 2, 3)) if rng.random() < 0.3 else 1 for _ in range(rng.randint(1, 7)))

    def step(self) -> None:
        rng = self.rng
        slot, rank = rng.randrange(SLOTS), rng.choice((0, 0, 0, 1))
        model, cache = MODELS[slot], (slot, rank)
        group, tier = rng.choice((0, 0, 0, 0, 1)), rng.choice((0, 0, 0, 1, 2, 3))
        path = self.path()
        ours = self.index.rank(slot, rank, model)
        draw = rng.random()
        if draw < 0.45:
            start = 0 if rng.random() < 0.6 else rng.randrange(len(path))
            if rng.random() < 0.1:
                start = max(0, len(path) - 1)
            self.store(cache, model, path, start, group, tier)
        elif draw < 0.6:
            # Tokens untold: known blocks go to another tier.
            hashes = [digest(model, path[: end + 1]) for end in range(len(path))]
            known = [self.naive.knows(model, path[: end + 1]) for end in range(len(path))]
            apply_all(self.index, ours, BlocksStored(hashes, medium=MEDIA[tier], group=group), 0.0)
            for end, there in enumerate(known):
                if there:
                    self.naive.store(cache, (group, tier), path[: end + 1], True)
            self.naive.adopt()
        elif draw < 0.97:
            end = rng.randint(1, len(path))
            gone = [path[:depth] for depth in range(len(path), end - 1, -1)]
            apply_all(self.index, ours, BlocksRemoved([digest(model, one) for one in gone], MEDIA[tier], group), 0.0)
            for one in gone:
                self.naive.remove(cache, (group, tier), one)
        elif draw < 0.995:
            apply_all(self.index, ours, AllCleared(), 0.0)
            self.naive.clear(cache)
        else:
            self.index.drop_slot(slot)
            self.index.add_slot(slot)
            for other in (0, 1):
                self.naive.clear((slot, other))
            while self.index.tend(0.0):
                pass

    def store(self, cache: tuple[int, int], model: str, path: Path, start: int, group: int, tier: int) -> None:
        parent = path[:start]
        known = not parent or self.naive.knows(model, parent)
        event = BlocksStored(
            [digest(model, path[: end + 1]) for end in range(start, len(path))],
            parent=digest(model, parent) if parent else 0,
            tokens=tokens(path[start:]),
            block_size=BLOCK,
            medium=MEDIA[tier],
            group=group,
        )
        apply_all(self.index, self.index.rank(*cache, model), event, 0.0)
        for end in range(start, len(path)):
            self.naive.store(cache, (group, tier), path[: end + 1], known)
        self.naive.adopt()

    def compare(self, step: int) -> None:
        for model in ("base", "other"):
            path = self.path()
            keys = prompt_keys(OwnSpace().root(model, ""), tokens(path), BLOCK)
            found = self.index.look_up(BlockChain(keys, BLOCK), SLOTS)
            for slot in range(SLOTS):
                depth, tiers = self.naive.match(slot, model, path)
                assert (found.blocks[slot] if found is not None else 0) == depth, f"step {step}, slot {slot}, {path}"
                ranks = found.by_rank(slot) if found is not None else []
                if ranks:
                    order = [cache.rank for cache in self.index.caches_of(slot)]
                    assert ranks == [self.naive.match(slot, model, path, rank)[0] for rank in order], f"step {step}"
                if found is not None and depth and not self.naive.held.get((slot, 1)):
                    held = found.tiers[:, slot].tolist()
                    same = held == tiers[: len(held)]
                    assert same or self.two_groups(slot), f"step {step}, slot {slot}"

    def two_groups(self, slot: int) -> bool:
        shelves = self.naive.held.get((slot, 0), {})
        return len({group for group, _ in shelves}) > 1


def test_index_agrees_with_a_naive_model() -> None:
    run = Run(7)
    for step in range(STEPS):
        run.step()
        run.compare(step)
        if step % 200 == 0:
            run.index.validate()
    run.index.validate()
    for slot in range(SLOTS):
        run.index.drop_slot(slot)
    while run.index.tend(0.0):
        pass
    run.index.validate()
    assert run.index.entries == 0
    assert run.index.blocks.table.live == 0
    assert len(run.index.orphans) == 0
    assert len(run.index.blocks.holders) == 1


def test_match_arrays_have_one_entry_per_slot() -> None:
    index = KvIndex(max_blocks=1000)
    index.add_slot(2)
    cache = index.rank(2, 0, "m")
    apply_all(index, cache, BlocksStored([5, 6], tokens=tokens((1, 2)), block_size=BLOCK), 0.0)
    keys = prompt_keys(OwnSpace().root("m", ""), tokens((1, 2, 3)), BLOCK)
    found = index.look_up(BlockChain(keys, BLOCK), 4)
    assert found is not None
    np.testing.assert_array_equal(found.blocks, [0, 0, 2, 0])
    np.testing.assert_array_equal(found.hit_tokens(9), [0, 0, 8, 0])
    np.testing.assert_array_equal(found.hit_tokens(8), [0, 0, 4, 0])
