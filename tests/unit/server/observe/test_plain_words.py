"""Warnings, as people read them."""

import re
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import pytest

from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.errors import PluginError
from fairlead.core.exact import ExactKnowledge
from fairlead.core.fleet import Fleet
from fairlead.core.kv.answered import AnsweredIndex
from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.recipe import Recipe
from fairlead.core.records import OutcomeRecord
from fairlead.core.request import Request
from fairlead.core.trust import ALGORITHM, BLOCK_SIZE, Finding
from fairlead.pool.kube.reflector import Stats
from fairlead.server.observe import snapshot_shape
from fairlead.server.observe.history import History
from fairlead.server.observe.recent import Recent
from fairlead.server.observe.snapshot import endpoint_rows as endpoints
from fairlead.server.observe.snapshot_shape import BandRow, Notice, Queues, notices
from fairlead.server.observe.watch import Watch


class Scene:
    def __init__(self, names="ab") -> None:
        self.now = 100.0
        self.fleet = Fleet()
        for name in names:
            self.fleet.up(Endpoint(name, f"10.0.0.{ord(name)}:80"))
        self.watch = Watch(self.fleet, lambda: self.now)
        self.watch.troubles.watch("log", lambda: "")  # what other tests left of it is not ours
        self.recent = Recent()
        self.history = History(self.watch, self.now, lambda: 1000.0)
        self.queues: Queues | None = None
        self.schedulers = 1

    def answer(self, *names, age=0.5) -> None:
        for name in names:
            self.fleet.sampled(name, self.now - age, self.now - age, Sample(waiting=0, running=0))

    def refuse(self, *names) -> None:
        """Their scrapes find nobody who listens."""
        for name in names:
            self.watch.on_silence(name, "cannot connect: Connection refused")
            for _ in range(3):
                self.fleet.scrape_failed(name, self.now)

    def ends(self, *statuses) -> None:
        """Requests end with these."""
        self.now += 0.5
        for status in statuses:
            request = Request(id=1, arrived=self.now, model="m", stream=True)
            self.watch.on_outcome(OutcomeRecord(request=request, at=self.now, endpoint="a", status=status))
        self.history.look(self.now)

    def notices(self, *reasons) -> list[Notice]:
        self.history.look(self.now)
        rows = endpoints(self.watch, self.recent, self.history.out, self.now, 1000.0)
        failures, happened = self.history.failures(), self.history.happened
        listed = notices(self.watch, rows, failures, self.queues, reasons, happened, self.now, self.schedulers)
        assert len({notice.key for notice in listed}) == len(listed), "the page shows one sentence per key"
        return listed

    def told(self, *reasons) -> list[tuple[str, str]]:
        return [(notice.level, notice.text + notice.detail) for notice in self.notices(*reasons)]


@pytest.fixture
def scene() -> Scene:
    made = Scene()
    made.answer("a", "b")
    return made


def test_nothing_is_said_when_all_is_well(scene):
    assert scene.told() == []


def test_an_endpoint_whose_metrics_cannot_be_read(scene):
    scene.answer("b", age=12.0)
    scene.watch.on_silence("b", "status 404")
    assert scene.told() == [
        ("watch", "The metrics of endpoint b cannot be read (status 404); load is estimated.")
    ]  # fmt: skip


def test_many_of_them_are_one_sentence():
    scene = Scene("abcdefgh")
    scene.answer(*"abcdef", age=20.0)
    scene.answer("g", "h")
    ((level, text),) = scene.told()
    assert level == "watch" and "6 of 8 endpoints (a, b, c and 3 more) cannot be read" in text
    scene.now += 30.0
    assert scene.told()[0][0] == "bad", "nobody answers any more"


