"""Random, mutated and odd access-log messages: a broken one ends its stream and nothing else; and lease ids."""

from types import ModuleType
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Struct

from fairlead.core.errors import ProtocolError
from fairlead.core.headers import ACCESS_LOG_METADATA
from fairlead.gateway.access_log import GATEWAY_ID, AccessLogStream, read_entries
from fairlead.gateway.answers import Answers
from fairlead.gateway.protobuf import field, nested_struct, number, string_struct
from fairlead.gateway.session import Session

fuzz = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))

INVALID_ARGUMENT = 3


class Entry(Struct, frozen=True):
    """A request as a gateway tells of it. Negative numbers are not told."""

    lease: str = ""
    status: int = 0
    host: str = ""
    port: int = 0
    ttft_us: int = -1
    duration_ms: int = -1
    size: int = 0
    gone: bool = False
    #: Only the summary tells it, and only a gateway of ours makes it.
    own_id: str = ""

    @property
    def upstream(self) -> str:
        if not self.host:
            return ""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def fields(self) -> bytes:
        """The entry in the fields that every Envoy fills."""
        common = b""
        if self.host:
            common += field(13, field(1, field(2, self.host.encode()) + number(3, self.port)))
        common += field(16, number(15, 1) if self.gone else number(4, 1))
        if self.lease:
            metadata = string_struct({"other": b"x", "fairlead-lease": self.lease.encode()})
            common += field(17, field(1, field(1, b"envoy.lb") + field(2, metadata)))
        common += field(22, field(1, b"ttft_us") + field(2, b"-" if self.ttft_us < 0 else b"%d" % self.ttft_us))
        if self.duration_ms >= 0:
            seconds, rest = divmod(self.duration_ms, 1000)
            common += field(23, number(1, seconds) + number(2, rest * 1_000_000))
        return field(1, common) + field(2, b"") + field(4, field(1, number(1, self.status)) + number(3, self.size))

    def summary(self) -> bytes:
        """The entry with the one tag that a gateway of ours adds."""
        told = [self.lease, self.status, self.ttft_us, self.duration_ms, self.size, self.upstream]
        flags = "UC,DC" if self.gone else "-"
        # What Envoy does not know is empty in some versions and places, a dash in others.
        nothing = "-" if self.status % 2 else ""
        text = " ".join(nothing if part in (-1, "") else str(part) for part in (*told, flags, self.own_id)) + ";"
        return field(1, field(22, field(1, b"fairlead") + field(2, text.encode("latin-1"))))


def log_of(entries: list[bytes]) -> bytes:
    return field(1, field(2, b"log")) + field(2, b"".join(field(1, entry) for entry in entries))


leases = st.sampled_from([f"ab.{i:016x}" for i in range(5)] + ["ab.1", "zz.0000000000000001", "", "x" * 300])
entries = st.lists(
    st.builds(
        Entry,
        lease=leases,
        status=st.integers(0, 999),
        host=st.sampled_from(["", "10.0.0.1", "fd00::1"]),
        port=st.integers(1, 65535),
        ttft_us=st.integers(-1, 10**9),
        duration_ms=st.integers(-1, 10**9),
        size=st.integers(0, 10**12),
        gone=st.booleans(),
        own_id=st.sampled_from(["", "u1", "u2", "u3", "a; b;", "\xe9" * 18]),
    ),
    max_size=4,
)
scraps = st.sampled_from(
    [
        b"\x0a\x08fairlead\x12\x20", b"ab.0000000000000001", b" ", b"-", b"200", b"9" * 5000, b";", b"\x0a\x08ttft_us",
        b"envoy.lb", b"fairlead-lease", nested_struct("fairlead-lease", b""), field(22, b"ttft_us"), field(17, b""),
        field(23, number(1, 2**64 - 1) + number(2, 2**63)), number(2, 1), b"\x11" + bytes(8), b"\xff" * 12,
    ]
)  # fmt: skip
nonsense = st.binary(max_size=80) | st.lists(scraps, max_size=12).map(b"".join)
wrapped = nonsense | nonsense.map(lambda data: field(2, field(1, data))) | nonsense.map(lambda data: log_of([data]))
wrapped |= nonsense.map(lambda data: log_of([field(1, data)])) | nonsense.map(lambda data: log_of([field(4, data)]))


