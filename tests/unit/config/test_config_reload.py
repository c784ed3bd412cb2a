"""Which changes of a configuration apply while it runs."""

import pytest

from fairlead.compat.load import load
from fairlead.config.plugins import CUTS, build_hasher
from fairlead.config.reload import Changes, plan_reload
from fairlead.config.schema import Config

BASE = "endpoints: ['10.0.0.1:1']\nscorers: [{type: load-aware, weight: 2}, {type: prefix-aware}]\n"


def plan(old: str, new: str) -> tuple[Changes, list[str]]:
    changes, refused = plan_reload(load(old), load(new))
    return changes, [problem.path for problem in refused]


def strip(config: Config) -> object:
    return (
        config.gateway, config.ext_proc, config.admin, config.metrics, config.seed, config.ledger, config.parsing,
        config.endpoints, [(spec.type, spec.weight) for spec in config.policy.scorers],
    )  # fmt: skip


def test_weights_apply() -> None:
    changes, refused = plan(BASE, BASE.replace("weight: 2", "weight: 7"))
    assert (changes.paths, changes.endpoints, refused) == (("$.policy",), False, [])
    assert changes.config.policy.scorers[0].weight == 7


def test_moving_things_about_changes_nothing() -> None:
    moved = "# a comment\n" + "\n".join(reversed(BASE.splitlines())) + "\nlog: {}\n"
    changes, refused = plan(BASE, moved)
    assert (changes.paths, refused) == ((), [])
    same, _ = plan(BASE, BASE.replace("weight: 2", "parameters: {}, weight: 2.0"))
    assert same.paths == ()


def test_limits_logs_and_listed_endpoints_apply() -> None:
    new = BASE.replace("['10.0.0.1:1']", "['10.0.0.1:1', '10.0.0.2:1']")
    new += "ledger: {leaseTtl: 1m}\nparsing: {maxBodyBytes: 1MiB}\ninspect: {usageSampling: 0.5}\nlog: {level: debug}\n"
    changes, refused = plan(BASE, new)
    assert changes.paths == (
        "$.endpoints", "$.ledger.leaseTtl", "$.parsing.maxBodyBytes", "$.inspect.usageSampling", "$.log.level",
    )  # fmt: skip
    assert (changes.endpoints, refused) == (True, [])
    assert changes.config.ledger.lease_ttl == 60.0
    assert len(changes.config.endpoints.static) == 2


def test_what_was_opened_with_it_is_refused_and_the_rest_applies() -> None:
    new = BASE.replace("weight: 2", "weight: 3")
    new += "gateway: {port: 8081}\nextProc: {port: 9100}\nadmin: {debug: false}\nmetrics: {interval: 1s}\nseed: 4\n"
    changes, refused = plan(BASE, new)
    assert refused == [
        "$.gateway.port", "$.extProc.port", "$.metrics.interval", "$.admin.debug", "$.seed",
    ]  # fmt: skip
    assert changes.paths == ("$.policy",)
    expected = load(BASE.replace("weight: 2", "weight: 3"))
    assert strip(changes.config) == strip(expected)


def test_a_port_of_the_access_log_is_refused_where_one_is_given() -> None:
    assert plan(BASE, BASE + "als: {port: 9101}\nextProc: {port: 9100}\n")[1] == ["$.extProc.port", "$.als.port"]


def test_refusals_say_why_and_what_to_do() -> None:
    _, (problem,) = plan_reload(load(BASE), load(BASE + "admin: {port: 9999}"))
    assert str(problem) == (
        "$.admin.port: does not apply while running: its port is open already (restart to apply it)"
    )


LISTED, FROM_POOL = "endpoints: ['10.0.0.1:80']", "kubernetes: {pool: a}"


@pytest.mark.parametrize("contents", [(LISTED, FROM_POOL), (FROM_POOL, LISTED)])
def test_endpoints_stay_while_another_source_of_them_needs_a_restart(contents: tuple[str, str]) -> None:
    old, new = contents
    changes, refused = plan(old, new + "\npolicy: round-robin")
    assert not changes.endpoints and {*changes.paths} == {"$.policy", "$.flowControl"}
    assert changes.config.endpoints == load(old).endpoints
    assert {"$.endpoints", "$.kubernetes.pool"} <= set(refused)


