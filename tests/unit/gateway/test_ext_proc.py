"""The hand-written ext_proc codec against generated classes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.core.errors import ProtocolError
from fairlead.gateway import ext_proc
from fairlead.gateway.ext_proc import CONTINUE, BodyMode, Incoming, Kind
from fairlead.gateway.protobuf import field, fields, number


def test_reads_headers_modes_subset_and_attributes(pb):
    message = pb.ProcessingRequest()
    message.request_headers.end_of_stream = True
    for key, value in ((":path", b"/v1/completions"), ("x-a", b"1"), ("x-a", b"\xff2")):
        message.request_headers.headers.headers.add(key=key, raw_value=value)
    message.request_headers.headers.headers.add(key="plain", value="text")
    message.protocol_config.request_body_mode = 2
    message.protocol_config.response_body_mode = 1
    message.protocol_config.send_body_without_waiting_for_header_response = True
    message.metadata_context.filter_metadata["other"].update({"x": 1})
    message.metadata_context.filter_metadata[ext_proc.SUBSET_NAMESPACE].update(
        {ext_proc.SUBSET_KEY: ["10.0.0.1:80", 7, " [::1]:80 "]}
    )
    message.attributes["envoy.filters.http.ext_proc"].update({"request.path": "/p", "n": 2.5, "deep": {"a": [True]}})
    incoming = Incoming(message.SerializeToString())
    assert incoming.kind is Kind.REQUEST_HEADERS
    assert incoming.modes() == (BodyMode.BUFFERED, BodyMode.STREAMED, True)
    assert incoming.headers() == ({":path": "/v1/completions", "x-a": "\xff2", "plain": "text"}, True)
    assert incoming.subset() == {"10.0.0.1:80", "[::1]:80"}
    assert incoming.attributes() == {"request.path": "/p", "n": 2.5, "deep": {"a": [True]}}


def test_an_absent_hint_differs_from_an_empty_one(pb):
    message = pb.ProcessingRequest()
    message.request_headers.end_of_stream = True
    assert Incoming(message.SerializeToString()).subset() is None
    message.metadata_context.filter_metadata[ext_proc.SUBSET_NAMESPACE].update({ext_proc.SUBSET_KEY: "not a list"})
    assert Incoming(message.SerializeToString()).subset() is None
    message.metadata_context.filter_metadata[ext_proc.SUBSET_NAMESPACE].update({ext_proc.SUBSET_KEY: []})
    assert Incoming(message.SerializeToString()).subset() == frozenset()


@given(body=st.binary(max_size=300), eos=st.booleans(), kind=st.sampled_from([Kind.REQUEST_BODY, Kind.RESPONSE_BODY]))
def test_a_body_is_echoed_as_it_came(pb, body, eos, kind):
    message = pb.ProcessingRequest()
    part = message.request_body if kind is Kind.REQUEST_BODY else message.response_body
    part.body, part.end_of_stream = body, eos
    part.SetInParent()
    incoming = Incoming(message.SerializeToString())
    assert incoming.kind is kind
    assert incoming.body() == (body, eos)
    (answer,) = ext_proc.echo(incoming)
    decoded = pb.ProcessingResponse.FromString(answer)
    part = decoded.request_body if kind is Kind.REQUEST_BODY else decoded.response_body
    streamed = part.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (body, eos)


@pytest.mark.parametrize("size", [0, 1, 61_999, 62_000, 62_001, 500_000])
@pytest.mark.parametrize("eos", [True, False])
def test_streamed_bodies_are_cut_and_only_the_last_piece_ends_the_stream(pb, size, eos):
    body = bytes(i & 0xFF for i in range(size))
    pieces = [
        pb.ProcessingResponse.FromString(m).request_body.response.body_mutation.streamed_response
        for m in ext_proc.streamed_body(Kind.REQUEST_BODY, body, eos)
    ]
    assert b"".join(p.body for p in pieces) == body
    assert [p.end_of_stream for p in pieces] == [False] * (len(pieces) - 1) + [eos]
    assert all(len(p.body) <= 62_000 for p in pieces)


def test_a_large_echo_is_cut_too(pb):
    message = pb.ProcessingRequest()
    message.response_body.body = b"x" * 100_000
    message.response_body.end_of_stream = True
    answers = [pb.ProcessingResponse.FromString(m) for m in ext_proc.echo(Incoming(message.SerializeToString()))]
    pieces = [a.response_body.response.body_mutation.streamed_response for a in answers]
    assert [len(p.body) for p in pieces] == [62_000, 38_000]
    assert [p.end_of_stream for p in pieces] == [False, True]


@pytest.mark.parametrize("kind", [Kind.REQUEST_HEADERS, Kind.REQUEST_BODY])
def test_an_answer_carries_mutation_metadata_body_and_rerouting(pb, kind):
    mutation = ext_proc.set_header("x-a", b"\xff1") + ext_proc.remove_headers(["x-b", "x-c"])
    metadata = ext_proc.lb_metadata({"k": b"v", "lease": b"ab.1"})
    decoded = pb.ProcessingResponse.FromString(ext_proc.answer(kind, mutation, metadata, b"new", reroute=True))
    part = decoded.request_headers if kind is Kind.REQUEST_HEADERS else decoded.request_body
    assert part.response.clear_route_cache
    assert part.response.body_mutation.body == b"new"
    (header,) = part.response.header_mutation.set_headers
    assert (header.header.key, header.header.raw_value, header.append_action) == ("x-a", b"\xff1", 0)
    assert list(part.response.header_mutation.remove_headers) == ["x-b", "x-c"]
    assert decoded.dynamic_metadata == {"envoy.lb": {"k": "v", "lease": "ab.1"}}


def test_continue_answers_are_empty_answers_of_the_right_kind(pb):
    for kind, data in CONTINUE.items():
        assert pb.ProcessingResponse.FromString(data).WhichOneof("response") == kind.name.lower()


def test_immediate_answer_and_timeout(pb):
    decoded = pb.ProcessingResponse.FromString(ext_proc.immediate(503, {"retry-after": "1"}, b"{}", "why"))
    immediate = decoded.immediate_response
    assert (immediate.status.code, immediate.body, immediate.details) == (503, b"{}", "why")
    assert immediate.headers.set_headers[0].header.raw_value == b"1"
    timeout = pb.ProcessingResponse.FromString(ext_proc.message_timeout(61.5)).override_message_timeout
    assert (timeout.seconds, timeout.nanos) == (61, 500_000_000)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_message_or_a_protocol_error(data):
    try:
        incoming = Incoming(data)
        incoming.modes(), incoming.headers(), incoming.body(), incoming.subset(), incoming.attributes()
    except ProtocolError:
        pass


@pytest.mark.parametrize("data", [b"", b"\x50\x01", b"\x12\x05\x0a", b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"])
def test_broken_messages_are_refused(data):
    with pytest.raises(ProtocolError):
        Incoming(data)


def test_a_long_header_map_is_read_in_one_pass(monkeypatch):
    """Entries that are not in Envoy's usual form are read one by one, never the rest of the map for each."""
    lengths = []
    walk = ext_proc.fields

    def counted(data, pos=0, end=None):
        lengths.append((len(data) if end is None else end) - pos)
        return walk(data, pos, end)

    monkeypatch.setattr(ext_proc, "fields", counted)
    entries = b"".join(field(1, field(1, b"n%d" % i) + field(3, b"v" * 200)) for i in range(300))
    headers, _ = Incoming(field(2, field(1, entries))).headers()
    assert len(headers) == 300
    assert sum(lengths) < 3 * len(entries)


def test_a_number_where_a_double_belongs_harms_nobody():
    endless = b"\x10" + b"\xff" * 9 + b"\x7f"  # 70 bits
    message = field(2, b"") + field(9, field(1, b"f") + field(2, field(1, field(1, b"k") + field(2, endless))))
    assert list(Incoming(message).attributes()) == ["k"]


def test_an_endless_protocol_configuration_is_refused_and_not_kept():
    with pytest.raises(ProtocolError, match="more than 256 bytes"):
        Incoming(field(2, b"") + field(11, number(1, 1) * 1000)).modes()


@pytest.mark.parametrize("tag", [b"\x02", b"\x07", b"\x82\x00", b"\x82\x80\x80\x80\x80\x01"])
def test_field_numbers_that_do_not_exist_are_refused(tag):
    with pytest.raises(ProtocolError):
        fields(tag + b"\x00")