def test_an_endpoint_that_refuses_connections_is_out_since_then(scene):
    scene.refuse("b")
    (notice,) = scene.notices()
    assert (notice.level, notice.text, notice.since) == ("bad", "Endpoint b has been out of use", 1100.0)
    assert notice.detail == ": it refuses connections. Requests go to the other 1."
    assert notice.runbook == "FairleadEndpointStale"
    scene.now += 60.0
    scene.answer("a")
    assert scene.notices()[0].since == 1100.0, "since when, not how it was last seen"


def test_several_have_been_out_since_the_last_one_went():
    scene = Scene("abc")
    scene.answer("a", "b", "c")
    scene.refuse("a")
    assert scene.notices()[0].since == 1100.0
    scene.now += 60.0
    scene.answer("b")
    scene.refuse("c")
    (notice,) = scene.notices()
    assert (notice.text, notice.since) == ("2 of 3 endpoints (a, c) have been out of use", 1160.0)


#: Endpoint → labels.
PAIRS = {
    **{name: {"llm-d.ai/role": "prefill", "model-id": "qwen"} for name in "pq"},
    **{name: {"llm-d.ai/role": "decode", "model-id": "qwen"} for name in "de"},
    **{name: {"model-id": "llama"} for name in "lm"},
}


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("d", ["Endpoint d has been out of use: it refuses connections. Requests go to the other 1."]),
        (
            "de",
            [
                "No endpoint has served qwen: its requests fail.",
                "2 of 6 endpoints (d, e) have been out of use: they refuse connections.",
            ],
        ),
        (
            "delm",
            [
                "No endpoint has served llama, qwen: their requests fail.",
                "4 of 6 endpoints (d, e, l and 1 more) have been out of use: they refuse connections.",
            ],
        ),
        ("dl", ["2 of 6 endpoints (d, l) have been out of use: they refuse connections. Requests go to the other 2."]),
        ("p", ["Endpoint p has been out of use: it refuses connections. Requests go to the other 1."]),
        ("pq", ["2 of 6 endpoints (p, q) have been out of use: they refuse connections. Requests are not split."]),
    ],
)
def test_a_model_that_nobody_can_answer_for_is_named(out, said):
    scene = Scene("")
    for name, labels in PAIRS.items():
        scene.fleet.up(Endpoint(name, f"{name}:80", labels))
        scene.answer(name)
    scene.refuse(*out)
    notices = scene.notices()
    assert [notice.text + notice.detail for notice in notices] == said
    if len(said) > 1:
        assert (notices[0].key, notices[0].since, notices[0].runbook) == ("models-out", 1100.0, "FairleadModelOut")
        scene.ends(*[503] * 5)
        assert [notice.key for notice in scene.notices()] == ["every", "models-out"]


def test_when_all_endpoints_are_out_every_request_fails(scene):
    scene.ends(200)
    scene.refuse("a", "b")
    assert scene.notices()[0].detail == ": they refuse connections. Requests fail or wait."
    scene.ends(503, 503)
    scene.ends(503, 503, 503)
    (notice,) = scene.notices()
    assert (notice.level, notice.text, notice.since) == ("bad", "Every request has failed", 1100.5)
    assert notice.detail == ": 2 of 2 endpoints refuse connections."
    assert notice.runbook == "FairleadNoEndpoints"
    scene.ends(503, 200)
    assert scene.told()[0][1].endswith("% of those of the last 10 seconds.")


def test_every_request_fails_though_endpoints_are_in_use(scene):
    for _ in range(5):
        scene.ends(500)
    scene.answer("a", "b")
    (notice,) = scene.notices()
    assert notice.detail == ": the answers are errors, though endpoints are in use."
    assert notice.runbook == "FairleadErrorsHigh"


def test_a_client_that_asks_for_nonsense_is_no_failure_of_ours(scene):
    for _ in range(9):
        scene.ends(400)
    scene.answer("a", "b")
    assert scene.notices() == []


