"""Access-log entries: the summary tag, and numbers that are none."""

import pytest

from fairlead.model.errors import ProtocolError
from fairlead.wire.access_log import AccessLogEntry, read_entries
from fairlead.wire.protobuf import field, number


def message(*entries: bytes) -> bytes:
    return field(2, b"".join(field(1, entry) for entry in entries))


def tagged(text: bytes) -> bytes:
    return field(1, field(22, field(1, b"fairlead") + field(2, text)))


@pytest.mark.parametrize("padding", [0, 100, 5000])
def test_a_summary_is_read_whatever_its_length_is_written_in(padding: int) -> None:
    lease = "l" * (20 + padding)
    text = f"{lease} 200 51900 2005 123 10.0.0.1:80 DC;"
    assert read_entries(message(tagged(text.encode()))) == [
        AccessLogEntry(
            lease=lease, status=200, upstream="10.0.0.1:80", ttft_ms=51.9, duration_ms=2005.0, response_bytes=123,
            client_gone=True,
        )
    ]  # fmt: skip


@pytest.mark.parametrize("text", [b"a %s - - 0 - -;", b"a 200 %s - 0 - -;", b"a 200 - %s 0 - -;", b"a 200 - - %s - -;"])
def test_a_summary_with_an_endless_number_is_no_summary(text: bytes) -> None:
    assert read_entries(message(tagged(text % (b"9" * 5000)))) == [AccessLogEntry()]


def test_endless_and_negative_numbers_are_not_told() -> None:
    tag = field(22, field(1, b"ttft_us") + field(2, b"9" * 5000))
    negative = field(23, number(1, 2**64 - 5))
    status = field(4, field(1, number(1, 2**40)))
    assert read_entries(message(field(1, tag + negative) + status)) == [AccessLogEntry()]


def test_broken_bytes_are_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        read_entries(message(field(1, b"\xff")))
