"""Who wins when several things are said of a model name, and how traffic is split."""

from collections import Counter
from math import inf
from random import Random
from typing import Any

import pytest

from fairlead.core.models import (
    Catalogue,
    InferenceModel,
    InferenceModelRewrite,
    InferenceObjective,
    ModelCard,
    ModelRules,
    ModelSet,
    Origin,
    Refusal,
    Resolution,
    RewriteRule,
    Split,
    Target,
)
from fairlead.core.request import Request

RNG = Random(1)
LENIENT = ModelRules(reject_unmatched=False)


def origin(name: str, created: float = inf, pools: tuple[str, ...] = ()) -> Origin:
    return Origin(namespace="default", name=name, created=created, pools=pools)


def model(name: str, *targets: str | Target, criticality: str = "Standard", created: float = inf) -> InferenceModel:
    listed = tuple(Target(one) if isinstance(one, str) else one for one in targets)
    return InferenceModel(origin=origin(f"m-{name}", created), model=name, targets=listed, criticality=criticality)


def rewrite(name: str, *rules: RewriteRule, created: float = inf) -> InferenceModelRewrite:
    return InferenceModelRewrite(origin=origin(name, created), rules=rules)


def rule(models: str, target: str) -> RewriteRule:
    return RewriteRule(tuple(models.split()), (Target(target),))


def ask(catalogue: Catalogue, model: str = "", **more: Any) -> Resolution | Refusal:
    return catalogue.resolve(Request(id=1, arrived=0.0, api=more.pop("api", "chat"), model=model, **more), RNG)


def target(catalogue: Catalogue, model: str = "", **more: Any) -> str:
    found = ask(catalogue, model, **more)
    assert isinstance(found, Resolution), found
    return found.target


def refused(catalogue: Catalogue, model: str = "", **more: Any) -> tuple[int, str]:
    found = ask(catalogue, model, **more)
    assert isinstance(found, Refusal), found
    return found.status, found.message


def test_nothing_defined_changes_nothing() -> None:
    assert ask(Catalogue(), "m", priority=3) == Resolution("m", 3)
    assert ask(Catalogue(), "") == Resolution("", 0)
    assert ask(Catalogue(), "m", rewrite="t") == Resolution("t", 0)


def test_a_model_without_targets_is_its_own_target() -> None:
    assert target(Catalogue(ModelSet((model("m"),))), "m") == "m"


def test_targets_that_are_not_served_are_told_with_the_name_that_leads_there() -> None:
    models = model("chat", Target("a", 1), Target("gone", 1), Target("never", 0)), model("plain"), model("moved", "a")
    catalogue = Catalogue(ModelSet(models, rewrites=(rewrite("r", rule("moved", "b"), rule("", "c")),)))
    assert catalogue.unserved({"a", "c"}) == [("moved", "b")]  # the rule for every request decides for all others
    catalogue = Catalogue(ModelSet(models))
    assert catalogue.unserved({"a"}) == [("chat", "gone"), ("plain", "plain")]
    catalogue = Catalogue(ModelSet(models, rewrites=(rewrite("r", rule("", "c")),)))
    assert catalogue.unserved({"a"}) == [("*", "c"), ("chat", "c"), ("moved", "c"), ("plain", "c")]


@pytest.mark.parametrize(("criticality", "priority"), [("Critical", 10), ("Standard", 0), ("Sheddable", -10)])
def test_criticality_is_a_priority(criticality: str, priority: int) -> None:
    found = ask(Catalogue(ModelSet((model("m", criticality=criticality),))), "m")
    assert isinstance(found, Resolution)
    assert found.priority == priority


def test_an_unknown_model_is_refused_by_name() -> None:
    catalogue = Catalogue(ModelSet((model("b", "x"), model("a")), rewrites=(rewrite("r", rule("c", "y")),)))
    assert refused(catalogue, "nope") == (404, "The model `nope` does not exist. Known models: a, b, c.")
    status, message = refused(catalogue)
    assert status == 400
    assert message.startswith("model not found in request body")
    # A target is not a name that clients may ask for.
    assert refused(catalogue, "x")[0] == 404


