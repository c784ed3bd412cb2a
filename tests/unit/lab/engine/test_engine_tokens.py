"""Token ids, output text and block hashes."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.lab.engine import tokens as tk


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 200_000), st.integers(0, 400), st.integers(0, 400))
def test_output_is_the_same_however_it_is_cut(seed, start, first, second):
    whole = tk.output(seed, start, start + first + second)
    assert whole == tk.output(seed, start, start + first) + tk.output(seed, start + first, start + first + second)
    assert len(whole) == tk.TOKEN_BYTES * (first + second)


def test_output_longer_than_the_table_repeats():
    long = tk.output(17, 5, 5 + 2 * tk.PERIOD + 3)
    assert long == tk.output(17, 5, 5 + tk.PERIOD) * 2 + tk.output(17, 5, 8)


def test_output_needs_no_escape_in_json_and_survives_strip_and_padding():
    text = tk.output(99, 0, tk.PERIOD).decode("ascii")
    assert json.dumps(text) == f'"{text}"'
    for end in range(1, 50):
        piece = tk.output(99, 0, end).decode()
        stripped = piece.strip()
        assert stripped.ljust(len(piece)) == piece


@settings(deadline=None)
@given(st.text())
def test_encoded_text_comes_back(text):
    tokens = tk.encode(text.encode())
    assert len(tokens) % tk.TOKEN_BYTES == 0
    assert tk.text(tokens) == text.replace("\0", "")
    assert tk.from_ids(tk.ids(tokens)) == tokens


@pytest.mark.parametrize("bad", [[-1], [2**32], [10**30]])
def test_ids_that_are_no_unsigned_32_bit_integers_are_refused(bad):
    with pytest.raises(OverflowError):
        tk.from_ids(bad)


def test_text_that_is_no_utf8_is_replaced():
    assert tk.text(tk.from_ids([0x80808080])) == "\ufffd" * 4


def test_a_hash_covers_everything_before_it():
    a = tk.chain(bytes(range(64)), 4, 0)
    b = tk.chain(bytes(range(48)) + bytes(16), 4, 0)
    c = tk.chain(b"x" + bytes(range(1, 64)), 4, 0)
    assert len(a) == len(b) == len(c) == 4
    assert a[:3] == b[:3] and a[3] != b[3]
    assert not set(a) & set(c)


def test_a_part_of_a_block_has_no_hash():
    assert tk.chain(bytes(15), 4, 0) == []
    assert len(tk.chain(bytes(31), 4, 0)) == 1


def test_adapters_and_salts_do_not_share_hashes():
    roots = {tk.root_hash(), tk.root_hash("a"), tk.root_hash("b"), tk.root_hash("", "a"), tk.root_hash("a", "b")}
    assert len(roots) == 5
    assert tk.chain(bytes(16), 4, tk.root_hash("a")) != tk.chain(bytes(16), 4, tk.root_hash())
