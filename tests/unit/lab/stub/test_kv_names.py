"""The stub's blocks under the names that a vLLM would give them."""

import numpy as np

from fairlead.core.kv.hashing import EngineHasher
from fairlead.lab.stub.kv_publisher import BlockNames

BLOCK = 16
IDS = list(range(100, 196))


def packed(ids: list[int]) -> bytes:
    return np.array(ids, "<u4").tobytes()


def test_a_prompt_told_in_parts_has_the_hashes_of_the_whole() -> None:
    names = BlockNames("sha256_cbor", "7")
    whole = EngineHasher("sha256_cbor", "7").hashes(IDS, BLOCK)
    first, parent = names.name([1, 2], 0, packed(IDS[:32]), BLOCK, "", "")
    assert (first, parent) == (whole[:2], 0)
    rest, parent = names.name([3, 4, 5, 6], 2, packed(IDS[32:]), BLOCK, "", "")
    assert (rest, parent) == (whole[2:], whole[1])
    assert names.of(4) == whole[3]


def test_salt_adapter_and_seed_matter() -> None:
    names = BlockNames("sha256", "")
    hasher = EngineHasher("sha256")
    assert names.name([1], 0, packed(IDS[:16]), BLOCK, "", "pepper")[0] == hasher.hashes(IDS[:16], BLOCK, salt="pepper")
    adapted = hasher.hashes(IDS[:16], BLOCK, ("poet", "poet"))
    assert names.name([2], 0, packed(IDS[:16]), BLOCK, "poet", "")[0] == adapted


def test_blocks_without_a_name_keep_their_own() -> None:
    names = BlockNames("sha256")
    assert names.of(77) == 77
    told, parent = names.name([2], 77, packed(IDS[:16]), BLOCK, "", "")
    assert (len(told), parent) == (1, 77)
