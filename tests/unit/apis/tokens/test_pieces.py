import threading
from collections.abc import Sequence
from contextlib import nullcontext
from random import Random

from fairlead.apis.tokens.pieces import ENTRY_BYTES, PieceCache


class Encoder:
    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def __call__(self, texts: Sequence[str]) -> list[bytes]:
        self.calls.append(list(texts))
        return [text.encode("utf-32-le") for text in texts]


def test_only_what_is_new_is_encoded() -> None:
    cache, encode = PieceCache(1 << 20, nullcontext()), Encoder()
    assert cache.encode(["a", "b"], encode) == "ab".encode("utf-32-le")
    assert cache.encode(["a", "b", "c", "c"], encode) == "abcc".encode("utf-32-le")
    assert cache.encode(["c", "a"], encode) == "ca".encode("utf-32-le")
    assert encode.calls == [["a", "b"], ["c", "c"]]
    assert (cache.asked, cache.hits) == (8, 4)
    assert cache.encode([], encode) == b""


def test_bytes_are_bounded_and_the_oldest_goes() -> None:
    cache, encode = PieceCache(3 * (ENTRY_BYTES + 5), nullcontext()), Encoder()
    for piece in "abcd":
        cache.encode([piece], encode)
        cache.encode(["b"], encode)
        cache.validate()
    assert len(cache) == 3
    encode.calls.clear()
    cache.encode(["b", "c", "d"], encode)
    assert encode.calls == []
    cache.encode(["x" * 2000], encode)  # larger than all of it: not kept, and nothing leaves for it
    assert len(cache) == 3
    cache.clear()
    assert (len(cache), cache.bytes) == (0, 0)


def test_wide_texts_count_as_wide_as_they_are() -> None:
    for letter, width in (("a", 1), ("é", 1), ("中", 2), ("😀", 4)):
        cache = PieceCache(1 << 20, nullcontext())
        cache.encode([letter * 100], Encoder())
        assert cache.bytes == ENTRY_BYTES + 100 * width + 400


def test_several_threads() -> None:
    cache = PieceCache(40 * ENTRY_BYTES, threading.Lock())
    wrong: list[str] = []

    def work(seed: int) -> None:
        random = Random(seed)
        for _ in range(300):
            pieces = [str(random.randrange(100)) for _ in range(5)]
            if cache.encode(pieces, Encoder()) != "".join(pieces).encode("utf-32-le"):
                wrong.append("".join(pieces))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    cache.validate()
