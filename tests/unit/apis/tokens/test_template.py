"""Rendering, its helpers, and what a template may not do."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fairlead.apis.tokens import template as sandbox
from fairlead.apis.tokens.pieces import Absent
from fairlead.apis.tokens.template import MAX_TEMPLATE, ChatTemplate

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]


def now() -> datetime:
    return datetime(2026, 3, 1, 12, tzinfo=UTC)


def rendered(source: str, messages: Any = MESSAGES, continued: bool = False, **variables: Any) -> str:
    return ChatTemplate(source, now, {"bos_token": "<s>"}).render(messages, variables, continued)


def test_messages_and_the_generation_prompt() -> None:
    begin = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nWell, <|im_end|>\n"
    assert rendered(CHATML, add_generation_prompt=False) == begin
    assert rendered(CHATML, add_generation_prompt=True) == begin + "<|im_start|>assistant\n"


EXPECTED = [
    ("{{ bos_token }}{{ nothing }}|", "<s>|"),
    ("{{ strftime_now('%d %b %Y') }}", "01 Mar 2026"),
    ('{{ {"b": "ü<&", "a": [1, 2.0, none]} | tojson }}', '{"b": "ü<&", "a": [1, 2.0, null]}'),
    ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
    ("  {% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
    ("{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ loop.length }}{% endfor %}", "2"),
    ("{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %},{% endfor %}", "user,assistant,"),
    ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
    ("{% macro tag(x) %}[{{ x | upper }}]{% endmacro %}{{ tag('a') ~ 1 ~ none }}", "[A]1None"),
    ("{{ messages[0].content.split('i')[0].strip() }}{{ messages[::-1][0].role }}", "hassistant"),
    ("{% for k, v in {'x': 1}.items() %}{{ k }}{{ v }}{% endfor %}{% for c in 'ab' %}{{ c }}{% endfor %}", "x1ab"),
    ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% else %}none{% endfor %}", "hi"),
    ("{{ ['a', 'b'] | join(', ') }}{{ 'aXa' | replace('X', '-') }}{{ 'a\nb' | indent(2) }}", "a, ba-aa\n  b"),
    ("{{ messages | map(attribute='role') | join('|') }}{{ '{}'.format('x') }}", "user|assistantx"),
    ("{% for m in messages %}{{ loop.previtem.role if loop.previtem }}{{ loop.nextitem is defined }}{% endfor %}",
     "TrueuserFalse"),
    ("{{ messages[0].content is string }}{{ messages[0] is mapping }}{{ messages is iterable }}{{ x is defined }}",
     "TrueTrueTrueFalse"),
    ("{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{% endfor %}{% for k, v in {'c': 1} | items %}{{ k }}"
     "{% endfor %}", "abc"),
    ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 7 % 4 }}{{ 5 | string }}", "135"),
    ("{% macro line(name, value='v') -%} {{ name }}={{ value }} {%- endmacro %}{{ line('a', value='b') }}"
     "{{ line(name='c') }}", "a=bc=v"),
    ("{{ '</think>a'.split('</think>')[-1].lstrip('a') }}{{ (not false) and 1 }}{{ 1 if [] else [1, 2][-1] }}", "12"),
    ("{% set ns = namespace(found=false) %}{% for m in messages[::-1] if not ns.found %}{% set ns.found = true %}"
     "{{ m.role }}{% else %}!{% endfor %}{{ ns.found }}", "assistantTrue"),
    ("{% macro wrap() %}<{{ caller('y') }}>{% endmacro %}{% call(x) wrap() %}{{ x }}{% endcall %}", "<y>"),
    ("{% filter upper %}a{% for m in messages %}{{ loop.index }}{% endfor %}{% endfilter %}", "A12"),
    ("{% with a = 1 %}{{ a }}{% endwith %}{% raw %}{{ a }}{% endraw %}{# no #}", "1{{ a }}"),
    ("{% for m in nothing %}x{% endfor %}{% set x %}{{ 'y' }}{% endset %}{{ x }}", "y"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "text"), EXPECTED)
def test_what_templates_expect(source: str, text: str) -> None:
    assert rendered(source) == text


@pytest.mark.parametrize("source", [source for source, _ in EXPECTED if "generation %}" not in source])
def test_bounds_change_nothing_else(source: str) -> None:
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    plain.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    variables = {"bos_token": "<s>", "messages": MESSAGES, "strftime_now": now().strftime}
    assert rendered(source) == plain.from_string(source).render(variables)


def test_continuing_the_final_message() -> None:
    assert rendered(CHATML, continued=True) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nWell, "
    stripped = CHATML.replace("m.content", "(m.content | trim)")
    assert rendered(stripped, continued=True).endswith("assistant\nWell,")
    parts = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}</>{% endfor %}"
    assert rendered(parts, [{"role": "user", "content": [{"type": "text", "text": "a b"}]}], continued=True) == "a b"


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], [{"role": "user", "content": []}]])
def test_nothing_to_continue(messages: Any) -> None:
    with pytest.raises(Absent, match="no final message"):
        rendered("{{ messages | length }}", messages, continued=True)


def test_a_template_that_drops_the_final_message() -> None:
    with pytest.raises(Absent, match="does not print the final message"):
        rendered("{{ messages[0].content }}", continued=True)


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (CHATML, "string"),
        ("{% for m in messages %}{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}", "openai"),
        ("{% set rest = messages[1:] %}{% for m in rest %}{% for p in m.content %}{% endfor %}{% endfor %}", "openai"),
        ("{% set a = messages %}{% set a = a %}{% set b = a | list %}{% for m in b %}{% for p in m.content | list %}"
         "{% endfor %}{% endfor %}", "openai"),
        ("{% macro show(content) %}{% for p in content %}{% endfor %}{% endmacro %}", "openai"),
        ("{% for m in messages %}{% for c in m.tool_calls %}{{ c }}{% endfor %}{% endfor %}", "string"),
        ("{% for m in tools %}{% for p in m.content %}{% endfor %}{% endfor %}", "string"),
    ],
)  # fmt: skip
def test_the_form_of_content(source: str, form: str) -> None:
    assert ChatTemplate(source, now, {}).form == form


BOUNDED = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "calls": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "+": "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "~": "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "*": "{{ 'x' * 999999999 }}",
    "list *": "{{ [1] * 999999999 }}",
    "**": "{{ 9 ** 999999999 }}",
    "%": "{{ '%999999999d' % 1 }}",
    "format": "{{ '{:>999999999}'.format(1) }}",
    "ljust": "{{ 'x'.ljust(999999999) }}",
    "tabs": "{{ '\t'.expandtabs(999999999) }}",
    "replace": "{{ ('a' * 9999).replace('a', 'b' * 9999) }}",
    "replace filter": "{{ ('a' * 9999) | replace('a', 'b' * 9999) }}",
    "join": "{{ ('b' * 9999).join(['a'] * 9999) }}",
    "join filter": "{{ (['a'] * 9999) | join('b' * 9999) }}",
    "indent": "{{ 'x' | indent(999999999) }}",
    "json": "{{ [1] | tojson(indent=999999999) }}",
    "fixed text": "{% set x %}{% for i in range(99999) %}" + "y" * 9999 + "{% endfor %}{% endset %}",
    "printed": "{% set x = 'y' * 9999 %}{% set z %}{% for i in range(99999) %}{{ x }}{% endfor %}{% endset %}",
    "itself": "{{ raise_exception('no system role, please') }}",
}


@pytest.mark.parametrize("source", BOUNDED.values(), ids=BOUNDED)
def test_bounds(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_TURNS", 20_000)
    with pytest.raises(Absent, match="the template refused: ") as caught:
        rendered(source)
    assert caught.value.reason == "template"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ lipsum(5) }}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
        "{{ 1 // 0 }}",
        "{{ messages[0].a.b }}",
        "{{ range(999999999) }}",
        "{{ messages[0] + 1 }}",
        "{{ ({}|tojson).x.y }}",
        "{{ nothing | tojson }}",
    ],
)
def test_what_fails_tells_why(source: str) -> None:
    with pytest.raises(Absent, match="the template failed: ") as caught:
        rendered(source)
    assert caught.value.reason == "template"


def test_nesting_ends() -> None:
    for source in (
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for m in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    ):
        with pytest.raises(Absent, match="nested too deeply"):
            rendered(source)


def test_the_budget_is_of_one_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_TURNS", 10)
    template = ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}", now, {})
    assert [template.render(MESSAGES, {}) for _ in range(20)] == ["userassistant"] * 20


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ 'x' | center(9) }}", "{{ x | random }}", "{% endfor %}", "{{", "x" * (MAX_TEMPLATE + 1)]
)
def test_what_is_no_template(source: str) -> None:
    with pytest.raises(ValueError, match="chat template"):
        ChatTemplate(source, now, {})


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": "hi"}]
    rendered(CHATML, messages, continued=True)
    assert messages == [{"role": "user", "content": "hi"}]


def test_made_by_the_model(model: Callable[..., Any]) -> None:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    made = model("{{ bos_token }}{{ eos_token }}{{ pad_token }}", config)
    assert made.template(tools=False).render([], {}) == "<s></s>"
