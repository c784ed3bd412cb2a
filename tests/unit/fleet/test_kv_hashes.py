"""Block hashes against vLLM's own and against golden vectors of other routers."""

import gzip
import json
from array import array
from pathlib import Path

import numpy as np
import pytest

from fairlead.fleet.kv import cbor
from fairlead.fleet.kv.engine_hash import ALGORITHMS, EngineHasher, short, shorts
from fairlead.fleet.kv.keys import EngineSpace, OwnSpace, block_keys, prompt_keys
from fairlead.fleet.kv.router_hash import Approximate, CborFnv, Xxh64, chain

with gzip.open(Path(__file__).parents[2] / "data" / "kv-events" / "hashes.jsonl.gz") as file:
    SEEDS, *VECTORS = map(json.loads, file)
MODEL = "Qwen/Qwen3-8B"


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
        assert shorts(digests) == [int(one) for one in vector["u64"]]
        assert hasher.hashes(vector["token_ids"], vector["block_size"], lora, vector["cache_salt"]) == shorts(digests)


def test_a_chain_can_be_continued() -> None:
    hasher = EngineHasher("sha256_cbor", "7")
    whole = hasher.digests(range(64), 16, None, "salt")
    assert hasher.digests(range(32, 64), 16, None, "salt", parent=whole[1]) == whole[2:]
    assert short(whole[0]) == int.from_bytes(whole[0][-8:], "big") and short(b"\x01") == 1


GOLDEN = [
    (CborFnv, "", "cbf29ce484222325 0951e7a4e202ae46 1629cc7ffcb66ae4 87d900f5d9c5ffad 2e6bd4292769ba5c"),
    (CborFnv, "42", "07ee7e07b4b19223 6843bd03ae63db2d 52274c02c0af058f 28e544c354529055 a059e0e5a6b89334"),
    (Xxh64, "", "ef46db3751d8e999 2792bea98f988ec2 71f887044edfaa5d f40b680ad5a18013 1e7f7a4a40c7b18c"),
    (Xxh64, "42", "6de6f5d076d742b9 53bcb7b23fb9c931 728bb9654522fbde 69fe84c6e1b32ddb c2ae9c5933b2b423"),
]


@pytest.mark.parametrize(("kind", "seed", "expected"), GOLDEN)
def test_router_spaces(kind: type[CborFnv] | type[Xxh64], seed: str, expected: str) -> None:
    space = kind(MODEL, seed)
    first, second = chain(space, range(35))
    with_extra = space.block(first, range(16, 32), ["img-abc"])
    assert " ".join(f"{one:016x}" for one in (space.init, space.root, first, second, with_extra)) == expected


def test_approximate_space_hashes_the_partial_tail() -> None:
    space = Approximate(MODEL)
    hashes = " ".join(f"{one:016x}" for one in (space.root, *space.chain(range(37), 16)))
    assert hashes == "753a482dd9050f0b 626a5fa7321a569e 0bf79abb2b1ab65a 328f9fbfcd8ca57c"


def test_cbor_bytes() -> None:
    space = CborFnv(MODEL)
    assert cbor.encode([space.init, None, MODEL]).hex() == "831bcbf29ce484222325f66d5177656e2f5177656e332d3842"
    first = chain(space, range(16))[0]
    assert cbor.encode([first, list(range(16, 32)), [{"Hash": "img-abc"}]]).hex() == (
        "831b1629cc7ffcb66ae490101112131415161718181819181a181b181c181d181e181f81a1644861736867696d672d616263"
    )
    assert (
        cbor.encode([-1, -500, 23, 24, 255, 256, 65536, 2**32]).hex()
        == "88203901f317181818ff1901001a000100001b0000000100000000"
    )
    assert cbor.encode({"bb": 1, "a": b"\0"}).hex() == "a26161410062626201"


@pytest.mark.parametrize("bad", [2**64, -(2**64) - 1, True, 1.5, object()])
def test_cbor_refuses(bad: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        cbor.encode([bad])  # type: ignore[list-item]


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
    np.testing.assert_array_equal(space.of_hashes("m", [5, 6]), keys)
    assert space.root("m", "") != space.root("n", "")