def test_an_endpoint_that_fails_is_out_and_the_gravest_comes_first(scene):
    scene.answer("a", age=50.0)
    for _ in range(3):
        scene.fleet.answered(1, False, scene.now)
    found = scene.notices()
    assert [notice.level for notice in found] == ["bad", "watch"]
    assert found[0].detail == ": it failed 3 answers in a row. Requests go to the other 1."


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("answered", "an endpoint's answers no longer all fail"),
        ("answered, then failed", "an endpoint's answers no longer all fail"),
        ("removed", "an endpoint whose answers failed was removed"),
        ("untried", "an endpoint whose answers failed is in use again: no request has tried it for a minute"),
    ],
)
def test_how_failing_ended_is_logged(scene, caplog, ending, said):
    caplog.set_level("INFO")
    for _ in range(3):
        scene.fleet.answered(1, False, scene.now)
    scene.history.look(scene.now)
    if ending.startswith("answered"):
        scene.fleet.answered(1, True, scene.now)
        for _ in range(ending.count("failed")):
            scene.fleet.answered(1, False, scene.now)
    elif ending == "removed":
        scene.fleet.down("b")
    else:
        scene.now += 200.0
    scene.history.look(scene.now)
    assert [one.getMessage().partition(" endpoint=")[0] for one in caplog.records if one.levelname == "INFO"] == [said]


def test_why_we_are_not_ready(scene):
    assert scene.told("shutting down") == [("bad", "Not ready: shutting down.")]
    assert scene.told("starting", "no endpoints") == [("bad", "Not ready: starting; no endpoints.")]


def test_a_long_queue(scene):
    band = BandRow(priority=0, waiting=3, bytes=9, flows=1, oldest_s=7.4, delay_s=2.0, used=0.1)
    scene.queues = Queues(waiting=3, saturation=1.0, delay_s=2.0, wanted_endpoints=4, bands=[band])
    assert scene.told() == [
        ("watch", "Requests wait in the queue: 3, the longest for 7 s; no endpoint that can serve has room.")
    ]
    scene.schedulers = 2
    assert scene.told()[0][1].startswith("Requests wait in this scheduler's queue: 3, the longest")


def test_a_queue_that_is_nearly_full(scene):
    text = "The queue is nearly full: 95% of its limit; beyond it requests are refused."
    for used, told in ((0.9, []), (0.95, [("bad", text)])):
        band = BandRow(priority=0, waiting=3, bytes=9, flows=1, oldest_s=1.0, delay_s=2.0, used=used)
        scene.queues = Queues(waiting=3, saturation=1.0, delay_s=2.0, wanted_endpoints=4, bands=[band])
        assert scene.told() == told


def test_what_keeps_failing_is_told_for_a_minute(scene, caplog):
    assert scene.told() == []
    scene.watch.on_plugin_error(PluginError("p", "no"))
    scene.watch.on_plugin_error(PluginError("q", "no"))
    scene.watch.on_plugin_error(PluginError("p", "no"))
    scene.watch.on_fallback("10.0.0.1:80", 200)
    assert scene.told() == [
        (
            "bad",
            "The gateway serves requests without asking us (1 since the start); "
            "it could not reach the scheduler, or not in time.",
        ),
        ("bad", "The plugin 'p' fails (2 since the start) and is left out."),
        ("bad", "The plugin 'q' fails (1 since the start) and is left out."),
    ]
    scene.now += 61.0
    scene.answer("a", "b")
    assert scene.told() == []


def test_what_failed_while_nobody_looked_is_told_when_it_happened_not_when_it_is_seen(scene):
    scene.watch.on_fallback("10.0.0.1:80", 200)
    scene.history.look(scene.now)
    scene.now += 3.0
    scene.answer("a", "b")
    assert len(scene.told()) == 1, "the first look, three seconds after it"
    scene.now += 60.0
    scene.watch.on_fallback("10.0.0.1:80", 200)
    scene.history.look(scene.now)
    scene.now += 200.0
    scene.answer("a", "b")
    assert scene.told() == [], "the next look, minutes after it"


