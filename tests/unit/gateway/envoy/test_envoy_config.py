"""Envoy's bootstrap: what must be in it, and that the real Envoy takes every combination of options."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import structs

from fairlead.core.errors import ConfigError
from fairlead.core.headers import (
    ACCESS_LOG_METADATA,
    CONTROL_HEADERS,
    READ_HEADERS,
    RESIZABLE_METADATA,
    WHOLE_BODY_METADATA,
)
from fairlead.gateway.access_log import GATEWAY_ID
from fairlead.gateway.envoy import clusters
from fairlead.gateway.envoy.admin import GatewayError
from fairlead.gateway.envoy.binary import validate
from fairlead.gateway.envoy.config import build, render
from fairlead.gateway.envoy.options import Options, Tls
from fairlead.gateway.envoy.routes import CHUNKED


def manager(bootstrap: dict[str, Any], number: int = 0) -> dict[str, Any]:
    listener = bootstrap["static_resources"]["listeners"][number]
    return dict(listener["filter_chains"][0]["filters"][0]["typed_config"])


def ext_proc(bootstrap: dict[str, Any], number: int = 0) -> dict[str, Any]:
    (found,) = [f for f in manager(bootstrap, number)["http_filters"] if f["name"] == "envoy.filters.http.ext_proc"]
    return dict(found["typed_config"])


def cluster(bootstrap: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [c for c in bootstrap["static_resources"]["clusters"] if c["name"] == name]
    return dict(found)


def test_headers_that_name_a_machine_go_before_anything_reads_them() -> None:
    config = manager(build(Options()))
    (early,) = config["early_header_mutation_extensions"]
    *removals, own_id, _, _ = early["typed_config"]["mutations"]
    assert {m["remove"] for m in removals} == CONTROL_HEADERS
    assert own_id["append"]["header"] == {"key": GATEWAY_ID, "value": "%UNIQUE_ID%"}
    assert own_id["append"]["append_action"] == "OVERWRITE_IF_EXISTS_OR_ADD", "what a client sends is not believed"
    *routes, nowhere = config["route_config"]["virtual_hosts"][0]["routes"]
    clusters = {cluster["name"] for cluster in build(Options())["static_resources"]["clusters"]}
    assert nowhere["match"] == {"prefix": "/"} and nowhere["route"]["cluster"] not in clusters
    with_cluster = [route for route in routes if "prefix" in route["match"] and "route" in route]
    toward_servers = [route for route in with_cluster if route["route"] != nowhere["route"]]
    assert len(toward_servers) == 8
    for route in toward_servers:
        late = set(route["request_headers_to_remove"])
        assert {CHUNKED, "x-gateway-destination-endpoint"} < late
        # What the scheduler sets for a sidecar must arrive there.
        assert not {"x-prefiller-host-port", "x-kv-cache-source-host-port", "x-data-parallel-host-port"} & late


def test_the_destination_is_read_from_metadata_only() -> None:
    bootstrap = build(Options())
    dst = cluster(bootstrap, "dst")["original_dst_lb_config"]
    assert set(dst) == {"metadata_key"} and dst["metadata_key"]["key"] == "envoy.lb"
    assert ext_proc(bootstrap)["metadata_options"] == {"receiving_namespaces": {"untyped": ["envoy.lb", "fairlead"]}}


def test_the_scheduler_gets_every_header_that_it_reads_and_no_other() -> None:
    patterns = ext_proc(build(Options()))["forward_rules"]["allowed_headers"]["patterns"]
    assert {pattern["exact"] for pattern in patterns} == {*READ_HEADERS, GATEWAY_ID, "grpc-status", ":status"}


def test_whole_mode_buffers_in_front_of_ext_proc() -> None:
    bootstrap = build(Options(body_limit=1234))
    names = [f["name"].rpartition(".")[2] for f in manager(bootstrap)["http_filters"]]
    assert names == ["uploads", "discard", "buffer", "set_filter_state", "ext_proc", "again", "router"]
    first, second = (manager(bootstrap)["http_filters"][i]["typed_config"] for i in (2, 5))
    assert first == second, "the router sees each body once"
    assert manager(bootstrap)["http_filters"][2]["typed_config"]["max_request_bytes"] == 1234
    config = ext_proc(bootstrap)
    assert config["send_body_without_waiting_for_header_response"] is True
    assert config["processing_mode"]["request_body_mode"] == "STREAMED"


def test_buffered_mode_raises_the_limit_of_bodies_alone() -> None:
    bootstrap = build(Options(request_mode="buffered", body_limit=1234))
    (host,) = manager(bootstrap)["route_config"]["virtual_hosts"]
    assert host["request_body_buffer_limit"] == 1234
    assert bootstrap["static_resources"]["listeners"][0]["per_connection_buffer_limit_bytes"] == 32_768
    config = ext_proc(bootstrap)
    assert "send_body_without_waiting_for_header_response" not in config
    assert config["processing_mode"]["request_body_mode"] == "BUFFERED"


def test_fail_open_and_closed() -> None:
    open_, closed = build(Options()), build(Options(fail_open=False))
    assert (ext_proc(open_)["failure_mode_allow"], ext_proc(closed)["failure_mode_allow"]) == (True, False)
    routes = [manager(b)["route_config"]["virtual_hosts"][0]["routes"] for b in (open_, closed)]
    last = [next(r for r in rs if r["match"].keys() == {"prefix", "filter_state"}) for rs in routes]
    assert last[0]["route"]["cluster"] == "all_endpoints"
    assert last[1]["direct_response"]["status"] == 503 and "route" not in last[1]
    assert cluster(open_, "ext_proc")["common_lb_config"] == {
        "healthy_panic_threshold": {"value": 0},
        "update_merge_window": "0s",
    }
    assert cluster(closed, "ext_proc")["common_lb_config"]["healthy_panic_threshold"] == {"value": 1}
    assert "retry_policy" not in ext_proc(open_)["grpc_service"]
    assert ext_proc(closed)["grpc_service"]["retry_policy"]["num_retries"] == 30
    assert ext_proc(open_)["max_message_timeout"] == "600s"


def test_large_uploads_have_time_to_be_sent_to_the_scheduler() -> None:
    """The time begins before the body is sent, and bodies of one moment are read one after the other."""
    timeouts = []
    for options in (Options(), Options(body_limit=16 << 20, message_timeout=2.0), Options(queue_timeout=5.0)):
        filters = (ext_proc(build(options), number) for number in (0, 1))
        timeouts.append(tuple(float(each["message_timeout"].removesuffix("s")) for each in filters))
    assert timeouts == [(1.0, 9.0), (2.0, 4.0), (1.0, 5.0)]


def test_the_dead_one_of_several_schedulers_gets_one_request() -> None:
    alone, three = (
        cluster(build(Options(peers=peers)), "ext_proc")["outlier_detection"]
        for peers in ((), ("127.0.0.1:9003", "127.0.0.1:9004"))
    )
    assert (alone["consecutive_local_origin_failure"], three["consecutive_local_origin_failure"]) == (3, 1)
    assert (alone["max_ejection_percent"], three["max_ejection_percent"]) == (100, 66), "one of them is always asked"


def test_the_access_log_is_announced_to_the_scheduler_by_the_name_it_knows() -> None:
    grpc = ext_proc(build(Options(als="127.0.0.1:9002")))["grpc_service"]
    assert {item["key"] for item in grpc["initial_metadata"]} == {
        ACCESS_LOG_METADATA,
        RESIZABLE_METADATA,
        WHOLE_BODY_METADATA,
    }
    plain = build(Options(request_mode="buffered"))
    announced = {item["key"] for item in ext_proc(plain)["grpc_service"]["initial_metadata"]}
    assert announced == {RESIZABLE_METADATA}
    assert "access_log" not in manager(plain)
    names = [c["name"] for c in plain["static_resources"]["clusters"]]
    http, grpc = ["dst", "dst_second", "dst_or_second"], ["dst_grpc", "dst_second_grpc", "dst_or_second_grpc"]
    assert names == [*http, "all_endpoints", *grpc, "all_endpoints_grpc", "ext_proc"]
    assert "uploads" in [c["name"] for c in build(Options())["static_resources"]["clusters"]]


def test_what_names_a_second_endpoint_is_repeated_once_and_nothing_else_is() -> None:
    bootstrap = build(Options())
    (host,) = manager(bootstrap)["route_config"]["virtual_hosts"]
    repeated = [
        route for route in host["routes"] if route.get("route", {}).get("retry_policy", {}).get("num_retries") == 1
    ]
    assert [route["route"]["cluster"] for route in repeated] == ["dst_or_second_grpc", "dst_or_second", "dst_or_second"]
    for route in repeated:
        assert {m["filter"] for m in route["match"]["dynamic_metadata"]} == {"envoy.lb", "fairlead"}
        policy = route["route"]["retry_policy"]
        conditions = {"connect-failure", "refused-stream", "reset-before-request", "retriable-headers"}
        assert set(policy["retry_on"].split(",")) == conditions
        assert "retry_host_predicate" not in policy
    for name, first, second in (
        ("dst_or_second", "dst", "dst_second"),
        ("dst_or_second_grpc", "dst_grpc", "dst_second_grpc"),
    ):
        either = cluster(bootstrap, name)
        assert either["cluster_type"]["typed_config"]["clusters"] == [{"name": first}, {"name": second}]
        assert either["circuit_breakers"]["thresholds"][0]["max_retries"] == 40_000
        path = cluster(bootstrap, second)["original_dst_lb_config"]["metadata_key"]
        assert (path["key"], path["path"]) == ("fairlead", [{"key": "second"}])


@pytest.mark.parametrize(("retry", "held", "hedged"), [("connect", 0, 0), ("unanswered", 1, 0), ("hedge", 1, 3)])
def test_what_is_repeated_after_it_began_is_an_option(retry: Any, held: int, hedged: int) -> None:
    bootstrap = build(Options(retry=retry))
    (host,) = manager(bootstrap)["route_config"]["virtual_hosts"]
    assert sum("hedge_policy" in route.get("route", {}) for route in host["routes"]) == hedged
    text = json.dumps(bootstrap["static_resources"]["clusters"])
    assert text.count('envoy.filters.http.wasm"') == held
    assert ("http_filters" in json.dumps(cluster(bootstrap, "dst_or_second"))) is bool(held)
    assert ("mutation_rules" in ext_proc(bootstrap)) is bool(held)


def test_admin_is_local_or_absent() -> None:
    assert "admin" not in build(Options())
    assert build(Options(admin_port=9901))["admin"]["address"]["socket_address"]["address"] == "127.0.0.1"
    assert build(Options(admin_path="/x"))["admin"]["address"]["pipe"]["path"] == "/x"


def test_names_are_resolved_and_literals_are_not() -> None:
    for address, kind in (("epp:9002", "STRICT_DNS"), ("[::1]:9002", "STATIC"), ("unix:/epp.sock", "STATIC")):
        bootstrap = build(Options(ext_proc=address, als=address))
        assert cluster(bootstrap, "ext_proc")["type"] == cluster(bootstrap, "als")["type"] == kind
        asked = "health_checks" in cluster(bootstrap, "als")
        assert asked is (kind == "STRICT_DNS"), "which of several addresses takes the access log"


def test_tls_checks_the_name_it_dials() -> None:
    def context(address: str, **tls: Any) -> dict[str, Any]:
        options = Options(ext_proc=address, tls=Tls(ca_file="ca.pem", **tls))
        return dict(cluster(build(options), "ext_proc")["transport_socket"]["typed_config"])

    named = context("epp.svc:9002")
    (name,) = named["common_tls_context"]["validation_context"]["match_typed_subject_alt_names"]
    assert (named["sni"], name) == ("epp.svc", {"san_type": "DNS", "matcher": {"exact": "epp.svc"}})
    literal = context("10.0.0.1:9002")
    (name,) = literal["common_tls_context"]["validation_context"]["match_typed_subject_alt_names"]
    assert "sni" not in literal and name == {"san_type": "IP_ADDRESS", "matcher": {"exact": "10.0.0.1"}}
    assert context("10.0.0.1:9002", server_name="epp")["sni"] == "epp"
    assert "validation_context" not in context("epp:1", verify=False)["common_tls_context"]


def test_yaml_says_what_build_says() -> None:
    options = Options(als="127.0.0.1:9002", endpoints=("10.0.0.1:8000",))
    text = render(options)
    assert yaml.load(text, yaml.CSafeLoader) == json.loads(json.dumps(build(options)))
    assert "&id" not in text, "an anchor: a part of the file cannot be copied alone"


REQUEST, RESPONSE = ("whole", "buffered"), ("first-chunk", "headers", "none", "full")


@pytest.mark.envoy
@pytest.mark.parametrize(
    ("number", "request_mode", "response_mode", "fail_open"),
    [(i, *combination) for i, combination in enumerate(itertools.product(REQUEST, RESPONSE, (True, False)))],
)
def test_envoy_takes_every_combination(
    number: int, request_mode: Any, response_mode: Any, fail_open: bool, tmp_path: Path
) -> None:
    """The other options change with the number, so that each value meets both values of the others."""
    bits = [bool(number >> i & 1) for i in range(4)]
    pool = tmp_path / "pool.json"
    pool.write_text(clusters.render(["10.0.0.1:8000", "[fd00::1]:8000"], 1))
    options = Options(
        host="::" if bits[0] else "127.0.0.1",
        port=0,
        admin_port=0 if bits[1] else 19_901,
        admin_path=str(tmp_path / "admin.sock") if bits[1] else "",
        ext_proc=("127.0.0.1:9002", "[::1]:9002", "epp.example:9002", "unix:/run/epp.sock")[number % 4],
        als="" if bits[2] else "127.0.0.1:9003",
        tls=Tls(verify=False, server_name="epp") if bits[3] else None,
        endpoints=("10.0.0.1:8000",) * bits[0],
        endpoints_file="" if bits[1] else str(pool),
        request_mode=request_mode,
        response_mode=response_mode,
        fail_open=fail_open,
        retry=("connect", "unanswered", "hedge")[number % 3],
        access_log=("", "-", str(tmp_path / "access.log"))[number % 3],
        max_heap=1 << 30 if bits[2] else 0,
        concurrency=number % 3,
    )
    validate(render(options))


def test_several_envoys_share_what_one_would_have() -> None:
    options = Options(port=80, admin_port=9901, max_heap=1 << 30, max_connections=5, concurrency=3, envoys=2)
    options.check()
    first, second = options.each(0, "/a"), options.each(1, "/b")
    assert (first.admin_port, first.admin_path, second.admin_port, second.admin_path) == (9901, "/a", 9902, "/b")
    assert second.max_heap == 1 << 29 and (second.max_connections, second.concurrency) == (3, 2)
    assert Options(port=80, envoys=2).each(1, "/b").admin_port == 0
    listener = build(structs.replace(second, concurrency=1))["static_resources"]["listeners"][0]
    assert listener["enable_reuse_port"], "one accepts beside the other"
    for wrong, path in (
        (Options(port=0, envoys=2), r"\$.port: .*name one"),
        (Options(port=80, admin_port=79, envoys=2), r"\$.admin_port"),
        (Options(port=80, admin_port=65535, envoys=2), r"\$.admin_port"),
        (Options(envoys=0), r"\$.envoys"),
    ):
        with pytest.raises(ConfigError, match=path):
            wrong.check()


@pytest.mark.envoy
def test_envoys_objection_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(GatewayError, match=r"(?s)Envoy refuses the configuration: .*no_such_field"):
        validate("no_such_field: 1")
    with pytest.raises(GatewayError, match=r"Envoy refuses the configuration: .*/missing\.pem"):
        validate(render(Options(tls=Tls(ca_file="/missing.pem"))))
    with pytest.raises(GatewayError, match="cannot be run"):
        validate("{}", str(tmp_path / "no-envoy"))


def test_a_pool_of_http2_is_spoken_to_by_http2() -> None:
    """Both by the scheduler's choice and on the gateway's own; gRPC went so before."""
    key = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    for wanted, protocol in ((False, "http_protocol_options"), (True, "http2_protocol_options")):
        made = build(Options(upstream_http2=wanted))
        for name in ("dst", "all_endpoints"):
            options = cluster(made, name)["typed_extension_protocol_options"][key]
            assert list(options["explicit_http_config"]) == [protocol]
