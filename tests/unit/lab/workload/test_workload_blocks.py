"""Block ids become KV hashes and prefix chains that agree on what two prompts share."""

import pytest

from fairlead.core.request import NO_PREFIX
from fairlead.lab.workload.describe import Borders, chained, engine_hashes


def shared(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_hash_covers_all_before_it():
    a, b = chained((1, 2, 3), 0), chained((1, 9, 3), 0)
    assert a[0] == b[0]
    assert a[1] != b[1]
    assert a[2] != b[2]
    assert chained((1, 2, 3), 5) != a


@pytest.mark.parametrize(("engine_block", "expected"), [(64, 3), (32, 6), (16, 12), (128, 1), (192, 1), (256, 0)])
def test_engine_blocks_of_any_fitting_size_share_what_the_trace_shares(engine_block, expected):
    first = engine_hashes(chained((1, 2, 3, 4), 0), 64, 250, engine_block)
    second = engine_hashes(chained((1, 2, 3, 9), 0), 64, 250, engine_block)
    assert len(first) == len(second) == 250 // engine_block
    assert shared(first, second) == expected
    assert len(set(first)) == len(first)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="do not fit"):
        engine_hashes([1, 2], 64, 100, 48)


def test_the_chain_of_the_scheduler_is_thinned_out_with_depth():
    borders = Borders(16, bytes_per_token=4.0, finest=256, growth=32)
    hashes = chained(range(2000), 0)
    chain = borders.chain(hashes, 2000)
    gaps = [b - a for a, b in zip((0, *chain.ends), chain.ends, strict=False)]
    assert gaps[0] == 256
    assert all(gap >= 256 for gap in gaps)
    assert all(gap <= max(256, end / 32) + 128 for gap, end in zip(gaps, chain.ends, strict=True))
    assert len(chain.hashes) == len(chain.ends) < 200
    assert set(chain.hashes) <= set(hashes)


def test_equal_beginnings_give_equal_chains_whatever_was_asked_before():
    ids = list(range(300))
    long = Borders(64).chain(chained(ids, 0), 300)
    borders = Borders(64)
    short = borders.chain(chained(ids[:100], 0), 100)
    again = borders.chain(chained(ids, 0), 300)
    assert again == long
    assert long.hashes[: len(short.hashes)] == short.hashes
    assert long.ends[: len(short.ends)] == short.ends


def test_a_prompt_of_less_than_a_block_has_no_chain():
    assert Borders(64).chain([], 0) is NO_PREFIX
