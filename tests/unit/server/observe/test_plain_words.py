"""Warnings, as people read them."""

import pytest

from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.errors import PluginError
from fairlead.core.exact import ExactKnowledge
from fairlead.core.fleet import Fleet
from fairlead.core.kv.recipe import Recipe, new_index
from fairlead.server.observe.component_metrics import Followed
from fairlead.server.observe.recent import Recent
from fairlead.server.observe.snapshot import endpoint_rows as endpoints
from fairlead.server.observe.snapshot_shape import BandRow, Happened, Queues, notices
from fairlead.server.observe.watch import Watch


class Scene:
    def __init__(self, names="ab") -> None:
        self.now = 100.0
        self.fleet = Fleet()
        for name in names:
            self.fleet.up(Endpoint(name, f"10.0.0.{ord(name)}:80"))
        self.watch = Watch(self.fleet, lambda: self.now)
        self.happened = Happened()
        self.recent = Recent()
        self.queues: Queues | None = None

    def answer(self, *names, age=0.5) -> None:
        for name in names:
            self.fleet.sampled(name, self.now - age, self.now - age, Sample(waiting=0, running=0))

    def told(self, *reasons) -> list[tuple[str, str]]:
        rows = endpoints(self.watch, self.recent, self.now)
        found = notices(self.watch, rows, self.queues, reasons, self.happened, self.now)
        return [(notice.level, notice.text) for notice in found]


@pytest.fixture
def scene() -> Scene:
    made = Scene()
    made.answer("a", "b")
    return made


def test_nothing_is_said_when_all_is_well(scene):
    assert scene.told() == []


def test_a_silent_endpoint(scene):
    scene.answer("b", age=12.0)
    assert scene.told() == [
        ("watch", "Endpoint b has not answered a scrape for 12 s; its load is estimated from our own requests.")
    ]


def test_many_silent_endpoints_are_one_sentence():
    scene = Scene("abcdefgh")
    scene.answer(*"abcdef", age=20.0)
    scene.answer("g", "h")
    ((level, text),) = scene.told()
    assert (level, text.partition(";")[0]) == (
        "watch", "6 of 8 endpoints (a, b, c and 3 more) have not answered a scrape for 20 s or more"
    )  # fmt: skip
    scene.now += 30.0
    assert scene.told()[0][0] == "bad", "nobody answers any more"


def test_endpoints_that_never_answered(scene):
    scene.fleet.up(Endpoint("c", "10.0.0.9:80"))
    assert [text for _, text in scene.told()] == [
        "Endpoint c has never answered a scrape; nothing is known but what we sent there."
    ]


def test_an_endpoint_that_fails_is_avoided_and_the_gravest_comes_first(scene):
    scene.answer("a", age=50.0)
    for _ in range(3):
        scene.fleet.answered(1, False, scene.now)
    assert [level for level, _ in scene.told()] == ["bad", "watch"]
    assert scene.told()[0][1] == "Endpoint b is avoided for now after 3 failed answers in a row."


def test_why_we_are_not_ready(scene):
    assert scene.told("shutting down") == [("bad", "Not ready: shutting down.")]


def test_a_long_queue(scene):
    band = BandRow(priority=0, waiting=3, bytes=9, flows=1, oldest_s=7.4, delay_s=2.0, used=0.1)
    scene.queues = Queues(waiting=3, saturation=1.0, delay_s=2.0, wanted_endpoints=4, bands=[band])
    assert scene.told() == [
        ("watch", "3 requests wait in the queue, the longest for 7 s; no endpoint has room for more.")
    ]


def test_what_keeps_failing_is_told_for_a_minute(scene, caplog):
    assert scene.told() == []
    scene.watch.on_plugin_error(PluginError("p", "no"))
    assert scene.told() == [], "it may have been long ago: only growth is news"
    scene.watch.on_plugin_error(PluginError("p", "no"))
    scene.watch.on_fallback("10.0.0.1:80", 200)
    texts = [text for _, text in scene.told()]
    assert any("The plugin 'p' fails (2 times since the start)" in text for text in texts)
    assert any("serves requests without asking us (1 since the start)" in text for text in texts)
    scene.now += 61.0
    scene.answer("a", "b")
    assert scene.told() == []


def test_kubernetes_and_shadows(scene):
    followed = Followed(connected=False, objects=1, lists=1, watches=1, failures=1, events=0, unreadable=0)
    scene.watch.kube.follow(lambda: {"pods": followed})
    scene.watch.shadows.cut = lambda: {"slow": "too slow"}
    assert [text for _, text in scene.told()] == [
        "The API server does not answer for pods; the last known state stays in force.",
        "The shadow 'slow' is cut off (too slow); traffic is not affected.",
    ]


def test_events_that_are_not_believed(scene):
    recipe = Recipe()
    scene.fleet.exact = ExactKnowledge(recipe, new_index(recipe, 1000))
    for slot in (0, 1):
        scene.fleet.exact.add_slot(slot)
    assert scene.told() == []
    for _ in range(4):
        scene.fleet.exact.check.trust(1).judge(False)
    ((level, text),) = scene.told()
    assert level == "watch"
    assert text.startswith("KV events of endpoint b are not believed: predictions came true in 0% of the last answers")
