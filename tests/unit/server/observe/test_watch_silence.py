"""What the debug page says of endpoints, and why their load cannot be read."""

import pytest

from fairlead.compat.load import load
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.events import EndpointUp
from fairlead.core.fleet import Fleet
from fairlead.core.records import StallRecord
from fairlead.pool.scrape import TOLD_AFTER
from fairlead.server.live.pool_scheduler import PoolScheduler
from fairlead.server.observe.watch import Watch


def errors(watch: Watch) -> dict[str, str]:
    return {one.id: one.last_error for one in watch.endpoints()}


def test_the_last_reason_is_shown_until_it_is_over() -> None:
    fleet = Fleet()
    watch = Watch(fleet, lambda: 0.0)
    for name in ("a", "b"):
        fleet.up(Endpoint(name, f"{name}:1"))
    watch.on_silence("a", "status 404")
    watch.on_silence("a", "no answer within 1 s")
    assert errors(watch) == {"a": "no answer within 1 s", "b": ""}
    watch.on_silence("a", "")
    watch.on_silence("b", "")
    assert errors(watch) == {"a": "", "b": ""}
    watch.on_silence("a", "status 404")
    watch.on_endpoint_gone("a")
    assert errors(watch) == {"a": "", "b": ""}


@pytest.mark.parametrize("address", ["a:1", "a:2"])
async def test_a_server_at_another_address_may_hang_anew(caplog: pytest.LogCaptureFixture, address: str) -> None:
    pool = PoolScheduler(load("policy: default", need_endpoints=False), None)
    for at in ("a:1", address):
        pool.endpoint(EndpointUp(Endpoint("a", at)))
        pool.watch.on_stall(StallRecord("a", 9.0, "suspect", 1.4, 1.2, 1))
    lines = [record.message for record in caplog.records if "hang" in record.message]
    assert lines == ["an endpoint seems to hang: suspect"] * len({"a:1", address})


async def test_a_label_that_is_no_port_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    pool = PoolScheduler(load("policy: default", need_endpoints=False), None)
    for port in ("abc", "8001"):
        pool.endpoint(EndpointUp(Endpoint(f"pod-{port}", "10.0.0.1:8000", {"metricsPort": port})))
    (record,) = [record for record in caplog.records if "metricsPort" in record.message]
    assert record.message == "the label metricsPort is not a port; metrics are read as without it"
    assert vars(record)["fields"] == {
        "endpoint": "pod-abc",
        "label": "abc",
        "read_at": "http://10.0.0.1:8000/metrics",
    }


@pytest.mark.parametrize(
    ("answered", "failing", "text"),
    [
        ("", "", ""),
        ("a", "", "the metrics of 1 of 3 endpoints cannot be read; their load is estimated"),
        ("", "ab", "2 of 3 endpoints are out of use, as their metrics pages fail: a, b"),
        ("a", "b", "1 of 3 endpoints are out of use, as their metrics pages fail: b; the metrics of 1 of 3 endpoints"),
        (
            "",
            "abc",
            "the metrics pages of all 3 endpoints fail; requests go there all the same, unless "
            "flowControl.noEndpointTtl lets them wait",
        ),
    ],
)
def test_what_follows_from_failed_scrapes_is_told(
    caplog: pytest.LogCaptureFixture, answered: str, failing: str, text: str
) -> None:
    fleet = Fleet()
    watch = Watch(fleet, lambda: 0.0)
    for name in "abc":
        fleet.up(Endpoint(name, f"{name}:1"))
    for attempt in range(TOLD_AFTER):
        for name in answered + failing:
            if attempt == TOLD_AFTER - 1:
                watch.on_silence(name, "status 404" if name in answered else "status 503")
            fleet.scrape_failed(name, 0.0, answered=name in answered)
    assert watch.troubles.look().get("scrapes", "").startswith(text) or not text
    lines = [record.message for record in caplog.records if record.message.startswith("cannot")]
    assert lines == [
        "cannot read the metrics of an endpoint; "
        + ("its load is estimated" if name in answered else "it is out of use while others serve")
        for name in answered + failing
    ]


def test_an_endpoint_shows_what_its_engine_reports_and_what_was_learned() -> None:
    fleet = Fleet()
    watch = Watch(fleet, lambda: 1.0)
    for name in ("a", "b"):
        fleet.up(Endpoint(name, f"{name}:1"))
    fleet.sampled("a", 1.0, 1.0, Sample(block_size=32, num_blocks=256, prefix_queries=900.0, prefix_hits=300.0))
    slot = fleet.table.slot("a")
    assert slot is not None
    fleet.predictor.rates.step[slot] = 2.5
    fleet.table.max_seqs[slot] = 4.0
    told, silent = watch.endpoints()
    assert (told.block_size, told.num_blocks, told.prefix_queries, told.prefix_hits) == (32, 256, 900.0, 300.0)
    assert (told.prefill_factor, told.step_factor, told.max_num_seqs) == (1.0, 2.5, 4)
    assert (silent.block_size, silent.num_blocks, silent.prefix_hits, silent.max_num_seqs) == (None,) * 4
