"""EndpointSlices that a leader keeps."""

import json
from typing import Any

import pytest

from fairlead.pool.kube.endpoint_slice import (
    Place,
    Port,
    read_service,
    read_slice,
    slice_name,
    slice_object,
    wanted_slice,
)
from fairlead.pool.kube.objects import Unreadable

HERE, LEASE = Place("10.244.0.7", "epp-a", "node-1"), "serving/epp"


def service(*ports: dict[str, Any], **spec: Any) -> bytes:
    value = {"metadata": {"name": "epp-leader", "uid": "u-1"}, "spec": {"ports": list(ports), **spec}}
    return json.dumps(value).encode()


PICKER = {"name": "grpc-ext-proc", "port": 9002, "targetPort": 19002, "protocol": "TCP"}


def test_what_is_written_is_read_as_what_was_meant() -> None:
    found = read_service(service(PICKER, {"name": "kv", "port": 5555}))
    assert found.ports == (Port("grpc-ext-proc", 19002), Port("kv", 5555))
    made = slice_object(found, "serving", HERE, LEASE, "17")
    assert read_slice(json.dumps(made).encode()) == wanted_slice(found, HERE, LEASE, "17")
    assert made["metadata"]["resourceVersion"] == "17"
    assert made["metadata"]["labels"]["kubernetes.io/service-name"] == "epp-leader"
    assert made["endpoints"][0]["targetRef"] == {"kind": "Pod", "namespace": "serving", "name": "epp-a"}


@pytest.mark.parametrize(
    "other",
    [Place("10.244.0.8", "epp-a"), Place("10.244.0.7", "epp-b")],
    ids=["another address", "another pod at the same address"],
)
def test_another_replica_is_another(other: Place) -> None:
    found = read_service(service(PICKER))
    made = slice_object(found, "serving", other, LEASE)
    assert read_slice(json.dumps(made).encode()) != wanted_slice(found, HERE, LEASE)


def test_other_ports_are_to_be_written_anew() -> None:
    old, new = read_service(service(PICKER)), read_service(service({**PICKER, "targetPort": 29002}))
    made = slice_object(old, "serving", HERE, LEASE)
    assert read_slice(json.dumps(made).encode()) != wanted_slice(new, HERE, LEASE)


def test_nobody() -> None:
    found = read_service(service(PICKER))
    made = slice_object(found, "serving", HERE, LEASE, "3", empty=True)
    assert made["endpoints"] == [] and read_slice(json.dumps(made).encode()).addresses == ()
    # As an API server gives an empty list back.
    assert read_slice(json.dumps({**made, "endpoints": None, "ports": None}).encode()).addresses == ()


def test_each_family_has_its_own_slice() -> None:
    there = Place("fd00::7")
    made = slice_object(read_service(service(PICKER)), "serving", there, LEASE)
    assert (made["addressType"], made["metadata"]["name"]) == ("IPv6", slice_name("epp-leader", there))
    assert slice_name("epp-leader", there) != slice_name("epp-leader", HERE)
    assert "targetRef" not in made["endpoints"][0] and "nodeName" not in made["endpoints"][0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (service(PICKER, selector={"app": "epp"}), "has a selector"),
        (service({**PICKER, "targetPort": "grpc-ext-proc"}), "must be a number"),
        (b"[]", "Expected"),
        (b"\xff", "malformed|invalid"),
    ],
)
def test_a_service_that_cannot_be_kept(text: bytes, why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        read_service(text)


def test_a_slice_that_cannot_be_read() -> None:
    with pytest.raises(Unreadable):
        read_slice(b'{"endpoints": 3}')
