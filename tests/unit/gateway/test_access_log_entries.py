"""Access-log entries: the summary tag, and numbers that are none."""

import pytest

from fairlead.core.errors import ProtocolError
from fairlead.gateway.access_log import AccessLogEntry, read_entries
from fairlead.gateway.protobuf import field, number


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


def test_the_number_of_upstreams_that_were_tried_stands_before_the_id() -> None:
    own = "62540fd2-6505-4c19-b85c-da9a044eac44"
    texts = (
        "x 200 1 1 1 10.0.0.1:80 - 2 -;",
        f"x 200 1 1 1 10.0.0.1:80 - 1 {own};",
        f"x 200 1 1 1 10.0.0.1:80 - - {own};",
    )
    older = f"x 200 1 1 1 10.0.0.1:80 - {own};", "x 200 1 1 1 10.0.0.1:80 - -;", "x 200 1 1 1 10.0.0.1:80 -;"
    entries = read_entries(message(*(tagged(text.encode()) for text in (*texts, *older))))
    assert [entry.repeated for entry in entries] == [True, False, False, False, False, False]
    assert [entry.gateway_id for entry in entries] == ["", own, own, own, "", ""]


def test_what_the_gateway_has_no_socket_for_was_not_sent() -> None:
    """Read off Envoy 1.40: without file descriptors, with and without a fallback endpoint, and a refused connection."""
    own = "62540fd2-6505-4c19-b85c-da9a044eac44"
    refused = "delayed_connect_error:_Connection_refused"
    texts = (
        "x.1 503  34 198 10.0.0.1:80 URX,UF/ 2/socket_creation_failure -;",
        f"x.2 503  14 175 10.0.0.1:80 UF/ 1/socket_creation_failure {own};",
        f"x.3 503  14 175 10.0.0.1:80 UF/ 1/{refused} {own};",
        f"x.4 200 1 14 175 10.0.0.1:80 -/ 2/ {own};",
        "x.5 200 1 14 175 10.0.0.1:80 -/ 1/- -;",
    )
    entries = read_entries(message(*(tagged(text.encode()) for text in texts)))
    assert [entry.unsent for entry in entries] == [True, True, False, False, False]
    assert [entry.repeated for entry in entries] == [True, False, False, True, False]
    assert [entry.gateway_id for entry in entries] == ["", own, own, own, ""]
    for reason, unsent in ((b"socket creation failure", True), (refused.encode(), False)):
        fields = field(1, field(16, number(6, 1)) + field(18, reason)) + field(4, field(1, number(1, 503)))
        assert [entry.unsent for entry in read_entries(message(fields))] == [unsent]


def test_what_envoy_does_not_know_is_empty_or_a_dash() -> None:
    """Read off Envoy 1.40: a client that left before the pick, a refused connection, an answer without a body."""
    own = "62540fd2-6505-4c19-b85c-da9a044eac44"
    texts = f" 0  0 0  DC {own};", "x.1 503  38 176 127.0.0.1:1 UF ;", "x.2 405  22 0 127.0.0.1:2 - ;", "- - - - - - -;"
    assert read_entries(message(*(tagged(text.encode()) for text in texts))) == [
        AccessLogEntry(duration_ms=0.0, response_bytes=0, client_gone=True, gateway_id=own),
        AccessLogEntry(lease="x.1", status=503, upstream="127.0.0.1:1", duration_ms=38.0, response_bytes=176),
        AccessLogEntry(lease="x.2", status=405, upstream="127.0.0.1:2", duration_ms=22.0, response_bytes=0),
        AccessLogEntry(),
    ]


