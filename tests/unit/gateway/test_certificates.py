"""From when to when a certificate is valid, read from its file."""

from datetime import UTC, datetime
from math import inf

import pytest
from certificates_made import make_pair
from hypothesis import given
from hypothesis import strategies as st

from fairlead.gateway.tls import validity


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A certificate that is valid from 2020 to 2080, which DER writes in two ways."""
    return make_pair(tmp_path_factory.mktemp("certificate"), "20200102030405Z", "20800607080910Z")


def test_both_times_are_read(pem: bytes) -> None:
    begins, ends = validity(pem)
    assert datetime.fromtimestamp(begins, UTC) == datetime(2020, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert datetime.fromtimestamp(ends, UTC) == datetime(2080, 6, 7, 8, 9, 10, tzinfo=UTC)
    assert validity(b"\n# a chain\n" + pem + pem) == (begins, ends)


@given(st.binary(max_size=40), st.integers(0, 300))
def test_what_cannot_be_read_is_valid_for_ever(pem: bytes, noise: bytes, at: int) -> None:
    start = pem.index(b"-----BEGIN") + 28
    cut, lacking = pem[: start + at], pem[: start + at] + pem[start + at + 1 :]
    for broken in (noise, cut, lacking, pem[:start] + noise + pem[start:]):
        begins, ends = validity(broken)
        assert begins <= inf and ends >= -inf
    assert validity(b"") == (-inf, inf)
