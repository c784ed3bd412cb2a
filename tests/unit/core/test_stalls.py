"""Endpoints that hang: found in time, spared, found again; and slow ones that are not taken for hanging."""

from collections.abc import Callable
from itertools import pairwise
from math import inf
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.events import (
    EndpointUp,
    FirstTokenSeen,
    GatewayAnswered,
    MetricsSampled,
    PeerHeard,
    PeerSnapshot,
    RequestArrived,
    RequestMoved,
    ResponseEnded,
    StreamLost,
    TimerFired,
)
from fairlead.core.facts import read_batch
from fairlead.core.fleet import Fleet
from fairlead.core.instructions import Record, Route, SetTimer
from fairlead.core.ledger import IDLE_SECONDS, IDLE_SECONDS_PENDING, Lease
from fairlead.core.records import Forecast, OutcomeRecord, StallRecord
from fairlead.core.reports import SharedFleet
from fairlead.core.request import Request
from fairlead.core.scheduler import STALLS_TIMER, Pipeline
from fairlead.core.stalls import (
    FORGOTTEN_S,
    LOOK_S,
    MOST,
    OUT_OF_USE,
    SILENT,
    SUSPECT,
    TRIED,
    WELL,
    level_name,
    overdue_s,
)
from fairlead.core.tokens import TokenEstimator
from fairlead.plugins.filters.availability import Health, HealthParams
from fairlead.plugins.policies.cost_model import CostModel
from fairlead.server.observe.watch import Watch

SCRAPE = 0.2


class Clock:
    now = 100.0

    def time(self) -> float:
        return self.now


class Rig:
    """A pool whose engines answer, or do not, as the test says."""

    def __init__(self, servers: int = 2, fleet: Fleet | None = None) -> None:
        self.clock = Clock()
        self.fleet = fleet or Fleet()
        filters = [Health(HealthParams())]
        self.pipeline = Pipeline(self.clock, Random(1), self.fleet, CostModel(filters=filters), TokenEstimator())
        self.names = [f"e{number}" for number in range(servers)]
        self.tokens = dict.fromkeys(self.names, 0.0)
        self.pages: dict[str, Sample] = {}
        self.hung: set[str] = set()
        self.told: list[StallRecord] = []
        self.running: list[tuple[float, int, str]] = []
        #: Whether pages show the requests that run: those that are refused at once are never seen.
        self.shown = True
        self.number = 0
        (self.timer,) = (i.at for i in self.pipeline.start() if isinstance(i, SetTimer) and i.name == STALLS_TIMER)
        for number, name in enumerate(self.names):
            self.feed(EndpointUp(Endpoint(id=name, address=f"10.0.0.{number}:80")))

    def feed(self, event: Any) -> list[Any]:
        instructions = self.pipeline.handle(event)
        records = [i for i in instructions if isinstance(i, Record)]
        self.told += [record for record in records if isinstance(record, StallRecord)]
        return instructions

    def send(self, took: float = 0.3, tokens: int = 300, **fields: Any) -> Route:
        self.number += 1
        fields = {"stream": True, "api": "chat", "max_tokens": 32} | fields
        request = Request(id=self.number, arrived=self.clock.now, prompt_tokens=tokens, **fields)
        (route,) = (i for i in self.feed(RequestArrived(request)) if isinstance(i, Route))
        self.running.append((self.clock.now + took, request.id, route.endpoint.id))
        return route

    def step(self, scraped: bool = True) -> None:
        """0.2 s: answers that are due end, and pages are read."""
        self.clock.now += SCRAPE
        for end, number, name in list(self.running):
            if end <= self.clock.now and name not in self.hung:
                self.running.remove((end, number, name))
                self.tokens[name] += 32.0
                self.feed(FirstTokenSeen(number))
                self.feed(ResponseEnded(request_id=number, status=200))
        for name in self.names if scraped else ():
            if name not in self.hung or name not in self.pages:
                runs = float(sum(there == name for _, _, there in self.running)) if self.shown else 0.0
                if runs:
                    self.tokens[name] += 1.0
                self.pages[name] = Sample(
                    waiting=0.0, running=runs, kv_usage=0.01 * runs, generation_tokens=self.tokens[name]
                )
            self.feed(MetricsSampled(name, self.clock.now - 0.01, self.pages[name]))
        if self.clock.now >= self.timer:
            self.fire()
        self.pipeline.validate()

    def fire(self) -> None:
        (self.timer,) = (i.at for i in self.feed(TimerFired(STALLS_TIMER)) if isinstance(i, SetTimer))

    def warm(self, seconds: float = 10.0) -> None:
        for _ in range(round(seconds / SCRAPE)):
            self.send()
            self.step()

    def suspicion(self, name: str) -> float:
        slot = self.fleet.table.slot(name)
        assert slot is not None
        return float(self.fleet.table.suspicion[slot])

    def hang(self, name: str, seconds: float, scraped: bool = True) -> dict[float, float]:
        """Level → seconds until it was reached."""
        self.hung.add(name)
        began, reached = self.clock.now, dict[float, float]()
        while self.clock.now < began + seconds:
            self.send()
            self.step(scraped)
            reached.setdefault(self.suspicion(name), self.clock.now - began)
        return reached