def test_kubernetes_and_shadows(scene):
    stats = [Stats(trouble=why) for why in ("", "not allowed to watch pods", "no route", "no route")]
    resources = ("inferencepools", "pods", "leases", "endpointslices", "inferencemodels")
    seen = zip(resources, [*stats, Stats(connected=True)], strict=True)
    followed = {resource: SimpleNamespace(stats=each, items={}) for resource, each in seen}
    scene.watch.kube.follow(lambda: followed)
    scene.watch.shadows.cut = lambda: {"slow": "too slow"}
    assert [text for _, text in scene.told()] == [
        "Restricted: changes of inferencepools are not seen: no answer yet; "
        "changes of pods are not seen: not allowed to watch pods; "
        "changes of leases, endpointslices are not seen: no route; the last known state stays in force.",
        "The shadow 'slow' is cut off (too slow); traffic is not affected.",
    ]


def test_the_path_of_a_file_stays_as_it_is(scene):
    scene.watch.troubles.watch("state", lambda: "tiny/learned.state cannot be written, and a restart forgets: full")
    assert scene.told() == [("bad", "Restricted: tiny/learned.state cannot be written, and a restart forgets: full.")]


def test_the_reason_of_each_unusable_configuration_is_read_out(scene):
    reasons = iter(["fairlead.yaml:1: unknown field 'a'", "fairlead.yaml:1: unknown field 'b'"])
    scene.watch.troubles.watch("configuration", lambda: next(reasons))
    texts = [scene.notices()[0].text for _ in range(2)]
    assert texts == [f"Restricted: fairlead.yaml:1: unknown field '{field}'." for field in "ab"]


def test_the_runbook_says_what_to_do_about_restrictions(scene):
    sections = {
        "state": "FairleadTrouble",
        "gateway-uploads": "FairleadUploadsEnded",
        "journal": "FairleadJournalLoses",
        "journal-size": "FairleadJournalLoses",
        "kubernetes": "FairleadKubeLost",
    }
    for what in sections:
        scene.watch.troubles.watch(what, lambda what=what: what)
    assert {notice.detail: notice.runbook for notice in scene.notices()} == {
        f": {what}.": section for what, section in sections.items()
    }


def test_endpoints_whose_names_differ_in_a_digit_are_out_for_two_reasons():
    scene = Scene()
    for name in ("vllm-0", "vllm-1", "vllm-2"):
        scene.fleet.up(Endpoint(name, "10.0.0.1:80"))
    scene.answer("a", "b", "vllm-2")
    scene.refuse("vllm-0")
    first = scene.notices()
    scene.watch.on_silence("vllm-1", "status 500")
    for _ in range(3):
        scene.fleet.scrape_failed("vllm-1", scene.now)
    listed = scene.notices()
    assert [notice.text for notice in listed] == [f"Endpoint vllm-{i} has been out of use" for i in (0, 1)]
    assert listed[0].key == first[0].key
    scene.refuse("vllm-2")
    assert [(notice.key, notice.text) for notice in scene.notices()] == [
        (listed[0].key, "2 of 5 endpoints (vllm-0, vllm-2) have been out of use"),
        (listed[1].key, listed[1].text),
    ]


def test_figures_that_keep_changing_are_no_news(scene):
    texts = set()
    scene.ends(200)
    scene.ends(200)
    for waiting in (3, 4):
        band = BandRow(
            priority=0, waiting=waiting, bytes=9, flows=1, oldest_s=waiting + 3.0, delay_s=2.0, used=0.9 + waiting / 50
        )
        scene.queues = Queues(waiting=waiting, saturation=1.0, delay_s=2.0, wanted_endpoints=4, bands=[band])
        scene.watch.on_fallback("10.0.0.1:80", 200)
        scene.watch.on_plugin_error(PluginError("p", "no"))
        scene.ends(200, 503)
        scene.answer("a", "b")
        texts.add(tuple((notice.key, notice.text) for notice in scene.notices()))
    assert len(texts) == 1 and len(texts.pop()) == 5


