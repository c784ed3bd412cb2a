"""Block hashes against vLLM's own and against golden vectors of other routers."""

import gzip
import json
from array import array
from pathlib import Path

import numpy as np
import pytest
from kv_blocks import engine_keys

from fairlead.core.kv import hashing
from fairlead.core.kv.hashing import ALGORITHMS, EngineHasher, short
from fairlead.core.kv.keys import EngineSpace, OwnSpace, block_keys, prompt_keys

with gzip.open(Path(__file__).parents[3] / "data" / "kv-events" / "hashes.jsonl.gz") as file:
    SEEDS, *VECTORS = map(json.loads, file)


@pytest.mark.parametrize("name", SEEDS["none_hash"])
def test_none_hash(name: str) -> None:
    algorithm, seed = name.split("|")
    assert EngineHasher(algorithm, seed).none_hash.hex() == SEEDS["none_hash"][name]


def test_unset_seed() -> None:
    for algorithm in ALGORITHMS:
        if algorithm.startswith("sha256"):
            assert EngineHasher(algorithm).none_hash == EngineHasher(algorithm, "vllm-none-hash").none_hash
        else:
            with pytest.raises(ValueError, match="PYTHONHASHSEED"):
                EngineHasher(algorithm)
    with pytest.raises(ValueError, match="sha256_cbor"):
        EngineHasher("md5")


def test_every_captured_hash() -> None:
    assert len(VECTORS) == 88
    for vector in VECTORS:
        hasher = EngineHasher(vector["algo"], vector["PYTHONHASHSEED"])
        lora = (vector["lora_name"], vector["lora_path"]) if vector["lora_name"] else None
        digests = hasher.digests(vector["token_ids"], vector["block_size"], lora, vector["cache_salt"])
        assert [digest.hex() for digest in digests] == vector["full_digests_hex"], vector["label"]
        events = [int(one) for one in vector["u64"]]
        assert [short(digest) for digest in digests] == events
        assert hasher.hashes(vector["token_ids"], vector["block_size"], lora, vector["cache_salt"]) == events


def test_a_chain_can_be_continued() -> None:
    hasher = EngineHasher("sha256_cbor", "7")
    whole = hasher.digests(range(64), 16, None, "salt")
    assert hasher.digests(range(32, 64), 16, None, "salt", parent=whole[1]) == whole[2:]
    assert short(whole[0]) == int.from_bytes(whole[0][-8:], "big") and short(b"\x01") == 1


def test_cbor_bytes() -> None:
    root = hashing.encode([0xCBF29CE484222325, None, "Qwen/Qwen3-8B"])
    assert root.hex() == "831bcbf29ce484222325f66d5177656e2f5177656e332d3842"
    assert hashing.encode([0x1629CC7FFCB66AE4, list(range(16, 32)), [{"Hash": "img-abc"}]]).hex() == (
        "831b1629cc7ffcb66ae490101112131415161718181819181a181b181c181d181e181f81a1644861736867696d672d616263"
    )
    assert (
        hashing.encode([-1, -500, 23, 24, 255, 256, 65536, 2**32]).hex()
        == "88203901f317181818ff1901001a000100001b0000000100000000"
    )
    assert hashing.encode({"bb": 1, "a": b"\0"}).hex() == "a26161410062626201"


@pytest.mark.parametrize("bad", [2**64, -(2**64) - 1, True, 1.5, object()])
def test_cbor_refuses(bad: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        hashing.encode([bad])  # type: ignore[list-item]


def test_own_keys_depend_on_everything_before() -> None:
    space = OwnSpace()
    tokens = array("I", range(64)).tobytes()
    root = space.root("m", "")
    keys = block_keys(root, tokens, 16)
    assert len(keys) == 4 and len(block_keys(root, tokens[:-4], 16)) == 3
    assert block_keys(keys[1], tokens[128:], 16) == keys[2:]
    for other in (space.root("m", "lora"), space.root("n", "")):
        assert not set(block_keys(other, tokens, 16)) & set(keys)
    salted = block_keys(root, tokens, 16, [("salt",), (), (), ()])
    assert not set(salted) & set(keys)
    assert block_keys(root, tokens, 16, [(), (), ("a", "b"), ()])[:2] == keys[:2]
    assert block_keys(root, tokens, 16, [("a", "b"), (), (), ()]) != block_keys(root, tokens, 16, [("ab",), (), (), ()])
    np.testing.assert_array_equal(prompt_keys(root, tokens, 16), keys)
    np.testing.assert_array_equal(prompt_keys(root, tokens, 16, [("salt",), (), (), ()]), salted)
    assert len(prompt_keys(root, tokens[:8], 16)) == 0


def test_engine_keys_are_the_hashes_apart_by_model() -> None:
    space = EngineSpace()
    keys = space.keys(0, space.root("m", "x"), [5, 6], b"", 0, None)
    np.testing.assert_array_equal(engine_keys("m", [5, 6]), keys)
    assert space.root("m", "") != space.root("n", "")