def test_refusals_of_unknown_names_do_not_sort_all_names_again(monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue = Catalogue(ModelSet(models=tuple(model(f"m{number:04}") for number in range(500))))
    names = ", ".join(f"m{number:04}" for number in range(20))
    end = f"does not exist. Known models: {names} and 480 more (see GET /v1/models)."
    assert refused(catalogue, "other") == (404, f"The model `other` {end}")
    looked_at = list[str]()
    monkeypatch.setattr(Catalogue, "is_reserved", lambda _, name: looked_at.append(name))
    assert refused(catalogue, "another") == (404, f"The model `another` {end}")
    assert not looked_at


def test_the_error_names_at_most_twenty_models() -> None:
    catalogue = Catalogue(ModelSet(tuple(model(f"m{i:04}") for i in range(5000))))
    message = refused(catalogue, "nope")[1]
    assert "m0019" in message
    assert "m0020" not in message
    assert "4980 more" in message


def test_strictness_is_a_setting_and_needs_a_model() -> None:
    assert target(Catalogue(ModelSet((model("m"),)), LENIENT), "nope") == "nope"
    assert target(Catalogue(ModelSet((model("m"),)), LENIENT)) == ""
    only_rewrites = Catalogue(ModelSet(rewrites=(rewrite("r", rule("a", "b")),)))
    assert target(only_rewrites, "nope") == "nope"
    assert target(only_rewrites) == ""


def test_a_body_that_nobody_read_passes() -> None:
    objectives = (InferenceObjective(origin=origin("o"), priority=7),)
    catalogue = Catalogue(ModelSet((model("m"),), objectives, (rewrite("r", rule("", "t")),)))
    assert ask(catalogue, api="other", objective="o", rewrite="x") == Resolution("", 7)


def test_a_body_that_could_not_be_read_may_name_anything() -> None:
    catalogue = Catalogue(ModelSet((model("m"),), rewrites=(rewrite("r", rule("a", "b")),)))
    assert refused(catalogue, unread="content-encoding")[0] == 400
    assert target(catalogue, unread="no-body") == ""
    assert refused(catalogue, unread="empty")[0] == 400
    assert target(catalogue, api="models", unread="empty") == ""
    assert refused(catalogue, api="other", unread="path")[0] == 400, "whatever it is, it may name any model"
    assert target(catalogue, api="other", unread="no-body") == target(catalogue, api="other", unread="empty") == ""
    assert target(catalogue, api="conversations") == ""
    assert target(catalogue, api="sglang") == ""
    assert refused(catalogue, "nope", api="sglang")[0] == 404
    generic = Catalogue(ModelSet(rewrites=(rewrite("r", rule("", "b")),)))
    assert target(generic, unread="content-encoding") == ""
    assert target(generic) == "b"


def test_a_header_beats_the_models_targets_and_a_rule_beats_the_header() -> None:
    catalogue = Catalogue(ModelSet((model("m", "t"), model("u")), rewrites=(rewrite("r", rule("c", "d")),)))
    assert target(catalogue, "m") == "t"
    assert target(catalogue, "m", rewrite="u") == "u"
    assert target(catalogue, "c", rewrite="u") == "d"


def test_a_header_opens_no_way_around() -> None:
    catalogue = Catalogue(ModelSet((model("m", "t"), model("n"))))
    assert refused(catalogue, "m", rewrite="secret")[0] == 404
    assert refused(catalogue, "nope", rewrite="t")[0] == 404
    assert target(catalogue, "", rewrite="t") == "t"
    assert target(Catalogue(ModelSet((model("m", "t"),)), LENIENT), "m", rewrite="secret") == "secret"


def test_rules_look_at_the_incoming_name_and_are_not_chained() -> None:
    catalogue = Catalogue(ModelSet((model("a", "b"),), rewrites=(rewrite("r", rule("a", "b"), rule("b", "c")),)))
    assert target(catalogue, "a") == "b"
    only = Catalogue(ModelSet((model("a", "b"),), rewrites=(rewrite("r", rule("b", "c")),)))
    assert target(only, "a") == "b"


def test_exact_beats_generic_then_age_then_place_then_name() -> None:
    def first(*rewrites: InferenceModelRewrite) -> str:
        found = ask(Catalogue(ModelSet(rewrites=rewrites)), "m")
        assert isinstance(found, Resolution)
        return f"{found.target} by {found.rewrite}"

    everything, exact = rule("", "any"), rule("x m", "exact")
    assert first(rewrite("a", everything, created=1), rewrite("b", exact, created=2)) == "exact by default/b"
    assert first(rewrite("a", everything), rewrite("b", exact)) == "exact by default/b"
    old, new = rewrite("z", rule("m", "old"), created=1), rewrite("a", rule("m", "new"), created=2)
    assert first(new, old) == "old by default/z"
    assert first(rewrite("a", rule("m", "1"), rule("m", "2"))) == "1 by default/a"
    assert first(rewrite("b", rule("m", "b")), rewrite("a", rule("m", "a"))) == "a by default/a"
    assert first(rewrite("b", everything, everything), rewrite("a", rule("", "a"))) == "a by default/a"


def test_a_rule_for_everything_matches_an_absent_model() -> None:
    catalogue = Catalogue(ModelSet((model("m"),), rewrites=(rewrite("r", rule("", "t")),)))
    assert target(catalogue) == "t"
    assert target(catalogue, "nope") == "t"


def test_objectives_beat_criticality_and_unknown_ones_change_nothing() -> None:
    objectives = (
        InferenceObjective(origin=origin("o", created=2), priority=-3),
        InferenceObjective(origin=origin("o", created=1), priority=5),
    )
    catalogue = Catalogue(ModelSet((model("m", criticality="Critical"), model("n")), objectives))
    for name, objective, priority in (("m", "o", 5), ("m", "", 10), ("m", "nope", 10), ("n", "nope", 0)):
        found = ask(catalogue, name, objective=objective)
        assert isinstance(found, Resolution)
        assert found.priority == priority


def test_the_oldest_model_of_a_name_counts() -> None:
    newer = InferenceModel(origin=origin("newer", 2), model="m", targets=(Target("new"),))
    older = InferenceModel(origin=origin("older", 1), model="m", targets=(Target("old"),))
    catalogue = Catalogue(ModelSet((newer, older)))
    assert target(catalogue, "m") == "old"
    assert catalogue.conflicts == [("default/newer", "default/older")]


def test_reserved_names_are_not_listed() -> None:
    none, reserved = Target("x", weight=0), model("reserved", Target("x", weight=0))
    models, rules = (model("a"), reserved), (rewrite("r", RewriteRule(("b",), (none,)), rule("c", "y")),)
    catalogue = Catalogue(ModelSet(models, rewrites=rules))
    assert [one.name for one in catalogue.listed] == ["a", "c"]
    unknown, refused = ask(catalogue, "nope"), ask(catalogue, "reserved")
    assert isinstance(unknown, Refusal) and unknown.message.endswith("Known models: a, c.")
    assert isinstance(refused, Refusal) and refused.status == 404
    lenient = Catalogue(ModelSet(models, rewrites=rules), LENIENT)
    assert [one.name for one in lenient.offered(dict.fromkeys(("reserved", "b", "z"), ModelCard(b"{}", inf)))] == [
        "a",
        "c",
        "z",
    ]
    saved = Catalogue(ModelSet(models, rewrites=(rewrite("r", rule("reserved", "y")),)))
    assert [one.name for one in saved.listed] == ["a", "reserved"], "the rule comes before the name's own targets"


def test_what_is_listed() -> None:
    catalogue = Catalogue(
        ModelSet((model("b", "x", created=9.5), model("a")), rewrites=(rewrite("r", rule("c", "y")),))
    )
    assert [(one.name, one.created) for one in catalogue.listed] == [("a", 0), ("b", 9), ("c", 0)]
    assert Catalogue(ModelSet(rewrites=(rewrite("r", rule("c", "y")),))).listed == []


def test_of_a_pool() -> None:
    mine = InferenceModel(origin=origin("a", pools=("p",)), model="a")
    other = InferenceModel(origin=origin("b", pools=("q",)), model="b")
    every = InferenceModel(origin=origin("c"), model="c")
    both = ModelSet((mine, other, every))
    assert both.of_pool("p").models == (mine, every)
    assert both.of_pool("p", "elsewhere").models == ()
    assert both.of_pool() == both


@pytest.mark.parametrize(
    ("targets", "shares"),
    [
        ([Target("a", 90), Target("b", 10)], {"a": 0.9, "b": 0.1}),
        ([Target("a"), Target("b"), Target("c"), Target("d")], dict.fromkeys("abcd", 0.25)),
        ([Target("a", 1), Target("b"), Target("c", 3)], {"a": 0.25, "c": 0.75}),
        ([Target("a", 0), Target("b", 1)], {"b": 1.0}),
        ([Target("a", 1), Target("b", 1_000_000)], {"b": 1.0}),
    ],
)
@pytest.mark.parametrize("by_session", [False, True])
def test_shares(targets: list[Target], shares: dict[str, float], by_session: bool) -> None:
    rng, split = Random(7), Split(targets)
    sessions = (f"session {i}" if by_session else "" for i in range(10_000))
    counts = Counter(split.choose(rng, session) for session in sessions)
    for name, share in shares.items():
        assert abs(counts[name] / 10_000 - share) < 0.02
    assert sum(counts[name] for name in shares) > 9_990


def test_sessions_stick_and_move_only_when_they_must() -> None:
    before, after = Split([Target("a", 90), Target("b", 10)]), Split([Target("a", 80), Target("b", 20)])
    sessions = [f"s{i}" for i in range(5000)]
    chosen = [before.choose(Random(1), session) for session in sessions]
    assert chosen == [before.choose(Random(2), session) for session in sessions]
    moved = [old for old, session in zip(chosen, sessions, strict=True) if after.choose(RNG, session) != old]
    assert set(moved) == {"a"}
    assert 0.08 < len(moved) / len(sessions) < 0.12


def test_sessions_move_only_from_a_target_that_leaves() -> None:
    three = Split([Target("a", 1), Target("b", 1), Target("c", 1)])
    turned, two = Split([Target("c", 1), Target("b", 1), Target("a", 1)]), Split([Target("b", 1), Target("c", 1)])
    sessions = [f"s{i}" for i in range(3000)]
    chosen = [three.choose(RNG, session) for session in sessions]
    assert all(950 < chosen.count(name) < 1050 for name in "abc")
    assert [turned.choose(RNG, session) for session in sessions] == chosen
    kept = [(old, two.choose(RNG, session)) for old, session in zip(chosen, sessions, strict=True) if old != "a"]
    assert all(old == new for old, new in kept)


def test_canaries_of_two_models_get_different_sessions() -> None:
    one, other = Split([Target("a", 9), Target("b", 1)]), Split([Target("c", 9), Target("d", 1)])
    both = sum(one.choose(RNG, f"s{i}") == "b" and other.choose(RNG, f"s{i}") == "d" for i in range(5000))
    assert 25 < both < 80


def test_what_a_server_has_and_no_request_may_name() -> None:
    models = ModelSet((model("chat", "base", "tuned"),))
    catalogue = Catalogue(models)
    assert catalogue.undefined(["first", "base"], ["tuned", "mine"]) == {"mine"}, "one model with two names"
    assert catalogue.undefined(["v2"], []) == {"v2"}
    passing = [Catalogue(), Catalogue(models, ModelRules(reject_unmatched=False))]
    passing.append(Catalogue(models + ModelSet(rewrites=(rewrite("r", rule("", "base")),))))
    assert [each.undefined(["v2"], ["mine"]) for each in passing] == [set()] * 3


def test_sessions_stick_only_when_asked() -> None:
    models = ModelSet((model("m", "a", "b"),))
    loose, sticky = Catalogue(models), Catalogue(models, ModelRules(sticky_sessions=True))
    assert {target(loose, "m", session="s") for _ in range(50)} == {"a", "b"}
    assert len({target(sticky, "m", session="s") for _ in range(50)}) == 1
    assert {target(sticky, "m") for _ in range(50)} == {"a", "b"}
    assert {target(loose, "m", opening="~1") for _ in range(50)} == {"a", "b"}


def test_an_opening_counts_only_without_a_session_of_the_client() -> None:
    sticky = Catalogue(ModelSet((model("m", "a", "b"),)), ModelRules(sticky_sessions=True))
    of_openings = [target(sticky, "m", opening=f"~{n}") for n in range(50)]
    assert set(of_openings) == {"a", "b"}
    recognised = [target(sticky, "m", opening=f"~{n}", session="~later") for n in range(50)]
    assert recognised == of_openings, "a conversation has no id at its first turn"
    assert len({target(sticky, "m", opening=f"~{n}", session="s") for n in range(50)}) == 1


def test_a_rewrite_that_an_older_one_overrules_is_known() -> None:
    older = rewrite("older", rule("a b", "x"), created=1.0)
    newer = rewrite("newer", rule("b c", "y"), rule("", "z"), created=2.0)
    newest = rewrite("newest", rule("", "w"), created=3.0)
    catalogue = Catalogue(ModelSet(rewrites=(newest, newer, older)))
    assert catalogue.overruled == {"default/newer": {"b": "default/older"}, "default/newest": {"": "default/newer"}}
    twice = rewrite("twice", rule("a", "x"), rule("a", "y"))
    assert Catalogue(ModelSet(rewrites=(twice,))).overruled == {}


def test_all_weights_zero_reserves_the_name() -> None:
    catalogue = Catalogue(ModelSet((model("m", Target("a", 0)),)))
    assert "reserved" in refused(catalogue, "m")[1]
