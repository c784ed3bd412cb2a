"""Models that have only sliding windows: predictions against what vLLM 0.32 reported as cached.

`Engine` tells what vLLM does of a window of 96 tokens and prompts that are computed 512 tokens at a time. The numbers
of `CACHED` are the `cached_tokens` of a real server that was asked the same.
"""

from array import array
from itertools import pairwise
from random import Random

import pytest
from kv_blocks import apply_all

from fairlead.core.kv.events import BlocksRemoved, BlocksStored
from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.keys import EngineSpace, KeySpace, prompt_keys
from fairlead.core.kv.match import BlockChain

SIZE, WINDOW, CHUNK, NEEDED = 32, 96, 512, 3
#: Tokens of a prompt → cached when it comes again, with 70 other tokens behind it, and then with 40 others.
CACHED = {
    31: (0, 0, 0),
    32: (0, 0, 32),
    33: (32, 32, 32),
    64: (32, 32, 64),
    65: (64, 64, 64),
    96: (64, 64, 96),
    97: (96, 96, 96),
    128: (96, 96, 128),
    129: (128, 128, 128),
    160: (128, 128, 160),
    320: (288, 288, 320),
    511: (480, 480, 480),
    512: (480, 480, 512),
    513: (512, 512, 512),
    544: (512, 512, 544),
    576: (544, 544, 576),
    600: (576, 576, 576),
    640: (608, 608, 640),
    641: (640, 640, 640),
    700: (672, 672, 672),
    1000: (992, 992, 992),
    1024: (992, 992, 1024),
    1025: (1024, 1024, 1024),
    1500: (1472, 1472, 1472),
    2048: (2016, 2016, 2048),
    2100: (2080, 2080, 2080),
}


class Engine:
    """vLLM's cache without evictions, and an index that hears of it."""

    def __init__(self, space: KeySpace | None = None) -> None:
        self.index = KvIndex(space=space)
        self.index.add_slot(0)
        self.cache = self.index.rank(0, 0, "m")
        self.held: set[int] = set()

    @staticmethod
    def hashes(prompt: list[int]) -> list[int]:
        """The engine's own: nothing of them agrees with the index's keys."""
        ends = range(SIZE, len(prompt) + 1, SIZE)
        return [hash(tuple(prompt[:end])) & 0xFFFF_FFFF_FFFF_FFFF for end in ends]

    def ask(self, prompt: list[int]) -> tuple[int, int]:
        """The tokens that the index and the engine find cached; the engine computes the last one in any case."""
        hashes, most = self.hashes(prompt), (len(prompt) - 1) // SIZE
        space = self.index.space
        keys = prompt_keys(space.root("m", ""), array("I", prompt).tobytes(), SIZE)
        if space.self_contained:
            keys = keys.__class__(len(hashes), keys.dtype)
            keys[:] = space.keys(0, space.root("m", ""), hashes, b"", 0, None)
        match = self.index.look_up(BlockChain(keys, SIZE), 1)
        found = most
        while found and not self.held.issuperset(hashes[max(0, found - NEEDED) : found]):
            found -= 1
        stops = [*range(found * SIZE, len(prompt), CHUNK), len(prompt)]
        for start, end in pairwise(stop // SIZE for stop in stops):
            if start < end:
                kept = hashes[max(start, most - NEEDED) : min(end, most)]
                self.held.update(kept)
                content = array("I", prompt[start * SIZE : end * SIZE]).tobytes()
                parent = hashes[start - 1] if start else 0
                self.apply(BlocksStored(kept, parent, content, SIZE, group=0, kind="sliding_window", window=WINDOW))
        return (min(int(match.blocks[0]), most) if match is not None else 0) * SIZE, found * SIZE

    def apply(self, event: BlocksStored | BlocksRemoved) -> None:
        apply_all(self.index, self.cache, event, 0.0)


def made(random: Random, count: int) -> list[int]:
    return [random.randrange(100, 4000) for _ in range(count)]


@pytest.mark.parametrize("length", CACHED)
def test_predictions_are_what_the_engine_reported(length: int) -> None:
    random = Random(length)
    engine = Engine()
    prompt = made(random, length)
    engine.ask(prompt)
    asked = [engine.ask(prompt), engine.ask(prompt + made(random, 70)), engine.ask(prompt + made(random, 40))]
    assert asked == [(cached, cached) for cached in CACHED[length]]


@pytest.mark.parametrize("seed", range(3))
def test_any_prompts_are_predicted_to_within_a_block(seed: int) -> None:
    """Only a prompt of full blocks that is continued before it came again is taken for one block too much, once."""
    random = Random(seed)
    engine = Engine()
    prompts: list[list[int]] = []
    wrong = 0
    for _ in range(200):
        former = random.choice(prompts) if prompts and random.random() < 0.75 else []
        cut = random.choice([len(former), random.randint(0, len(former))])
        prompt = former[:cut] + made(random, random.choice([1, 7, 32, 64, random.randint(1, 1500)]))
        predicted, cached = engine.ask(prompt)
        assert predicted - cached in (0, SIZE)
        wrong += predicted != cached
        prompts.append(prompt)
    assert wrong < 10


def test_a_prompt_of_full_blocks_that_is_continued_is_settled() -> None:
    random = Random(1)
    engine = Engine()
    prompt = made(random, 10 * SIZE)
    engine.ask(prompt)
    held = engine.hashes(prompt)[6:9]
    # The last block may as well be the tenth, until the engine computes the tenth after it.
    assert engine.ask(prompt + made(random, 70)) == (10 * SIZE, 9 * SIZE)
    assert engine.ask(prompt[: 9 * SIZE] + made(random, 70)) == (9 * SIZE, 9 * SIZE)
    engine.apply(BlocksRemoved([held[-1]], group=0))
    engine.held.discard(held[-1])
    assert engine.ask(prompt[: 9 * SIZE + 1]) == (0, 0)


def test_keys_of_the_engine_are_certain() -> None:
    random = Random(1)
    engine = Engine(EngineSpace())
    prompt = made(random, 10 * SIZE)
    for behind in (0, 0, 70, 40):
        predicted, cached = engine.ask(prompt + made(random, behind))
        assert predicted == cached


def test_a_report_of_a_hit_stores_nothing() -> None:
    """With `kv_cache_report_mode: full` it names all blocks of the prompt, of which most are not held."""
    random = Random(1)
    engine = Engine()
    prompt = made(random, 500)
    engine.ask(prompt)
    content = array("I", prompt[:480]).tobytes()
    hashes = engine.hashes(prompt)
    engine.apply(BlocksStored(hashes, 0, content, SIZE, group=0, kind="sliding_window", window=WINDOW))
    assert engine.cache.blocks == NEEDED
    assert engine.ask(prompt[:320]) == (0, 0)
    assert engine.ask(prompt) == (480, 480)
