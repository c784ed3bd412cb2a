"""The section `kvEvents`."""

from pathlib import Path
from typing import get_args

import pytest

from fairlead.compat.load import load, problems
from fairlead.config.reload import plan_reload
from fairlead.config.schema import KvEvents
from fairlead.core.kv.hashing import ALGORITHMS

ONE = "endpoints: ['10.0.0.1:8000']\n"


def test_it_is_off_unless_asked_for() -> None:
    assert not load(ONE).kv_events.enabled
    assert load(ONE + "kvEvents: {enabled: true}").kv_events.enabled


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("{replayPort: 5558}", "$.kvEvents.replayPort"),
        ("{bind: '*:5555'}", "$.kvEvents.bind"),
        ("{port: 5557, bind: 'tcp://0.0.0.0:5555'}", "$.kvEvents.bind"),
        ("{keys: engine, hashAlgorithm: xxhash}", "$.kvEvents.hashAlgorithm"),
        ("{curve: {publicKeyFile: a, secretKeyFile: b}}", "$.kvEvents.curve"),
        ("{bind: 'tcp://*:5555', curve: {publicKeyFile: a, secretKeyFile: b, serverKey: c}}", "$.kvEvents.curve"),
        ("{hashAlgorithm: md5}", "$.kvEvents.hashAlgorithm"),
        ("{port: 70000}", "$.kvEvents.port"),
        ("{check: 2}", "$.kvEvents.check"),
        ("{maxBlocks: 1}", "$.kvEvents.maxBlocks"),
    ],
)
def test_what_does_not_fit_is_told_where_it_stands(text: str, path: str) -> None:
    assert [problem.path for problem in problems(ONE + f"kvEvents: {text}")] == [path]


@pytest.mark.parametrize(
    ("bind", "note"),
    [
        ("bind: 'tcp://*:5555'", "$.kvEvents.curve.serverKey: has no effect with bind:"),
        ("port: 5557", "$.kvEvents.curve.clientsFile: has no effect without bind:"),
    ],
)
def test_keys_of_the_other_direction_are_noted(bind: str, note: str) -> None:
    curve = "{publicKeyFile: a, secretKeyFile: b, serverKey: c, clientsFile: d}"
    notes = load(ONE + f"kvEvents: {{{bind}, curve: {curve}}}").notes
    assert note in [f"{noted.path}: {noted.message}" for noted in notes]


def test_random_hashes_do_not_matter_to_own_keys() -> None:
    assert problems(ONE + "kvEvents: {hashAlgorithm: xxhash}") == []
    assert problems(ONE + "kvEvents: {keys: engine, hashAlgorithm: xxhash, hashSeed: '0'}") == []


def test_paths_are_relative_to_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "fairlead.yaml"
    curve = "{publicKeyFile: own.pub, secretKeyFile: /keys/own, clientsFile: clients}"
    file.write_text(ONE + f"kvEvents: {{snapshot: index.kv, bind: 'tcp://*:5555', curve: {curve}}}")
    found = load(file).kv_events
    assert found.snapshot == str(tmp_path / "index.kv")
    assert found.curve is not None
    assert found.curve.public_key_file == str(tmp_path / "own.pub")
    assert found.curve.secret_key_file == "/keys/own"
    assert found.curve.clients_file == str(tmp_path / "clients")


def test_a_running_scheduler_keeps_its_own() -> None:
    changes, refused = plan_reload(load(ONE), load(ONE + "kvEvents: {enabled: true}"))
    assert [problem.path for problem in refused] == ["$.kvEvents.enabled"]
    assert not changes.config.kv_events.enabled


def test_every_hash_of_an_engine_can_be_named() -> None:
    assert {*get_args(KvEvents.model_fields["hash_algorithm"].annotation)} == {*ALGORITHMS}
