"""`scheduler`, `canary` and `shadows` of a configuration."""

import jsonschema
import pytest

from fairlead.compat.json_schema import json_schema
from fairlead.compat.load import load, problems
from fairlead.compat.show import effective
from fairlead.config.building import build_entry
from fairlead.config.reload import plan_reload
from fairlead.config.yaml import parse

WHOLE = """
endpoints: [10.0.0.1:80]
scheduler:
  {address: "unix:/run/s.sock", budget: 3ms, tls: {verify: false}, breaker: {failures: 2, cooldown: 500ms}}
canary: {policy: lpwl, percent: 2.5}
shadows:
  sample: 0.5
  cpu: 0.1
  limit: 50ms
  policies:
    - policy: power-of-two
    - {name: mine, policy: {type: cost-model, parameters: {decode: 0}}}
    - {name: far, scheduler: {address: "127.0.0.1:9100"}}
"""


def test_all_of_it_is_read() -> None:
    config = load(WHOLE)
    scheduler = config.scheduler
    assert (scheduler.address, scheduler.budget, scheduler.breaker.failures) == ("unix:/run/s.sock", 0.003, 2)
    assert scheduler.tls is not None and not scheduler.tls.verify
    assert (config.canary.policy, config.canary.percent) == ("lpwl", 2.5)
    assert [one.label for one in config.shadows.policies] == ["power-of-two", "mine", "far"]
    assert (config.shadows.sample, config.shadows.cpu, config.shadows.limit) == (0.5, 0.1, 0.05)
    assert build_entry(config.shadows.policies[1].policy, config).name == "cost-model"


def test_by_default_there_is_none_of_it() -> None:
    config = load("endpoints: [10.0.0.1:80]")
    assert (config.scheduler.address, config.canary.percent, config.shadows.policies) == ("", 0.0, ())


@pytest.mark.parametrize(
    ("text", "where", "said"),
    [
        ("scheduler: {address: somewhere}", "$.scheduler", "neither host:port nor unix:/path"),
        ("scheduler: {address: 'h:99999'}", "$.scheduler", "neither"),
        ("scheduler: {address: 'h:1', budget: 20s}", "$.scheduler", "above 10s"),
        ("scheduler: {address: 'h:1', budget: 1s}", "$.scheduler.budget", "above 0.4s: the embedded gateway"),
        ("canary: {scheduler: {address: 'h:1', budget: 1s}, percent: 5}", "$.canary.scheduler.budget", "above 0.4s"),
        ("scheduler: {adress: 'h:1'}", "$.scheduler.adress", "address"),
        ("scheduler: {address: 'h:1', breaker: {failures: 0}}", "$.scheduler.breaker.failures", "1"),
        ("canary: {percent: 5}", "$.canary", "give policy: or scheduler:"),
        ("canary: {policy: lpwl, percent: 101}", "$.canary.percent", "100"),
        ("canary: {policy: lpwll, percent: 5}", "$.canary.policy", "did you mean 'lpwl'"),
        ("canary: {scheduler: {budget: 1ms}, percent: 5}", "$.canary", "address"),
        ("shadows: {policies: [{}]}", "$.shadows.policies[0]", "give policy: or scheduler:"),
        ("shadows: {policies: [{scheduler: {address: 'h:1'}}]}", "$.shadows.policies[0]", "needs a name"),
        ("shadows: {policies: [{policy: lpwl, scheduler: {address: 'h:1'}}]}", "$.shadows.policies[0]", "not both"),
        ("shadows: {policies: [{policy: lpwl}, {policy: lpwl}]}", "$.shadows", "another name"),
        ("shadows: {policies: [{policy: {type: cost-model, decod: 0}}]}", "$.shadows.policies[0].policy", "decode"),
        ("shadows: {cpu: 0}", "$.shadows.cpu", "0"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, where: str, said: str) -> None:
    found = problems(f"endpoints: [10.0.0.1:80]\n{text}\n")
    assert any(problem.path.startswith(where) and said in str(problem) for problem in found), [*map(str, found)]


def test_a_gateway_of_your_own_may_wait_longer() -> None:
    text = "endpoints: [10.0.0.1:80]\ngateway: none\nscheduler: {address: 'h:1', budget: 1s}\n"
    assert load(text).scheduler.budget == 1.0


def test_editors_know_it() -> None:
    schema = json_schema()
    jsonschema.validate(parse(WHOLE).value, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"scheduler": {"adress": "h:1"}}, schema)


def test_it_is_shown() -> None:
    shown = {value.path: value.value for value in effective(load(WHOLE), parse(WHOLE).tree)}
    assert shown["$.scheduler.address"] == "unix:/run/s.sock" and shown["$.scheduler.breaker.failures"] == 2
    assert shown["$.canary.percent"] == 2.5


def test_changes_apply_while_it_runs() -> None:
    plain = load("endpoints: [10.0.0.1:80]")
    changes, refused = plan_reload(plain, load(WHOLE))
    # Flow control was implied, and is not with a scheduler.
    assert refused == []
    assert {path.split(".")[1] for path in changes.paths} == {"scheduler", "canary", "shadows", "flowControl"}
    assert changes.config.scheduler.address == "unix:/run/s.sock"