@pytest.mark.parametrize("scraped", [True, False], ids=["page-answers", "page-does-not"])
def test_a_hung_engine_is_suspect_within_two_seconds_out_within_five_and_spared(scraped: bool) -> None:
    rig = Rig()
    rig.warm()
    assert not rig.told, "a busy pool is well"
    reached = rig.hang("e0", 2.0, scraped)
    assert reached[SUSPECT] <= 2.0
    before = sum(there == "e0" for _, _, there in rig.running)
    assert before > 0
    reached = rig.hang("e0", 8.0, scraped)
    assert reached[OUT_OF_USE] <= 3.0
    assert sum(there == "e0" for _, _, there in rig.running) - before <= 3
    assert rig.suspicion("e1") == WELL
    assert [(record.endpoint, record.level) for record in rig.told] == [("e0", "suspect"), ("e0", "out")]
    assert rig.told[0].leases == before
    assert rig.told[0].silent_s > rig.told[0].plausible_s


@pytest.mark.parametrize("timer", [True, False], ids=["timer", "journal without it"])
def test_silence_while_this_process_was_suspended_is_none(timer: bool) -> None:
    rig = Rig()
    if not timer:
        rig.timer = inf
    rig.warm()
    for _ in range(3):
        rig.clock.now += 10.0
        rig.send()  # is read before what the engines did meanwhile
        rig.step()
        rig.step()
    assert not rig.told


def test_standstills_one_after_another_accuse_nobody() -> None:
    """Each request holds up the process, as those of a policy that hangs do; pages are read again afterwards."""
    rig = Rig()
    rig.warm()
    for _ in range(4):
        rig.clock.now += 0.9
        rig.send()
    rig.step(scraped=False)
    rig.step()
    rig.step()
    assert not rig.told
    rig.hang("e0", 8.0)
    assert [record.level for record in rig.told] == ["suspect", "out"], "from then on silence counts as ever"


def test_requests_that_queue_for_slow_decisions_accuse_nobody() -> None:
    """Each holds up the process only for a moment, but together they keep what engines did waiting for seconds."""
    rig = Rig()
    rig.warm()
    for _ in range(30):
        rig.clock.now += 0.1
        rig.send()
    rig.step()
    rig.step()
    assert not rig.told
    rig.hang("e0", 8.0)
    assert [record.level for record in rig.told] == ["suspect", "out"], "from then on silence counts as ever"


@pytest.mark.parametrize("late_s", [0.0, 0.21])
def test_a_hang_is_found_although_pages_are_rarely_read_and_no_requests_come(late_s: float) -> None:
    rig = Rig(1)
    rig.warm()
    rig.hung.add("e0")
    rig.send(stream=False)
    began = rig.clock.now
    while rig.clock.now < began + 6.0:
        rig.clock.now = rig.timer + late_s
        rig.fire()
    assert [record.level for record in rig.told] == ["suspect", "out"]


def test_it_recovers_with_the_first_progress() -> None:
    rig = Rig()
    rig.warm()
    rig.hang("e0", 10.0)
    prefill = rig.fleet.predictor.rates.prefill.copy()
    kappa = rig.fleet.predictor.kappa.copy()
    slot = rig.fleet.table.slot("e0")
    rig.hung.clear()
    rig.step()
    assert rig.suspicion("e0") == WELL
    assert [record.level for record in rig.told] == ["suspect", "out", "well"]
    assert rig.fleet.predictor.rates.prefill[slot] == pytest.approx(prefill[slot], rel=0.05), "hung, not slow"
    assert rig.fleet.predictor.kappa[slot] == kappa[slot]
    met = sum(rig.send().endpoint.id == "e0" or rig.step() is not None for _ in range(40))
    assert met > 5, "it is used again"


def test_a_pool_where_all_hang_serves() -> None:
    rig = Rig()
    rig.warm()
    rig.hung = {"e0", "e1"}
    rig.hang("e0", 6.0)
    assert rig.suspicion("e0") == rig.suspicion("e1") == OUT_OF_USE
    assert {rig.send().endpoint.id for _ in range(20)} == {"e0", "e1"}


def test_suspect_ones_are_better_than_those_that_are_out() -> None:
    rig = Rig(3)
    table = rig.fleet.table
    for slot, level in enumerate((OUT_OF_USE, SUSPECT, OUT_OF_USE)):
        table.set_suspicion(slot, level)
    assert {rig.send().endpoint.id for _ in range(10)} == {"e1"}
    table.set_suspicion(0, WELL)
    assert {rig.send().endpoint.id for _ in range(10)} == {"e0"}


