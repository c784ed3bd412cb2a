"""Objects of an API server, read: pods, pools, lists, events, and whatever bytes come instead."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from fairlead.config.checks import with_page
from fairlead.config.schema import Metrics
from fairlead.pool.kube.elector import read_lease
from fairlead.pool.kube.objects import (
    PickerRef,
    Unreadable,
    key_of,
    read_event,
    read_failure,
    read_meta,
    read_page,
    read_plain,
    read_pool,
    selector_text,
)
from fairlead.pool.kube.pods import endpoints_of, read_pod


def raw(value: Any) -> Raw:
    return Raw(json.dumps(value).encode())


def pod(**status: Any) -> dict[str, Any]:
    ready = [{"type": "Ready", "status": "True", "lastProbeTime": None}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "a", "namespace": "n", "uid": "u", "labels": {"app": "x"}, "managedFields": [{}]},
        "spec": {"containers": []},
        "status": {"podIP": "10.0.0.1", "conditions": ready, **status},
    }


def test_a_ready_pod_serves() -> None:
    found = read_pod(raw(pod()))
    assert found.serves
    assert [one.id for one in endpoints_of(found, (80, 81))] == ["n/a-rank-0", "n/a-rank-1"]
    assert [one.address for one in endpoints_of(found, (80, 81))] == ["10.0.0.1:80", "10.0.0.1:81"]


@pytest.mark.parametrize(
    "status",
    [
        {"conditions": [{"type": "Ready", "status": "False"}]},
        {"conditions": [{"type": "Ready", "status": "Unknown"}]},
        {"conditions": []},
        {"conditions": None},
        {"podIP": ""},
        {"podIP": "not-an-address"},
        {"podIP": "fe80::1%eth0"},
    ],
)
def test_others_do_not(status: dict[str, Any]) -> None:
    found = read_pod(raw(pod(**status)))
    assert not found.serves
    assert endpoints_of(found, (80,)) == []


def test_a_pod_that_is_being_deleted_does_not() -> None:
    value = pod()
    value["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert not read_pod(raw(value)).serves


@pytest.mark.parametrize(
    ("said", "ranks"),
    [("81", [1]), ("80, 81", [0, 1]), ("", []), ("99", []), ("80;81", [0, 1]), ("x", [0, 1]), ("٨٠", [0, 1])],
)
def test_active_ports(said: str, ranks: list[int]) -> None:
    for key in ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports"):
        value = pod()
        value["metadata"]["annotations"] = {key: said}
        found = endpoints_of(read_pod(raw(value)), (80, 81))
        assert [one.id for one in found] == [f"n/a-rank-{rank}" for rank in ranks]


def test_older_label_names_are_known() -> None:
    value = pod()
    value["metadata"]["labels"]["inference.networking.k8s.io/engine-type"] = "sglang"
    assert read_pod(raw(value)).labels["llm-d.ai/engine-type"] == "sglang"
    value["spec"] = {"nodeName": "worker-3"}
    assert read_pod(raw(value)).labels["kubernetes.io/hostname"] == "worker-3"


def test_the_metrics_of_a_pod_are_its_own() -> None:
    value = pod()
    value["metadata"]["labels"] |= {"metricsAddress": "10.9.9.9", "metricsPort": "9"}
    (endpoint,) = endpoints_of(read_pod(raw(value)), (80,))
    assert with_page(endpoint, Metrics()).scrape_url == "http://10.0.0.1:9/metrics"


def test_what_changes_nothing_for_us_is_equal() -> None:
    other = pod(phase="Running")
    other["metadata"] |= {"resourceVersion": "9", "annotations": {"x": "y"}}
    assert read_pod(raw(pod())) == read_pod(raw(other))


def pool(**spec: Any) -> Raw:
    ref = {"name": "epp", "port": {"number": 9002}}
    base = {
        "selector": {"matchLabels": {"b": "2", "a": "1"}},
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": ref,
    }
    return raw({"metadata": {"name": "p", "namespace": "n"}, "spec": {**base, **spec}})


def test_both_forms_of_a_pool() -> None:
    new = read_pool(pool())
    assert (new.ports, selector_text(new.selector), new.app_protocol) == ((8000,), "a=1,b=2", "http")
    assert new.picker == PickerRef("epp", 9002, "Service", "FailClose")
    spec = {
        "selector": {"a": "1"},
        "targetPortNumber": 80,
        "extensionRef": {"name": "epp", "portNumber": 9, "failureMode": "FailOpen"},
    }
    old = read_pool(raw({"metadata": {"name": "p"}, "spec": spec}))
    assert (old.ports, old.selector) == ((80,), {"a": "1"})
    assert old.picker == PickerRef("epp", 9, "Service", "FailOpen")


@pytest.mark.parametrize(
    "spec",
    [
        {"selector": {}},
        {"selector": {"matchLabels": {}}},
        {"selector": {"matchLabels": {"a": 1}}},
        {"selector": {"matchExpressions": []}},
        {"targetPorts": []},
        {"targetPorts": [{"number": 1}, {"number": 1}]},
        {"targetPorts": [{"number": port} for port in range(1, 10)]},
        {"targetPorts": [{"number": 0}]},
        {"targetPorts": [{"number": 65536}]},
        {"targetPorts": "8000"},
    ],
)
def test_pools_that_cannot_be_used(spec: dict[str, Any]) -> None:
    with pytest.raises(Unreadable):
        read_pool(pool(**spec))


def test_pages_and_events() -> None:
    page = read_page(b'{"kind":"PodList","metadata":{"resourceVersion":"7","continue":"t"},"items":[{"a":1},{}]}')
    assert (page.metadata.resource_version, page.metadata.continue_, len(page.items or [])) == ("7", "t", 2)
    assert read_page(b'{"metadata":{"resourceVersion":"7"},"items":null}').items is None
    event = read_event(b'{"type":"ADDED","object":{"metadata":{"name":"a","namespace":"n","resourceVersion":"8"}}}')
    assert (event.type, key_of(read_meta(event.object))) == ("ADDED", "n/a")
    gone = read_event(b'{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired","message":"old"}}')
    assert read_failure(gone.object).code == 410
    assert read_failure(b"<html>").code == 0


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
_named = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("metadata", "spec", "status", "items", "type", "object", "code"), _json)
)
READERS = [read_page, read_event, read_meta, read_plain, read_pod, read_pool, read_lease]


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60) | _json.map(msgspec.json.encode) | _named.map(msgspec.json.encode))
def test_nothing_but_unreadable_is_raised(text: bytes) -> None:
    for reader in READERS:
        try:
            reader(text)  # type: ignore[operator]
        except Unreadable:
            continue
    read_failure(text)


def test_deep_nesting_is_unreadable() -> None:
    for reader in READERS:
        with pytest.raises(Unreadable):
            reader(b'{"metadata":' + b"[" * 100_000)  # type: ignore[operator]
