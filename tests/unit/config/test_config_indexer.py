"""`kvEvents.indexer`, and the parameter of the documents that stands for it."""

import pytest

from fairlead.compat.load import load, problems
from fairlead.compat.show import effective
from fairlead.config.reload import plan_reload
from fairlead.config.yaml import parse_yaml

ONE = "endpoints: ['127.0.0.1:8000']\n"
SCORER = ONE + "scorers: [{type: prefix-aware, cacheIndexerURL: 'http://kv-cache-indexer:9090'}]\n"


def test_defaults_and_values() -> None:
    assert load(ONE).kv_events.indexer.url == ""
    found = load(ONE + "kvEvents: {enabled: true, indexer: {url: 'https://i:9090/x', budget: 2ms}}").kv_events.indexer
    assert (found.url, found.budget, found.warm_from) == ("https://i:9090/x", 0.002, "")


@pytest.mark.parametrize(
    ("section", "path", "said"),
    [
        ("{indexer: {url: 'http://i:9090'}}", "$.kvEvents.indexer.url", "set enabled: true"),
        ("{enabled: true, indexer: {url: 'i:9090'}}", "$.kvEvents.indexer.url", "http://host:port"),
        ("{enabled: true, indexer: {url: 'http://:9090'}}", "$.kvEvents.indexer.url", "http://host:port"),
        ("{enabled: true, indexer: {url: 'http://i:99999'}}", "$.kvEvents.indexer.url", "http://host:port"),
        ("{enabled: true, indexer: {url: 'ftp://i:9'}}", "$.kvEvents.indexer.url", "http://host:port"),
        ("{enabled: true, indexer: {warmFrom: 'nowhere'}}", "$.kvEvents.indexer.warmFrom", "http://host:port"),
        ("{enabled: true, indexer: {url: 'http://i:9', budget: 0s}}", "$.kvEvents.indexer.budget", ""),
        ("{enabled: true, port: 5557, indexer: {url: 'http://i:9'}}", "$.kvEvents.port", "leave out"),
        ("{enabled: true, bind: 'tcp://*:5', indexer: {url: 'http://i:9'}}", "$.kvEvents.bind", "leave out"),
        ("{enabled: true, snapshot: x, indexer: {url: 'http://i:9'}}", "$.kvEvents.snapshot", "leave out"),
        (
            "{enabled: true, indexer: {url: 'http://i:9', warmFrom: 'http://j:9'}}",
            "$.kvEvents.indexer.warmFrom",
            "leave out",
        ),
    ],
)
def test_what_cannot_be_is_said(section: str, path: str, said: str) -> None:
    (found,) = problems(f"{ONE}kvEvents: {section}")
    assert found.path == path
    assert said in str(found)


def test_the_documents_parameter_stands_for_it() -> None:
    config = load(SCORER)
    assert (config.kv_events.enabled, config.kv_events.indexer.url) == (True, "http://kv-cache-indexer:9090")
    assert config.notes == ()
    shown = {value.path: value.origin for value in effective(config, parse_yaml(SCORER.encode()))}
    assert shown["$.kvEvents.indexer.url"] == shown["$.kvEvents.enabled"] == "cacheIndexerURL"
    assert shown["$.kvEvents.indexer.budget"] == "default"


def test_who_listens_itself_does_not_ask() -> None:
    config = load(SCORER + "kvEvents: {enabled: true, bind: 'tcp://*:5555'}")
    assert config.kv_events.indexer.url == ""
    (note,) = config.notes
    assert "cacheIndexerURL is not asked" in note.message
    same = load(SCORER + "kvEvents: {enabled: true, indexer: {url: 'http://kv-cache-indexer:9090', budget: 1ms}}")
    assert (same.notes, same.kv_events.indexer.budget) == ((), 0.001)


def test_two_different_ones_or_nonsense_are_refused() -> None:
    two = "{type: prefix-aware, name: b, cacheIndexerURL: 'http://other:9090'}"
    for text in (
        SCORER.replace("]\n", f", {two}]\n", 2).replace(f", {two}]\n", "]\n", 1),
        SCORER.replace("http:", "x:"),
    ):
        (found,) = problems(text)
        assert "cacheIndexerURL: expected one http://host:port" in found.message


def test_it_does_not_change_while_running() -> None:
    _, refused = plan_reload(load(ONE), load(SCORER))
    assert {problem.path for problem in refused} >= {"$.kvEvents.enabled", "$.kvEvents.indexer.url"}