@pytest.mark.parametrize("runs", [0.0, 1.0])
def test_what_a_peer_told_of_before_it_died_is_no_hang_unless_the_page_shows_it(runs: float) -> None:
    fleet = SharedFleet()
    peer, rig = Rig(1, fleet), Rig()
    rig.warm()
    rig.step()
    rig.step()
    assert not rig.running
    peer.send()
    rig.feed(PeerHeard("peer", fleet.reports.batch(peer.clock.now)))
    rig.hung.add("e0")
    rig.pages["e0"] = Sample(waiting=0.0, running=runs, kv_usage=0.1, generation_tokens=1.0)
    for _ in range(25):
        rig.step()
    assert rig.suspicion("e0") == (OUT_OF_USE if runs else WELL)


def test_what_a_hung_server_does_not_show_is_no_progress_for_peers() -> None:
    """The server in front of the engine holds requests that the page does not show. Each scheduler stops to count its
    own ones, so that the server is tested. Peers are told of first tokens alone."""
    fleets = SharedFleet(), SharedFleet()
    rigs = [Rig(1, fleet) for fleet in fleets]

    def snapshot() -> PeerSnapshot:
        *_, made = fleets[0].reports.snapshot()
        return PeerSnapshot("peer", made)

    def steps(seconds: float) -> None:
        for _ in range(round(seconds / SCRAPE)):
            for rig in rigs:
                rig.step()
            rigs[1].feed(PeerHeard("peer", fleets[0].reports.batch(rigs[0].clock.now)))

    for rig in rigs:
        rig.warm()
        idle(rig)
    fleets[0].reports.batch(rigs[0].clock.now)
    rigs[1].feed(snapshot())
    for rig in rigs:
        rig.hung.add("e0")
        rig.send()
    steps(4.0)
    assert [[record.level for record in rig.told] for rig in rigs] == [["suspect", "out"]] * 2
    assert [lease.pending for lease in fleets[0].ledger] == [False]
    joined = Rig(1)
    joined.feed(snapshot())
    assert [lease.pending for lease in joined.fleet.ledger] == [True]
    rigs[0].hung.clear()
    rigs[0].step()
    told = read_batch(fleets[0].reports.batch(rigs[0].clock.now))
    assert (len(told.first_tokens), len(told.ended)) == (1, 1)


def test_a_long_prefill_is_no_hang() -> None:
    """A prompt that takes half a minute on this engine, computed in one step: no counter moves meanwhile."""
    rig = Rig()
    rig.warm(2.0)
    rig.step()
    rig.step()
    rig.fleet.predictor.rates.prefill[:] = 30.0
    rig.fleet.table.stale.update(range(2))
    long = rig.send(took=30.0, tokens=20_000)
    slot = rig.fleet.table.slot(long.endpoint.id)
    for _ in range(130):
        rig.pages[long.endpoint.id] = Sample(waiting=0.0, running=1.0, kv_usage=0.5, generation_tokens=1.0)
        rig.hung = {long.endpoint.id}
        rig.step()
    assert rig.fleet.table.suspicion[slot] == WELL