@pytest.mark.parametrize(
    ("status", "flags", "bits", "gone", "reset"),
    [
        # Read off Envoy 1.40: a model server is killed in mid-stream, or closes within a chunked body.
        (200, "UPE", (24,), False, True),
        (200, "UC", (7,), False, True),
        (206, "UR,URX", (5, 16), False, True),
        (200, "SI", (17,), False, False),
        (200, "UT", (3,), False, False),
        (200, "DC,UPE", (15, 24), True, False),
        (503, "UC", (7,), False, False),
        (200, "URX", (16,), False, False),
    ],
)
def test_who_cut_a_response_short(status: int, flags: str, bits: tuple[int, ...], gone: bool, reset: bool) -> None:
    summary = tagged(f"x {status} 1 1 1 10.0.0.1:80 {flags} 1 -;".encode())
    fields = field(1, field(16, b"".join(number(bit, 1) for bit in bits))) + field(4, field(1, number(1, status)))
    for entry in (summary, fields):
        (read,) = read_entries(message(entry))
        assert (read.client_gone, read.upstream_reset) == (gone, reset)


@pytest.mark.parametrize(
    ("status", "ending", "read"),
    [
        # Read off Envoy 1.40: unknown values are empty in a tag, and dashes in other formats.
        (200, "-/", 200),
        (200, "-/--", 200),
        (200, "-/0", 200),
        (200, "-/-0", 200),
        (200, "-/14", 503),
        (200, "-/-14", 503),
        (200, "-/13-", 500),
        (200, "-/2", 500),
        (200, "-/3", 400),
        (200, "-/4", 408),
        (200, "-/8", 429),
        (200, "-/12", 404),
        (200, "-/99", 500),
        (200, "-/;1", 500),
        (200, "-/\xff", 500),
        (200, "UF/14", 503),
        (404, "-/2", 404),
    ],
)
@pytest.mark.parametrize("tail", [" 2 -;", " - 62540fd2-6505-4c19-b85c-da9a044eac44;"])
def test_a_grpc_status_of_an_error_is_the_status(status: int, ending: str, read: int, tail: str) -> None:
    text = f"x.1 {status} 1 1 1 10.0.0.1:80 {ending}{tail}".encode("latin-1")
    first, second = read_entries(message(tagged(text), tagged(b"x.2 200 1 1 1 10.0.0.1:80 -/ 1 -;")))
    assert (first.lease, first.status, first.repeated) == ("x.1", read, tail == " 2 -;")
    assert first.gateway_id == ("" if first.repeated else tail[3:-1])
    assert second == AccessLogEntry("x.2", 200, "10.0.0.1:80", 0.001, 1.0, 1)


@pytest.mark.parametrize("ending", ["-/0 -", "-/-1 ", "-/-\t1", "-/  "])
def test_a_grpc_status_with_spaces_hides_no_entry(ending: str) -> None:
    text = f"x.1 200 1 1 1 10.0.0.1:80 {ending} 1 -;".encode()
    assert [e.lease for e in read_entries(message(tagged(text), tagged(b"x.2 200 1 1 1 10.0.0.1:80 -/ 1 -;")))] == [
        "x.1",
        "x.2",
    ]


@pytest.mark.parametrize(("flags", "gone", "reset"), [("DC", True, False), ("UC", False, True)])
def test_of_an_answer_cut_short_the_grpc_status_is_not_the_servers(flags: str, gone: bool, reset: bool) -> None:
    (entry,) = read_entries(message(tagged(f"x 200 1 1 1 10.0.0.1:80 {flags}/14 1 -;".encode())))
    assert (entry.status, entry.client_gone, entry.upstream_reset) == (200, gone, reset)


@pytest.mark.parametrize("sent", ["-", "a b;c 200;", " ", ";;;;", "\xfe\xff", "x" * 36])
def test_whatever_a_client_sends_as_id_hides_no_entry(sent: str) -> None:
    """Where a gateway is not ours, the header is the client's."""
    text = f"x.1 200 1 1 1 10.0.0.1:80 - {sent};".encode("latin-1")
    first, second = read_entries(message(tagged(text), tagged(b"x.2 200 1 1 1 10.0.0.1:80 - -;")))
    assert (first.lease, second.lease) == ("x.1", "x.2")
    assert first.gateway_id == ("" if sent == "-" else sent)


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