def test_larger_bodies_need_a_restart_smaller_ones_do_not() -> None:
    small, large = BASE + "parsing: {maxBodyBytes: 1MiB}\n", BASE + "parsing: {maxBodyBytes: 2MiB}\n"
    assert plan(large, small)[1] == []
    changes, refused = plan(small, large)
    assert (refused, changes.paths) == (["$.parsing.maxBodyBytes"], ())
    assert changes.config.parsing.max_body_bytes == 1 << 20


def test_all_processes_beside_an_embedded_gateway_write_one_format() -> None:
    """The lines of its parent tell of outages."""
    new = BASE + "log: {format: json, level: debug}\n"
    changes, refused = plan(BASE, new)
    assert (refused, changes.paths, changes.config.log.format) == (["$.log.format"], ("$.log.level",), "logfmt")
    changes, refused = plan("gateway: none\n" + BASE, "gateway: none\n" + new)
    assert (refused, changes.paths) == ([], ("$.log.level", "$.log.format"))


def test_recognising_conversations_needs_a_restart() -> None:
    changes, refused = plan(BASE, BASE + "parsing: {conversations: false, maxBodyBytes: 1MiB}\n")
    assert (refused, changes.paths) == (["$.parsing.conversations"], ("$.parsing.maxBodyBytes",))
    assert changes.config.parsing.conversations


def test_a_finer_block_size_is_refused_but_the_weights_beside_it_apply() -> None:
    changes, refused = plan(
        BASE, BASE.replace("{type: prefix-aware}", "{type: prefix-aware, weight: 1, hashBlockSize: 9}")
    )
    assert (refused, changes.paths) == (["$.policy.hashBlockSize"], ("$.policy",))
    running = changes.config
    assert [(spec.weight, spec.parameters.hash_block_size) for spec in running.policy.scorers[1:]] == [(1.0, 5)]
    finer = BASE.replace("{type: prefix-aware}", "{type: prefix-aware, weight: 1, hashBlockSize: 9}")
    for new, why in ((finer.replace("9", "8"), 1), (finer.replace(", hashBlockSize: 9", ""), 0)):
        changes, problems = plan_reload(running, load(new))
        assert (changes.paths, len(problems)) == ((), why), "the way back is free"


FIVE, NINE, COARSE = (BASE.replace("prefix-aware", f"prefix-aware, hashBlockSize: {size}") for size in (5, 9, 64))
NO_PREFIX, FLOW, BODY = BASE.replace("prefix-aware", "queue"), BASE + "flowControl: ", BASE + "parsing: "


@pytest.mark.parametrize(
    ("contents", "refused"),
    [
        ([BODY + "{maxBodyBytes: 10MiB}", BODY + "{maxBodyBytes: 5MiB}", BODY + "{maxBodyBytes: 8MiB}"], []),
        ([BODY + "{maxBodyBytes: 8MiB}", BODY + "{maxBodyBytes: 5MiB}", BASE], ["$.parsing.maxBodyBytes"]),
        ([FLOW + "{ttl: 5s}", FLOW + "{enabled: false}", FLOW + "{ttl: 6s}"], ["$.flowControl"]),
        ([FLOW + "{ttl: 5s}", FLOW + "{enabled: false}", FLOW + "{ttl: 5s}"], []),
        ([FIVE, NO_PREFIX, NINE], ["$.policy.hashBlockSize"]),
        ([FIVE, NO_PREFIX, FIVE], []),
        ([NO_PREFIX, COARSE, NINE], ["$.policy.hashBlockSize"]),
        ([NO_PREFIX, NINE, NINE], ["$.policy.hashBlockSize"]),
        ([NINE, BASE.partition("scorers")[0] + "policy: round-robin"], []),
        ([BASE, BASE + "seed: 3"], ["$.seed"]),
    ],
)
def test_what_the_file_contained_between_does_not_matter(contents: list[str], refused: list[str]) -> None:
    begun, *later = map(load, contents)
    running = begun
    for new in later:
        changes, problems = plan_reload(running, new, begun)
        running = changes.config
    at_once = plan_reload(begun, new)[0].config
    assert [problem.path for problem in problems] == refused
    assert plan_reload(at_once, running)[0].paths == plan_reload(running, at_once)[0].paths == (), "the same"
    hasher = build_hasher(begun)
    assert build_hasher(running).finest == hasher.finest or not any(s.type == CUTS for s in running.policy.scorers)


def test_files_of_endpoints_are_not_exchanged() -> None:
    file = BASE.replace("['10.0.0.1:1']", "{file: a.yaml}")
    for new in (BASE, file.replace("a.yaml", "b.yaml")):
        changes, refused = plan(file, new)
        assert (refused, changes.endpoints) == (["$.endpoints"], False)
        assert changes.config.endpoints.file == "a.yaml"


