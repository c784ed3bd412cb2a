"""Blocks: what is whole comes back, what is not is skipped and counted, wherever it was cut or hit."""

import zlib
from random import Random

import pytest

from fairlead.server.journal import blocks as under_test
from fairlead.server.journal.blocks import MAGIC, OVERHEAD, SYNC, Damage, block, blocks

CONTENTS = [b"first", b"x" * 5000, SYNC * 9, b"", b"last one"]
SEGMENT = MAGIC + b"".join(block(content) for content in CONTENTS)


def good(data: bytes) -> list[bytes]:
    return [found[1] for found in blocks(data) if not isinstance(found, Damage)]


@pytest.mark.parametrize("pack", [True, False])
def test_contents_come_back(pack: bool) -> None:
    data = MAGIC + b"".join(block(content, pack) for content in CONTENTS)
    assert good(data) == CONTENTS
    assert not [found for found in blocks(data) if isinstance(found, Damage)]


def test_a_writer_killed_at_any_byte_costs_its_last_block() -> None:
    ends = [len(MAGIC)]
    for content in CONTENTS:
        ends.append(ends[-1] + len(block(content)))
    for cut in range(len(MAGIC), len(SEGMENT) + 1):
        whole = sum(end <= cut for end in ends) - 1
        assert good(SEGMENT[:cut]) == CONTENTS[:whole], cut
        lost = sum(found.size for found in blocks(SEGMENT[:cut]) if isinstance(found, Damage))
        assert lost == cut - ends[whole]


def test_what_comes_after_a_torn_block_is_found_again() -> None:
    torn = SEGMENT[:-3] + b"".join(block(content) for content in CONTENTS)
    assert good(torn) == CONTENTS[:-1] + CONTENTS
    (damage,) = [found for found in blocks(torn) if isinstance(found, Damage)]
    assert not damage.at_end
    assert damage.size == len(block(CONTENTS[-1])) - 3


def test_no_flipped_byte_goes_unseen() -> None:
    rng = Random(1)
    for _ in range(300):
        data = bytearray(SEGMENT)
        at = rng.randrange(len(MAGIC), len(data))
        data[at] ^= 1 << rng.randrange(8)
        found = good(bytes(data))
        assert len(found) == len(CONTENTS) - 1
        assert [content for content in CONTENTS if content in found] == found


def test_any_bytes_are_read_in_bounds() -> None:
    rng = Random(2)
    for size in (0, 1, OVERHEAD - 1, OVERHEAD, 500):
        for _ in range(50):
            noise = rng.randbytes(size)
            for data in (noise, MAGIC + noise, MAGIC + SYNC + noise):
                assert sum(isinstance(found, Damage) for found in blocks(data)) <= 1


def test_a_bomb_does_not_go_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "MAX_CONTENT", 1000)
    bomb = block(b"\0" * 100_000)
    assert len(bomb) < 1000
    assert zlib.decompress(bomb[OVERHEAD:]) == b"\0" * 100_000
    assert good(MAGIC + bomb + block(b"after")) == [b"after"]
