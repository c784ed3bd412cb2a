"""The section `tokens`."""

from pathlib import Path

import pytest

from fairlead.compat.load import load, problems
from fairlead.config.reload import plan_reload
from fairlead.gateway.envoy.options import Options
from fairlead.server.live.prompts import PATIENCE

BASE = "endpoints: ['10.0.0.1:8000']\n"


def test_defaults() -> None:
    tokens = load(BASE).tokens
    assert (tokens.models, tokens.cache_bytes, tokens.engine_timeout) == ({}, 256 << 20, 0.2)


def test_paths_are_seen_from_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    model = "{modelPath: models/a, chatTemplate: /b.jinja, templateKwargs: {enable_thinking: false}}"
    file.write_text(f"{BASE}tokens:\n  cacheBytes: 1MiB\n  models:\n    '*': {model}\n    e: {{render: engine}}\n")
    tokens = load(file).tokens
    assert tokens.cache_bytes == 1 << 20
    assert tokens.models["*"].model_path == str(tmp_path / "models" / "a")
    assert tokens.models["*"].chat_template == "/b.jinja"
    assert tokens.models["*"].tokenizer_file == ""
    assert tokens.models["*"].template_kwargs == {"enable_thinking": False}
    assert tokens.models["e"].render == "engine"
    assert load(f"{BASE}tokens: {{models: {{a: {{modelPath: x}}}}}}").tokens.models["a"].model_path == "x"


@pytest.mark.parametrize(
    ("model", "path", "message"),
    [
        ("{}", "$.tokens.models.m", "there is nothing to make tokens with"),
        ("{render: engine, modelPath: x}", "$.tokens.models.m.modelPath", "the engine renders with its own"),
        ("{render: engine, templateKwargs: {a: 1}}", "$.tokens.models.m.templateKwargs", "the engine renders"),
        ("{modelPath: x, rendr: engine}", "$.tokens.models.m.rendr", "unknown field 'rendr'"),
        ("{modelPath: 5}", "$.tokens.models.m.modelPath", "expected a string"),
    ],
)
def test_problems(model: str, path: str, message: str) -> None:
    (problem,) = problems(f"{BASE}tokens: {{models: {{m: {model}}}}}")
    assert problem.path == path
    assert problem.message.startswith(message)


def test_the_gateway_does_not_give_up_a_request_that_waits_for_tokens() -> None:
    """Whatever waits for an engine ends before the wait for tokens, and that well before the gateway's patience."""
    (problem,) = problems(f"{BASE}tokens: {{engineTimeout: 1s}}")
    assert problem.path == "$.tokens.engineTimeout" and "<= 0.4" in str(problem)
    assert load(f"{BASE}tokens: {{engineTimeout: 400ms}}").tokens.engine_timeout < PATIENCE
    assert Options().message_timeout >= 2 * PATIENCE


def test_it_does_not_apply_while_running() -> None:
    old, new = load(BASE), load(f"{BASE}tokens: {{cacheBytes: 5MiB}}")
    _, refused = plan_reload(old, new)
    assert [problem.path for problem in refused] == ["$.tokens.cacheBytes"]
