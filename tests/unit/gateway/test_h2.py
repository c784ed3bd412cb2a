"""Frames as bytes: RFC 9113 by its numbers, and hyperframe as a second opinion."""

import pytest
from hyperframe.frame import Frame, GoAwayFrame, RstStreamFrame, SettingsFrame, WindowUpdateFrame

from fairlead.core.errors import ProtocolError
from fairlead.gateway import h2
from fairlead.gateway.h2 import ErrorCode


def parsed(data: bytes) -> Frame:
    frame, size = Frame.parse_frame_header(memoryview(data[:9]))
    assert len(data) == 9 + size
    frame.parse_body(memoryview(data[9:]))
    return frame


def test_frames_are_what_hyperframe_reads() -> None:
    settings = parsed(h2.settings({h2.HEADER_TABLE_SIZE: 0, h2.INITIAL_WINDOW_SIZE: 1 << 20}))
    assert isinstance(settings, SettingsFrame)
    assert settings.settings == {1: 0, 4: 1 << 20}
    assert "ACK" in parsed(h2.SETTINGS_ACK).flags
    update = parsed(h2.window_update(7, 1000))
    assert isinstance(update, WindowUpdateFrame)
    assert (update.stream_id, update.window_increment) == (7, 1000)
    reset = parsed(h2.rst_stream(9, ErrorCode.CANCEL))
    assert isinstance(reset, RstStreamFrame)
    assert (reset.stream_id, reset.error_code) == (9, 8)
    goaway = parsed(h2.goaway(11, ErrorCode.ENHANCE_YOUR_CALM, "x" * 1000))
    assert isinstance(goaway, GoAwayFrame)
    assert (goaway.last_stream_id, goaway.error_code, goaway.additional_data) == (11, 11, b"x" * 200)
    assert "ACK" in parsed(h2.ping(b"12345678", ack=True)).flags
    assert not parsed(h2.ping(b"12345678")).flags


def test_settings_are_read_in_order_and_unknown_ones_kept() -> None:
    payload = h2.settings({4: 5, 99: 7})[9:] + h2.settings({4: 6})[9:]
    assert h2.read_settings(payload) == [(4, 5), (99, 7), (4, 6)]
    assert h2.read_settings(b"") == []


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"\0" * 5, ErrorCode.FRAME_SIZE_ERROR),
        (h2.settings({h2.ENABLE_PUSH: 2})[9:], ErrorCode.PROTOCOL_ERROR),
        (h2.settings({h2.INITIAL_WINDOW_SIZE: 2**31})[9:], ErrorCode.FLOW_CONTROL_ERROR),
        (h2.settings({h2.MAX_FRAME_SIZE: 16383})[9:], ErrorCode.PROTOCOL_ERROR),
        (h2.settings({h2.MAX_FRAME_SIZE: 2**24})[9:], ErrorCode.PROTOCOL_ERROR),
        (b"\0\x63\0\0\0\0" * 65, ErrorCode.ENHANCE_YOUR_CALM),
    ],
)
def test_bad_settings_are_errors(payload: bytes, code: ErrorCode) -> None:
    with pytest.raises(ProtocolError) as caught:
        h2.read_settings(payload)
    assert caught.value.code == code


def test_padding_and_priority_are_cut_off() -> None:
    data = b"??" + b"\x03" + b"PPPPP" + b"body" + b"\0\0\0" + b"??"
    pos, end = h2.unpad(h2.PADDED | h2.HAS_PRIORITY, data, 2, len(data) - 2)
    assert data[pos:end] == b"body"
    assert h2.unpad(0, b"abc", 0, 3) == (0, 3)
    assert h2.unpad(h2.PADDED, b"\x02\0\0", 0, 3) == (1, 1)


@pytest.mark.parametrize(
    ("flags", "data", "code"),
    [
        (h2.PADDED, b"", ErrorCode.FRAME_SIZE_ERROR),
        (h2.PADDED, b"\x03\0\0", ErrorCode.PROTOCOL_ERROR),
        (h2.HAS_PRIORITY, b"1234", ErrorCode.FRAME_SIZE_ERROR),
        (h2.PADDED | h2.HAS_PRIORITY, b"\x01" + b"12345", ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_padding_that_does_not_fit_is_an_error(flags: int, data: bytes, code: ErrorCode) -> None:
    with pytest.raises(ProtocolError) as caught:
        h2.unpad(flags, data, 0, len(data))
    assert caught.value.code == code