@pytest.mark.parametrize("told", [False, True], ids=["own", "of-a-peer"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ["/v1/images/generations", "/v1/audio/speech", "/openai/v1/audio/speech"])
def test_an_image_or_speech_that_takes_long_is_no_hang(path: str, stream: bool, told: bool) -> None:
    """Neither its forecast nor the page's token counters, which stand still, say how long it takes."""
    fleet = SharedFleet()
    rig, sender = Rig(1 if told else 2), Rig(1, fleet)
    first = sender if told else rig
    api = "images" if "images" in path else "audio"
    route = first.send(took=60.0, stream=stream, max_tokens=0, api=api, path=path)
    assert route.hedge_after_ms == 0.0
    if told:
        rig.feed(PeerHeard("peer", fleet.reports.batch(rig.clock.now)))
        rig.feed(MetricsSampled("e0", rig.clock.now, Sample(waiting=0.0, running=0.0, generation_tokens=0.0)))
    name = route.endpoint.id
    rig.hung.add(name)
    rig.pages[name] = Sample(waiting=0.0, running=1.0, kv_usage=0.0, generation_tokens=0.0)
    for _ in range(150):
        rig.step()
    assert rig.told == []


def test_a_transcription_that_hangs_is_found() -> None:
    """Its answer is tokens, which the page counts."""
    rig = Rig()
    rig.warm()
    route = rig.send(stream=False, api="audio", path="/v1/audio/transcriptions")
    assert route.hedge_after_ms > 0.0
    rig.hung.add(route.endpoint.id)
    for _ in range(30):
        rig.step()
    assert rig.suspicion(route.endpoint.id) == OUT_OF_USE


def test_an_engine_that_is_slower_than_thought_is_soon_known_to_be() -> None:
    """Steps of 4 s, of which the page shows nothing: suspected at first, and then no more."""
    rig = Rig(1)
    rig.warm(2.0)
    found = []
    for _ in range(8):
        rig.told.clear()
        rig.hang("e0", 4.0)
        rig.hung.clear()
        rig.step()
        found.append([record.level for record in rig.told])
    assert found[0] == ["suspect", "out", "well"]
    assert found[-1] == []


@pytest.mark.parametrize(
    "page",
    [
        Sample(waiting=0.0, running=1.0),
        Sample(waiting=0.0, running=1.0, kv_usage=0.01, generation_tokens=7.0, prefix_queries=9.0, each_step=False),
    ],
    ids=["no-tokens", "tokens-of-ended-answers"],
)
def test_long_answers_of_an_engine_that_does_not_tell_each_token_are_no_hang(page: Sample) -> None:
    rig = Rig(1)
    rig.send(took=60.0)
    rig.feed(FirstTokenSeen(rig.number))
    for _ in range(100):
        rig.clock.now += SCRAPE
        rig.feed(MetricsSampled("e0", rig.clock.now, page))
    assert rig.told == []


def test_more_that_wait_are_no_progress() -> None:
    rig = Rig()
    rig.warm()
    rig.hung.add("e0")
    for number in range(15):
        rig.send()
        rig.pages["e0"] = replace(rig.pages["e0"], waiting=float(number))
        rig.step()
    assert rig.suspicion("e0") == OUT_OF_USE


def test_what_clients_give_up_is_no_progress() -> None:
    """An engine's front forgets requests whose clients left, while the engine hangs."""
    rig = Rig()
    rig.warm()
    rig.hang("e0", 2.0)
    page = rig.pages["e0"]
    for number in range(10, 0, -1):
        rig.pages["e0"] = replace(page, running=float(number), kv_usage=0.1 * number * (page.kv_usage or 0.0))
        rig.step()
    assert rig.suspicion("e0") == OUT_OF_USE


def test_where_nothing_is_left_that_could_move_one_request_tries_it_again() -> None:
    rig = Rig()
    rig.warm()
    rig.hang("e0", 5.0)

    def give_up() -> int:
        """Its requests go elsewhere, or their clients leave."""
        there = [number for _, number, name in rig.running if name == "e0"]
        for number in there:
            rig.feed(ResponseEnded(request_id=number, status=0, client_gone=True))
        rig.running = [entry for entry in rig.running if entry[2] != "e0"]
        rig.pages["e0"] = replace(rig.pages["e0"], running=0.0, kv_usage=0.0)
        return len(there)

    give_up()
    met = []
    for _ in range(3):
        for _ in range(35):
            rig.send()
            rig.step()
        met.append(give_up())
    assert met == [1, 1, 1]
    rig.hung.clear()
    for _ in range(60):
        rig.send()
        rig.step()
    assert rig.suspicion("e0") == WELL


def test_an_endpoint_that_waits_for_a_test_is_suspect_to_all_who_look() -> None:
    rig = Rig()
    rig.warm()
    rig.hang("e0", 5.0)
    for end, number, name in list(rig.running):
        if name == "e0":
            rig.running.remove((end, number, name))
            rig.feed(StreamLost(number))
    rig.pages["e0"] = replace(rig.pages["e0"], running=0.0, kv_usage=0.0)
    watch = Watch(rig.fleet, rig.clock.time)
    for _ in range(300):  # nobody sends a request
        rig.step()
        assert watch.endpoints()[0].suspicion != "well"
    assert rig.send().endpoint.id == "e0", "an ordinary candidate, and an idle endpoint"
    assert rig.send().endpoint.id == "e1", "one request is enough as a test"
    for record in rig.told:
        watch.on_stall(record)
    counts = {key: child.value for key, child in watch.metrics.families.stalls.children.items()}
    assert counts == {("e0", "suspect"): 1, ("e0", "out"): 1}
    rig.hung.clear()
    rig.step()
    rig.step()
    assert (rig.suspicion("e0"), rig.told[-1].level) == (WELL, "well")


def test_an_endpoint_that_nobody_tests_for_a_minute_is_no_longer_suspect() -> None:
    rig = Rig()
    rig.warm()
    rig.hang("e0", 5.0)
    for end, number, name in list(rig.running):
        if name == "e0":
            rig.running.remove((end, number, name))
            rig.feed(StreamLost(number))
    rig.pages["e0"] = replace(rig.pages["e0"], running=0.0, kv_usage=0.0)
    begun = rig.clock.time()
    while rig.suspicion("e0") != WELL:
        rig.step()
        assert rig.clock.time() < begun + 2 * FORGOTTEN_S
    assert rig.clock.time() > begun + FORGOTTEN_S
    assert (rig.told[-1].level, rig.told[-1].silent_s) == ("well", 0.0)


# ---- requests that the page does not show ----


def idle(rig: Rig) -> None:
    for _ in range(5):
        rig.step()
    assert not rig.running


def seconds_until(rig: Rig, happened: Callable[[], bool], limit: float = 150.0) -> float:
    begun = rig.clock.now
    while not happened():
        rig.step()
        assert rig.clock.now < begun + limit
    return rig.clock.now - begun


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_request_that_a_hung_engine_has_not_taken_is_kept_and_keeps_it_suspect(stream: bool) -> None:
    rig = Rig(1)
    rig.warm()
    idle(rig)
    rig.hung.add("e0")
    rig.send(stream=stream)
    seconds_until(rig, lambda: rig.suspicion("e0") == OUT_OF_USE, 5.0)
    for _ in range(1000):
        rig.step()
        assert len(rig.fleet.ledger) == 1
        assert level_name(rig.suspicion("e0")) != "well"
    rig.hung.clear()
    rig.step()
    assert (rig.suspicion("e0"), len(rig.fleet.ledger)) == (WELL, 0)


def test_beside_a_request_that_it_has_not_taken_a_hung_engine_is_tested() -> None:
    rig = Rig()
    rig.warm()
    idle(rig)
    rig.hung = set(rig.names)
    held = rig.send().endpoint.id
    rig.hung = {held}
    met, begun = list[float](), rig.clock.now
    while rig.clock.now < begun + 120.0:
        if rig.send().endpoint.id == held:
            met.append(rig.clock.now - begun)
        rig.step()
    assert met[0] < 2.0
    tests = [at for at in met if at > 5.0]
    assert 8.0 < tests[0] < 10.0, "it may have been the server's front that held the first ones"
    assert all(later - earlier > IDLE_SECONDS_PENDING for earlier, later in pairwise(tests))
    rig.hung.clear()
    rig.step()
    assert (rig.suspicion(held), len(rig.fleet.ledger)) == (WELL, 0)


def lose_the_end(rig: Rig) -> None:
    """Of a new request, which the server ends at once."""
    rig.send()
    rig.running.clear()


def test_a_lost_end_is_found_by_the_first_request_that_makes_progress() -> None:
    rig = Rig(1)
    rig.warm()
    idle(rig)
    lose_the_end(rig)
    seconds_until(rig, lambda: rig.suspicion("e0") == TRIED, 10.0)
    rig.send(took=SCRAPE)
    seconds_until(rig, lambda: rig.suspicion("e0") == WELL, 1.0)
    rig.told.clear()
    seconds_until(rig, lambda: len(rig.fleet.ledger) == 0, IDLE_SECONDS_PENDING + IDLE_SECONDS)
    assert not rig.told


def test_a_lost_end_before_the_last_progress_accuses_nobody() -> None:
    """The engine has computed what came later, and its page shows nothing: it does not have the request."""
    rig = Rig(1)
    rig.warm()
    idle(rig)
    rig.send(took=4.0)
    lost = rig.running.pop()
    rig.send(took=4.0)
    assert lost not in rig.running
    seconds_until(rig, lambda: len(rig.fleet.ledger) == 1, 5.0)
    seconds_until(rig, lambda: len(rig.fleet.ledger) == 0, 36.0)
    assert not rig.told


def test_an_engine_that_restarts_holds_no_request_of_its_time_before() -> None:
    """Its connections broke, and nobody was told."""
    rig = Rig(1)
    rig.warm()
    idle(rig)
    rig.hung.add("e0")
    rig.send()
    for _ in range(200):
        rig.step()
    assert len(rig.fleet.ledger) == 1
    rig.running.clear()
    rig.hung.clear()
    rig.tokens["e0"] = 0.0
    rig.step()
    assert rig.suspicion("e0") == WELL
    rig.told.clear()
    seconds_until(rig, lambda: len(rig.fleet.ledger) == 0, IDLE_SECONDS_PENDING + IDLE_SECONDS)
    assert not rig.told


def test_the_end_of_a_request_that_an_engine_held_may_come_late_when_it_goes_on() -> None:
    """Gateways report ends once a second; the page may show earlier that the engine went on."""
    rig = Rig(1)
    rig.warm()
    idle(rig)
    rig.hung.add("e0")
    rig.send(stream=False)
    for _ in range(200):
        rig.step()
    rig.pages["e0"] = replace(rig.pages["e0"], generation_tokens=9e9)
    for _ in range(10):
        rig.step()
    assert (rig.suspicion("e0"), len(rig.fleet.ledger)) == (WELL, 1)
    (ended,) = (i for i in rig.feed(ResponseEnded(request_id=rig.number, status=200)) if isinstance(i, Record))
    assert isinstance(ended, OutcomeRecord)
    assert ended.cause == "natural"


def test_a_hung_server_that_computes_prompts_is_found_and_not_its_decoder() -> None:
    """Its page shows no request that it has not taken, as if the prompt were computed and handed over."""
    fleet = Fleet()
    names = {"prefill": 0.0, "decode": 0.0}
    for number, name in enumerate(names):
        fleet.up(Endpoint(id=name, address=f"10.0.0.{number}:80"))
    now = 100.0

    def step(**tokens: float) -> None:
        nonlocal now
        now += SCRAPE
        names.update(tokens)
        for name, counted in names.items():
            page = Sample(waiting=0.0, running=0.0, kv_usage=0.0, generation_tokens=counted)
            assert fleet.sampled(name, now - 0.01, now, page) == []
        fleet.stalls.timed(now)
        fleet.ledger.validate()

    def send(number: int) -> Lease:
        request = Request(id=number, arrived=now, prompt_tokens=2000, stream=True)
        return fleet.charge_pair(request, 1, 0, now, 0, 100.0)

    step()
    lease = send(1)
    step(prefill=1.0)
    for _ in range(2):
        step()
    assert lease.prefill is not None
    assert not lease.prefill.held, "handed over"
    step(decode=5.0)
    fleet.first_token(lease, now)
    fleet.ledger.release(lease)
    lease = send(2)
    reached, begun = set[tuple[float, float]](), now
    while now < begun + 60.0:
        step()
        reached.add((float(fleet.table.suspicion[0]), float(fleet.table.suspicion[1])))
    assert reached == {(WELL, WELL), (SUSPECT, WELL), (OUT_OF_USE, WELL), (TRIED, WELL)}
    step(prefill=2.0)
    fleet.first_token(lease, now)
    fleet.ledger.release(lease)
    assert (fleet.table.suspicion[0], len(fleet.ledger)) == (WELL, 0)


# ---- when an answer is overdue ----


def test_how_long_an_answer_may_take() -> None:
    fleet = Fleet()
    fleet.up(Endpoint(id="e0", address="a:1"))
    stream = fleet.charge(Request(id=1, arrived=0.0, prompt_tokens=300, stream=True), 0, 0.0, 0, 100.0)
    whole = fleet.charge(Request(id=2, arrived=0.0, prompt_tokens=300), 0, 0.0, 0, 100.0)
    limited = fleet.charge(Request(id=3, arrived=0.0, prompt_tokens=300, max_tokens=4000), 0, 0.0, 0, 100.0)
    long = fleet.charge(Request(id=4, arrived=0.0, prompt_tokens=200_000, stream=True), 0, 0.0, 0, 100.0)
    assert overdue_s(stream, True) == 4.0
    assert overdue_s(whole, False) > 10.0
    assert overdue_s(limited, False) > overdue_s(whole, False) + 20.0
    assert overdue_s(long, True) == pytest.approx(3.0 * long.forecast.known_high_ms * 1e-3)
    long.forecast = Forecast()
    assert overdue_s(long, True) == inf, "nobody can say"


def test_hedges_in_vain_make_the_gateway_wait_longer() -> None:
    rig = Rig()
    rig.warm(1.0)
    first = rig.send().hedge_after_ms
    assert 4000.0 <= first < 6000.0
    for _ in range(20):
        route = rig.send()
        rig.feed(RequestMoved(rig.number, route.endpoint.address))
    assert rig.send().hedge_after_ms > 0.9 * first * MOST, "and what waits there counts as well"
    for _ in range(700):
        rig.send()
        rig.step()
    assert 4000.0 <= rig.send().hedge_after_ms <= 1.3 * first


def test_a_request_to_a_suspect_endpoint_is_not_hedged_later() -> None:
    rig = Rig()
    rig.warm(1.0)
    usual = rig.send().hedge_after_ms
    rig.fleet.stalls.caution = MOST
    assert rig.send().hedge_after_ms > 0.9 * usual * MOST
    for slot in range(2):
        rig.fleet.table.set_suspicion(slot, SUSPECT)
    assert rig.send().hedge_after_ms < 1.3 * usual


@pytest.mark.parametrize(
    ("api", "may"),
    [("chat", True), ("responses", True), ("responses_stored", False), ("conversations", False), ("other", False)],
)
def test_what_may_be_sent_twice(api: str, may: bool) -> None:
    assert Rig().send(api=api).repeatable is may


def test_a_page_that_stands_still_while_first_tokens_come_says_nothing() -> None:
    rig = Rig()
    rig.warm()
    frozen = dict(rig.pages)
    for _ in range(60):
        rig.send(took=rig.number % 7 * 0.4)
        rig.step(scraped=False)
        for name, page in frozen.items():
            rig.feed(MetricsSampled(name, rig.clock.now - 0.01, page))
        assert [rig.suspicion(name) for name in rig.names] == [WELL, WELL]


def refused(rig: Rig, seconds: float) -> None:
    """Clients whose requests are refused at once, always three at a time: they never generate anything."""
    open_: list[int] = []
    for _ in range(round(seconds / SCRAPE)):
        while len(open_) < 6:
            open_.append(rig.send(took=inf).request_id)
        rig.step()
        for number in open_[:3]:
            rig.feed(ResponseEnded(request_id=number, status=400))
            rig.running = [each for each in rig.running if each[1] != number]
        del open_[:3]
    for number in open_:
        rig.feed(ResponseEnded(request_id=number, status=400))
    rig.running.clear()


def test_requests_that_a_server_refuses_are_no_hang() -> None:
    rig = Rig()
    rig.warm()
    before = len(rig.told)
    rig.shown = False
    refused(rig, 20.0)
    assert rig.told[before:] == []


def held_by_its_front(rig: Rig, seconds: float, **fields: Any) -> None:
    """Six requests that the servers hold without any work on their pages."""
    idle(rig)
    rig.shown = False
    rig.hung |= {"e0", "e1"}
    for _ in range(6):
        rig.send(**fields)
    for _ in range(round(seconds / SCRAPE)):
        rig.step()


def test_a_server_that_downloads_images_does_not_hang() -> None:
    rig = Rig()
    rig.warm()
    held_by_its_front(rig, 9.0, media=1, stream=False)
    assert rig.told == []


def test_a_hang_is_noticed_though_all_requests_have_images_and_the_page_shows_nothing() -> None:
    rig = Rig()
    rig.warm()
    held_by_its_front(rig, 14.0, media=1, stream=False)
    assert rig.suspicion("e0") == rig.suspicion("e1") == OUT_OF_USE


def test_a_hang_of_chats_is_noticed_beside_images_that_are_downloaded() -> None:
    rig = Rig()
    rig.warm()
    held_by_its_front(rig, 1.0, media=1, stream=False)
    rig.send()
    for _ in range(25):
        rig.step()
    assert [record.level for record in rig.told] == ["suspect", "out"]


def test_a_server_whose_front_holds_requests_is_soon_tested_and_well() -> None:
    rig = Rig()
    rig.warm()
    held_by_its_front(rig, 4.0, stream=False, took=60.0)
    assert rig.suspicion("e0") == OUT_OF_USE
    rig.hung.clear()
    for _ in range(30):
        rig.send()
        rig.step()
    assert rig.suspicion("e0") == rig.suspicion("e1") == WELL
    assert len(rig.running) >= 6
    rig.told.clear()
    for _ in range(40):
        rig.step()
    assert not rig.told


@pytest.mark.parametrize("hangs", [False, True])
def test_what_the_engine_has_overtaken_is_no_work_but_what_came_later_is(hangs: bool) -> None:
    """A front holds a request for long, for example to call a tool. Chats after it end well, and then none come."""
    rig = Rig(1)
    rig.warm()
    rig.shown = False
    held = rig.send(took=60.0, stream=False)
    for _ in range(20):
        rig.send()
        rig.step()
    rig.step()
    assert [number for _, number, _ in rig.running] == [held.request_id]
    rig.told.clear()
    if hangs:
        rig.hung.add("e0")
        rig.send()
    for _ in range(20):
        rig.step()
    assert [record.level for record in rig.told] == (["suspect", "out"] if hangs else [])


def test_a_hang_is_noticed_beside_requests_that_are_refused() -> None:
    rig = Rig()
    rig.warm()
    rig.shown = False
    rig.hung |= {"e0", "e1"}
    stuck = [rig.send() for _ in range(4)]
    refused(rig, 4.0)
    assert {rig.suspicion(route.endpoint.id) for route in stuck} == {OUT_OF_USE}


@pytest.mark.parametrize("lost", [False, True], ids=["client gone", "stream lost"])
def test_a_hang_is_noticed_though_clients_give_up_soon_and_the_page_shows_nothing(lost: bool) -> None:
    """The engine hung while it was idle, behind a front that answers for it."""
    rig = Rig()
    rig.warm()
    rig.shown = False
    rig.hung.add("e0")
    for _ in range(40):
        for _ in range(4):
            rig.send()
        rig.step()
        for began, number, name in list(rig.running):
            if name == "e0" and began - 0.3 + 1.0 <= rig.clock.now:
                rig.running.remove((began, number, name))
                ended = ResponseEnded(request_id=number, status=0, client_gone=True)
                rig.feed(StreamLost(number) if lost else ended)
    assert rig.suspicion("e0") >= SUSPECT


def test_an_endpoint_that_was_out_is_tried_again_beside_requests_that_are_refused() -> None:
    rig = Rig(servers=1)
    rig.warm()
    rig.hang("e0", 6.0)
    assert rig.suspicion("e0") == OUT_OF_USE
    rig.hung.clear()
    for _, number, _ in list(rig.running):
        rig.feed(ResponseEnded(request_id=number, status=503))
    rig.running.clear()
    rig.shown = False
    refused(rig, 8.0)
    assert rig.suspicion("e0") < OUT_OF_USE


def test_a_hang_is_logged_when_it_begins_and_ends_however_often_the_endpoint_is_tried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig()
    rig.warm()
    for _ in range(8):
        rig.hang("e0", 8.0, scraped=False)
        for end, number, name in list(rig.running):
            if name == "e0":
                rig.running.remove((end, number, name))
                rig.feed(StreamLost(number))
    rig.hang("e0", 0.4)
    rig.hung.clear()
    while rig.suspicion("e0") or rig.told[-1].tried:
        rig.send()
        rig.step()
    assert sum(record.tried for record in rig.told) > 3
    watch = Watch(rig.fleet, rig.clock.time)
    with caplog.at_level("INFO", "fairlead"):
        for record in rig.told:
            watch.on_stall(record)
    assert [record.message for record in caplog.records] == [
        "an endpoint seems to hang: suspect",
        "an endpoint seems to hang: out",
        "an endpoint makes progress again",
    ]


def behind_a_gateway(lives: bool, hang: str = "") -> Rig:
    """No answer passes the gateway for 10 s, although the engines have computed all; or `hang` has not."""
    rig = Rig()
    for _ in range(50):
        rig.feed(GatewayAnswered())
        rig.warm(SCRAPE)
    assert not rig.told
    if hang:
        rig.hung.add(hang)
    sent = [rig.send().request_id for _ in range(4)]
    rig.step()
    rig.running = [each for each in rig.running if each[2] == hang]
    for _ in range(50):
        if lives:
            rig.feed(GatewayAnswered())
        rig.step()
    leases = [entry.lease for number in sent if (entry := rig.pipeline.requests.get(number))]
    assert all(lease and rig.fleet.stalls.was_out(lease) for lease in leases), "such times teach nothing"
    return rig


def test_the_silence_of_a_gateway_that_stands_still_accuses_nobody() -> None:
    rig = behind_a_gateway(lives=False)
    rig.feed(GatewayAnswered())
    rig.step()
    assert not rig.told
    rig.hung.add("e0")
    for _ in range(30):
        rig.feed(GatewayAnswered())
        rig.send()
        rig.step()
    assert [record.level for record in rig.told] == ["suspect", "out"], "from then on silence counts as ever"


def test_answers_that_a_living_gateway_does_not_get_are_the_servers() -> None:
    assert {record.endpoint for record in behind_a_gateway(lives=True).told} == {"e0", "e1"}


def test_a_page_tells_of_a_hang_while_the_gateway_stands_still() -> None:
    rig = behind_a_gateway(lives=False, hang="e0")
    assert [(record.endpoint, record.level) for record in rig.told] == [("e0", "suspect"), ("e0", "out")]


def test_a_page_tells_of_a_hang_however_slowly_the_gateway_answers() -> None:
    """Each gap between two of its answers is a standstill, which excuses only those whose silence it may explain."""
    rig = Rig()
    rig.warm()
    rig.hung.add("e0")
    for step in range(60):
        if step % 7 == 0:
            rig.feed(GatewayAnswered())
        rig.send()
        rig.step()
    assert [(record.endpoint, record.level) for record in rig.told] == [("e0", "suspect"), ("e0", "out")]


def test_a_look_at_a_silent_pool_is_split() -> None:
    fleet, now, servers = Fleet(), 100.0, 2 * SILENT + 10
    for number in range(servers):
        fleet.up(Endpoint(f"e{number}", f"10.0.0.{number}:80"))
        fleet.charge(Request(id=number, arrived=now, prompt_tokens=10, stream=True), number, now, 0, 10.0)
        fleet.stalls.moved(number, now)
    now += 60.0
    levels = []
    for _ in range(3):
        assert fleet.stalls.due < now
        fleet.stalls.look(now)
        levels.append(len(fleet.stalls.take_changes()))
    assert levels == [SILENT, SILENT, 10]
    assert fleet.stalls.due == now + LOOK_S
    assert set(fleet.table.suspicion.tolist()) == {OUT_OF_USE}
    for number in range(servers):
        fleet.stalls.moved(number, now)
    assert len(fleet.stalls.take_changes()) == servers
    fleet.stalls.look(now)
    assert fleet.stalls.due == now + LOOK_S and not fleet.stalls.changes