def test_another_policy_applies() -> None:
    endpoints = "endpoints: ['10.0.0.1:1']\n"
    changes, refused = plan(endpoints + "policy: random", endpoints + "policy: round-robin")
    assert (changes.paths, refused, changes.config.policy.name) == (("$.policy",), [], "round-robin")


def test_flow_control_is_turned_on_and_off_and_its_queues_stay_as_they_were_made() -> None:
    endpoints = "endpoints: ['10.0.0.1:1']\n"
    on, other, off = "flowControl: {ttl: 5s}", "flowControl: {ttl: 6s}", "flowControl: {enabled: false}"
    for before, after in ((on, off), (off, on), ("", off), (off, "")):
        changes, refused = plan(endpoints + before, endpoints + after)
        assert (changes.paths, refused) == (("$.flowControl",), [])
    for before, after in ((on, other), ("", on), (on, "")):
        changes, refused = plan(endpoints + before, endpoints + after)
        assert (changes.paths, refused) == ((), ["$.flowControl"])


def test_implied_flow_control_follows_the_file() -> None:
    default, splits, other = ("endpoints: ['10.0.0.1:1']\npolicy: " + name for name in (
        "default", "prefill-decode", "round-robin",
    ))  # fmt: skip
    begun = running = load(default)
    for new, paths, on in (
        (splits, ("$.policy", "$.flowControl"), False),
        (other, ("$.policy",), False),
        (default, ("$.policy", "$.flowControl"), True),
        (other, ("$.policy", "$.flowControl"), False),
    ):
        changes, refused = plan_reload(running, load(new), begun)
        assert (set(changes.paths), refused) == (set(paths), [])
        running = changes.config
        assert (running.flow_control is not None) is on
    for elsewhere, paths in (
        ("canary: {percent: 5, policy: prefill-decode}", ("$.canary.policy", "$.canary.percent", "$.flowControl")),
        ("scheduler: {address: 'unix:///tmp/x'}", ("$.scheduler.address", "$.flowControl")),
    ):
        changes, _ = plan_reload(begun, load(f"{default}\n{elsewhere}"))
        assert (set(changes.paths), changes.config.flow_control) == (set(paths), None)
        back, _ = plan_reload(changes.config, begun, begun)
        assert (set(back.paths), back.config.flow_control) == (set(paths), begun.flow_control)
    changes, _ = plan_reload(begun, load(f"{default}\ncanary: {{percent: 5, policy: round-robin}}"))
    assert set(changes.paths) == {"$.canary.policy", "$.canary.percent"}
    changes, _ = plan_reload(load(splits), load(default))
    assert changes.config.flow_control == begun.flow_control
    for before, after in ((default, f"{default}\ngateway: none"), (f"{default}\ngateway: none", default)):
        changes, _ = plan_reload(load(before), load(after))
        assert changes.paths == (), "which gateway runs does not change"


def test_models_of_the_configuration_apply_and_the_place_of_manifests_does_not() -> None:
    listed = "[{name: chat, targets: {a: 90, b: 10}}]"
    changes, refused = plan(
        f"{BASE}models: {listed}\n", BASE + "models: {list: [{name: chat, targets: {a: 1}}], file: m.yaml, pool: p}\n"
    )
    assert (changes.paths, refused) == (("$.models.list",), ["$.models.file", "$.models.pool"])
    models = changes.config.models
    assert (models.list[0].targets, models.file, models.pool) == ({"a": 1}, "", "")
    for more, paths in (("", ()), (", unmatched: pass", ("$.models.unmatched",))):
        changes, refused = plan(f"{BASE}models: {listed}\n", f"{BASE}models: {{list: {listed}{more}}}\n")
        assert (changes.paths, refused) == (paths, [])


def test_every_field_is_decided_upon() -> None:
    """A field that somebody adds is compared: by default it applies, which `Live` must then do."""
    known = {
        "policy", "endpoints", "ledger", "parsing", "inspect", "log", "scheduler", "canary", "shadows",  # apply
        "flow_control", "gateway", "ext_proc", "als", "admin", "metrics", "seed", "metric_sources", "parsers",
        "models", "kubernetes", "headers", "source", "notes", "flags", "kv_events", "tokens", "journal", "tracing",
        "state", "replicas", "autoscaling", "warming", "topology", "pools",
    }  # fmt: skip
    assert {*Config.model_fields} <= known