@given(st.lists(wrapped, min_size=1, max_size=3))
@fuzz
def test_any_bytes(rigs: Any, wires: Any, messages: list[bytes]) -> None:
    rig, wire = rigs(), wires()
    stream = AccessLogStream(wire, rig.host.logs)
    assert rig.host.logs.connected == 1
    for message in messages:
        if wire.status is None:
            stream.on_message(message)
    assert wire.status in (None, INVALID_ARGUMENT)
    assert rig.host.logs.connected == (1 if wire.status is None else 0)
    if wire.status is None:
        stream.on_lost("gone")
    assert rig.host.logs.connected == 0
    rig.end()


@given(entries, st.booleans())
@fuzz
def test_both_forms_say_the_same(told: list[Entry], summary: bool) -> None:
    read = read_entries(log_of([entry.summary() if summary else entry.fields() for entry in told]))
    assert [(one.lease, one.status, one.upstream, one.response_bytes, one.client_gone) for one in read] == [
        (entry.lease, entry.status, entry.upstream, entry.size, entry.gone) for entry in told
    ]
    for one, entry in zip(read, told, strict=True):
        assert one.gateway_id == (entry.own_id if summary else "")
        assert one.ttft_ms == (-1.0 if entry.ttft_us < 0 else entry.ttft_us / 1000)
        assert one.duration_ms == (-1.0 if entry.duration_ms < 0 else entry.duration_ms)


places = st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=4), st.integers(0, 6)), max_size=4)


@given(entries, st.booleans(), st.integers(0, 4), places)
@fuzz
def test_mutated_logs_of_running_requests(
    pb: ModuleType, rigs: Any, wires: Any, told: list[Entry], summary: bool, running: int, changes: Any
) -> None:
    """Pieces of a log that ends real leases are replaced: no lease is lost track of, whatever it says now."""
    rig, wire = rigs(), wires()
    stream = AccessLogStream(wire, rig.host.logs)
    for turn in range(running):
        message = pb.ProcessingRequest()
        message.request_headers.headers.headers.add(key=GATEWAY_ID, value=f"u{turn}")
        message.request_headers.end_of_stream = True
        message.protocol_config.request_body_mode = 2
        Session(rig.host, wires(), {ACCESS_LOG_METADATA: "1"}).on_message(message.SerializeToString())
    assert len(rig.leased()) == running
    data = log_of([entry.summary() if summary else entry.fields() for entry in told])
    for place, piece, cut in changes:
        at = place % (len(data) + 1)
        data = data[:at] + piece + data[at + cut :]
    stream.on_message(data)
    rig.check()
    if wire.status is None:
        stream.on_half_close()
        assert wire.status == 0
    else:
        assert wire.status == INVALID_ARGUMENT
    if not changes:
        assert not set(rig.leased()) & {entry.lease for entry in told}
        thrown_away = {entry.own_id for entry in told if not entry.lease} if summary else set()
        assert len(rig.leased()) <= running - len(thrown_away & {f"u{turn}" for turn in range(running)})
    last = AccessLogStream(wires(), rig.host.logs)
    last.on_message(log_of([Entry(lease, 200).fields() for lease in rig.leased()]))
    rig.end()


@given(wrapped)
@fuzz
def test_the_reader_raises_nothing_else(data: bytes) -> None:
    try:
        read = read_entries(data)
    except ProtocolError:
        return
    for entry in read:
        assert 0 <= entry.status < 1000
        assert entry.ttft_ms >= -1
        assert entry.duration_ms >= -1
        assert entry.response_bytes >= -1


digits = st.text(st.sampled_from("0123456789abcdefABCDEFx_+- ١\n"), min_size=14, max_size=18)


@given(st.text() | digits.map(lambda text: f"ab.{text}") | st.integers(0, 2**64 - 1).map(lambda n: f"ab.{n:016x}"))
@fuzz
def test_only_lease_ids_that_were_given_out_are_read(text: str) -> None:
    answers = Answers("ab")
    found = answers.request_id(text)
    assert found is None or answers.lease(found) == text


@given(st.integers(0, 2**64 - 1))
@fuzz
def test_every_lease_id_is_read(request_id: int) -> None:
    answers = Answers("ab")
    assert answers.request_id(answers.lease(request_id)) == request_id
    assert Answers("ac").request_id(answers.lease(request_id)) is None
