"""The index in a file."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from kv_blocks import apply_all, held

from fairlead.core.kv.cache import RankCache
from fairlead.core.kv.events import BlocksRemoved, BlocksStored
from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.keys import prompt_keys
from fairlead.core.kv.match import BlockChain
from fairlead.core.kv.snapshot import Place, Shelved, save
from fairlead.server.live.kv import Keeper

TOKENS = np.arange(64, dtype="<u4").tobytes()


def filled() -> KvIndex:
    index = KvIndex()
    for slot in (0, 1):
        index.add_slot(slot)
        count = 4 - slot
        event = BlocksStored(list(range(1, count + 1)), 0, TOKENS[: 64 * count], 16)
        apply_all(index, index.rank(slot, 0, "*"), event, 0.0)
    return index


def keeper_of(path: Path) -> Keeper:
    index = filled()
    return Keeper(path, 1000.0, lambda: (index, {0: "a", 1: "b"}, lambda cache: held(Place(7, 1.5))))


async def test_endpoints_get_their_own_back_in_whatever_slot(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keeper = keeper_of(tmp_path / "index.kv")
    assert await keeper.read() is None
    keeper.start()
    await keeper.close()
    content = await keeper.read()
    assert {file.name for file in tmp_path.iterdir()} == {"index.kv", "index.kv.lock"}
    index = KvIndex()
    shelved = Shelved(index, content)
    index.add_slot(5)
    places: list[Place] = []
    for _ in shelved.enter("b", 5, lambda cache, place: places.append(place)):
        index.validate()
    found = index.look_up(BlockChain(prompt_keys(index.space.root("*", ""), TOKENS, 16), 16), 6)
    assert found is not None
    assert found.blocks.tolist() == [0, 0, 0, 0, 0, 3]
    assert places == [Place(7, 1.5)]
    # Nobody gets it twice, and strangers get nothing.
    assert list(shelved.enter("b", 5, lambda cache, place: None)) == []
    assert list(shelved.enter("z", 5, lambda cache, place: None)) == []
    assert not caplog.records


@pytest.mark.parametrize("lora", ["poet", "#1", ""])
def test_what_is_known_of_adapters_is_kept(lora: str) -> None:
    index = KvIndex()
    index.add_slot(0)
    apply_all(index, index.rank(0, 0, "*"), BlocksStored([1, 2], 0, TOKENS[: 4 * 32], 16, lora), 0.0)
    other = KvIndex()
    other.add_slot(5)
    pieces = save(index, {0: "a"}, lambda cache: held(Place(7, 1.5)))
    for _ in Shelved(other, b"".join(pieces)).enter("a", 5, lambda cache, place: None):
        pass
    assert {*other.adapters} == ({"poet"} if lora == "poet" else set())
    assert other.rank(5, 0, "*").numbered is (lora == "#1")


async def test_a_place_that_cannot_be_written_is_a_problem_until_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "taken" / "index.kv"
    path.parent.write_text("no directory")
    keeper = keeper_of(path)
    await keeper.save()
    await keeper.save()
    assert str(path) in keeper.problem
    path.parent.unlink()
    await keeper.save()
    assert not keeper.problem
    assert [record.getMessage() for record in caplog.records] == [
        "cannot write the snapshot of the KV index",
        "the snapshot of the KV index is written again",
    ]


async def test_only_one_process_writes_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "index.kv"
    first, latecomer = keeper_of(path), keeper_of(path)
    first.start()
    await first.save()
    written = path.read_bytes()
    path.write_bytes(b"as the first left it")
    await latecomer.save()
    assert path.read_bytes() == b"as the first left it"
    assert f"{path}: another scheduler or indexer writes there; give each a file of its own" in latecomer.problem
    assert [record.getMessage() for record in caplog.records] == ["cannot write the snapshot of the KV index"]
    await first.close()
    await latecomer.save()  # as after an upgrade: the new process goes on once the old one has ended
    assert path.read_bytes() == written and not latecomer.problem
    await latecomer.close()


def large() -> KvIndex:
    index = KvIndex()
    index.add_slot(0)
    tokens = np.arange(16 * 64, dtype="<u4").tobytes()
    for first in range(1, 20_000, 64):
        event = BlocksStored(list(range(first, first + 64)), first - 1, tokens, 16)
        apply_all(index, index.rank(0, 0, "*"), event, 0.0)
    return index


def test_a_rank_is_held_only_while_its_blocks_are_copied() -> None:
    index = large()
    cache, pieces = index.rank(0, 0, "*"), list[bytes]()
    blocks, steps = cache.blocks, list[int]()

    @contextmanager
    def hold(cache: RankCache) -> Iterator[Callable[[], Place | None]]:
        yield lambda: Place(7, 1.5)
        steps.append(len(pieces))

    for piece in save(index, {0: "a"}, hold):
        if steps and cache.blocks == blocks:
            apply_all(index, cache, BlocksRemoved(list(range(10_001, 20_001))), 0.0)
        pieces.append(piece)
    (held_for,) = steps
    assert held_for <= 2 < 20 < len(pieces) and cache.blocks == blocks - 10_000
    # The snapshot has what there was at its place in the events.
    other = KvIndex()
    other.add_slot(0)
    for _ in Shelved(other, b"".join(pieces)).enter("a", 0, lambda cache, place: None):
        pass
    assert other.rank(0, 0, "*").blocks == blocks
    other.validate()


def test_no_piece_of_a_snapshot_is_larger_than_a_segment() -> None:
    index = large()
    pieces = [len(piece) for piece in save(index, {0: "a"}, lambda cache: held(Place(7, 1.5)))]
    assert sum(pieces) > 20 * 20_000 > 20 * max(pieces)