def test_the_list_ends_somewhere(scene):
    for i in range(9):
        scene.watch.troubles.watch(f"t{i}", lambda: "no")
    scene.watch.shadows.cut = lambda: {"slow": "too slow"}
    listed = scene.told()
    assert len(listed) == 6 and listed[-1] == ("bad", "And 5 more problems.")


class EventScene(Scene):
    """With KV events of each endpoint."""

    def __init__(self, names: str) -> None:
        super().__init__(names)
        recipe = Recipe()
        self.exact = self.fleet.exact = ExactKnowledge(recipe, KvIndex(1000, recipe.space()))
        for slot in range(len(names)):
            self.exact.add_slot(slot)

    def disagree(self, *slots: int) -> None:
        for slot in slots:
            for _ in range(4):
                self.exact.check.trust(slot).judge(False)

    def stop(self, *slots: int) -> None:
        """Their feeds were received, and end."""
        for slot in slots:
            cache = self.exact.index.rank(slot, 0, "m")
            cache.heard, cache.linked = True, False


def test_events_that_are_not_believed():
    scene = EventScene("ab")
    scene.answer("a", "b")
    assert scene.told() == []
    scene.disagree(1)
    ((level, text),) = scene.told()
    assert level == "watch"
    assert text.startswith("KV events of endpoint b are not trusted: predictions came true in 0% of the last answers")


def test_events_of_many_endpoints_are_one_sentence_per_cause():
    scene = EventScene("abcdefgh")
    scene.answer(*"abcdefgh")
    scene.disagree(0, 1)
    scene.stop(*range(2, 7))
    assert scene.told() == [
        (
            "watch",
            "KV events of 2 of 8 endpoints (a, b) are not trusted: predictions came true in at most 0% of the last "
            "answers; learned knowledge is used instead.",
        ),
        (
            "watch",
            "KV events of 5 of 8 endpoints (c, d, e and 2 more) have stopped; later changes of their caches are "
            "unknown.",
        ),
    ]


def test_events_that_an_indexer_should_answer_for_lead_to_the_indexer():
    scene = EventScene("ab")
    scene.exact = scene.fleet.exact = ExactKnowledge(Recipe(), AnsweredIndex("m", Recipe().space()))
    for slot in (0, 1):
        scene.exact.add_slot(slot)
    scene.answer("a", "b")
    scene.stop(0)
    (notice,) = scene.notices()
    assert notice.text.startswith("KV events of endpoint a do not come from the indexer;")
    assert notice.runbook == "FairleadIndexerDown"


def test_endpoints_that_are_not_trusted_for_one_cause_keep_what_is_known_of_each():
    scene = EventScene("abcdefg")
    scene.answer(*"abcdefg")
    scene.disagree(*range(7))
    sizes = (16, 32, 16, 64, 128)
    findings = [*(Finding(BLOCK_SIZE, f"its events report {size}") for size in sizes), Finding(ALGORITHM), None]
    scene.exact.check.finding = findings.__getitem__
    assert [text.partition("instead.")[2] for _, text in scene.told()] == [
        " Likely cause: its events report 16; its events report 32; its events report 64.",
        f" Likely cause: {ALGORITHM}.",
        "",
    ]


def test_nothing_is_said_of_the_events_of_an_endpoint_that_is_out():
    scene = EventScene("ab")
    scene.answer("a", "b")
    scene.disagree(0)
    scene.stop(1)
    assert len(scene.told()) == 2
    scene.refuse("a", "b")
    assert [notice.text for notice in scene.notices()] == ["2 of 2 endpoints (a, b) have been out of use"]


def test_the_runbook_has_every_section_that_is_named():
    named = set(re.findall(r'"((?:Fairlead|EPP)[A-Z]\w+)"', Path(snapshot_shape.__file__).read_text()))
    headings = set(re.findall(r"^## (\w+)$", (files("fairlead.server.pages") / "runbook.md").read_text(), re.MULTILINE))
    assert len(named) > 9 and named <= headings
