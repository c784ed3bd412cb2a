"""Chat templates: rendered in a sandbox, as vLLM does it."""

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, cast

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from fairlead.apis.tokens.pieces import TEMPLATE, TOO_LONG, Absent

# Whether a chat template takes a message's content as a text or as a list of parts, found out as vLLM does.
#
# vLLM looks at the template's program: a loop over the content of a message means parts (`openai`), else it joins the
# texts of the parts with line feeds (`string`). Message variables are the targets of loops over `messages`, or over
# what was assigned from it, filtered or sliced. Since 0.22 a loop over a variable named `content` counts too, as in
# macros.

STRING, PARTS = "string", "openai"


def content_format(program: nodes.Template) -> str:
    """`STRING` or `PARTS`."""
    loops = list(program.find_all(nodes.For))
    sources = set(_assigned_from(program, "messages"))
    messages = {
        loop.target.name
        for loop in loops
        if isinstance(loop.target, nodes.Name) and any(_reads(loop.iter, name) for name in sources)
    }
    for loop in loops:
        if any(_reads(loop.iter, name, "content") for name in messages):
            return PARTS
        if isinstance(loop.iter, nodes.Name) and loop.iter.name == "content":
            return PARTS
    return STRING


def _assigned_from(program: nodes.Template, name: str) -> Iterator[str]:
    """`name` and every variable that is assigned from it, however many steps away."""
    assigned = [
        (assignment.target.name, assignment.node)
        for assignment in program.find_all(nodes.Assign)
        if isinstance(assignment.target, nodes.Name)
    ]
    known, waiting = {name}, [name]
    while waiting:
        source = waiting.pop()
        yield source
        for target, value in assigned:
            if target not in known and _reads(value, source):
                known.add(target)
                waiting.append(target)


def _reads(node: nodes.Node | None, name: str, key: str = "") -> bool:
    """Whether an expression is the variable `name` (its member `key`), maybe filtered or sliced."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key:
        node = _owner(node, key)
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _owner(node: nodes.Node | None, key: str) -> nodes.Node | None:
    """What the member `key` is taken of; `None` = the expression is no such access."""
    if isinstance(node, nodes.Getattr):
        return node.node if node.attr == key else None
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return node.node if node.arg.value == key else None
    return None


# A Jinja environment for chat templates: what Hugging Face's templates expect, and bounds on what they may cost.
#
# Theory. A template is a program that comes with a model. Jinja's sandbox keeps it from reaching Python's insides and
# from changing what it is given, but not from running for ever, and nothing outside can stop it. So its program is
# rewritten before it is compiled:
#
# * every `for` counts its turns and every call counts as `CALL_TURNS`, together at most `MAX_TURNS` in a rendering:
#   macros that call themselves twice take exponential time without any loop;
# * everything printed is counted, also into variables and macros, and what a loop's body prints as fixed text: at most
#   `MAX_PRINTED` characters;
# * what can grow a text or list in one step (`+`, `*`, `%`, `~`, padding, `replace`, `join`) looks at sizes first, for
#   40 doublings fill any memory. Powers and widths in format strings are refused.
#
# Filters and functions whose result changes from call to call are left out, but `strftime_now`, whose time is handed
# in. Nesting ends with Python's recursion limit. What goes past a bound raises `TemplateRefused`.

#: 1,000 messages in a template with three loops take 3,000 turns. A million take about a second.
MAX_TURNS = 1_000_000
#: What a call counts as: it takes about three times as long.
CALL_TURNS = 3
#: Characters over all printing of one rendering.
MAX_PRINTED = 64 << 20
#: Characters of one text, or items of one list.
MAX_LENGTH = 16 << 20
#: The variable with the `Budget` of a rendering. No template can assign it, for it is no name.
BUDGET = "fairlead budget"
_COUNTED, _JOINED, _PRINTED = "_fairlead_counted", "_fairlead_joined", "_fairlead_printed"
_GLOBALS = frozenset(("range", "dict", "namespace", "joiner", "cycler"))
#: Impure, made for HTML, or able to grow what they are given.
_LEFT_OUT = ("random", "center", "urlize", "xmlattr", "wordwrap", "pprint", "forceescape", "format", "batch", "slice")
_GROWING = frozenset(("center", "ljust", "rjust", "zfill", "expandtabs", "replace", "join"))
_TOO_LONG = "a text or list grows too long"


class TemplateRefused(TemplateError):
    """The template goes past a bound, or says itself that it cannot render this."""


class Budget:
    """What is left of a rendering's bounds."""

    __slots__ = ("printed", "turns")

    def __init__(self) -> None:
        self.turns = MAX_TURNS
        self.printed = MAX_PRINTED

    def take(self, turns: int, printed: int = 0) -> None:
        self.turns -= turns
        self.printed -= printed
        if self.turns < 0:
            raise TemplateRefused(f"its loops and calls go on for more than {MAX_TURNS} turns")
        if self.printed < 0:
            raise TemplateRefused(f"it prints more than {MAX_PRINTED} characters")


class Environment(ImmutableSandboxedEnvironment):
    """`now` gives the time for `strftime_now`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.globals = {name: value for name, value in self.globals.items() if name in _GLOBALS}
        self.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: now().strftime(form)}
        for name in _LEFT_OUT:
            self.filters.pop(name, None)
        replace, join, indent = self.filters["replace"], self.filters["join"], self.filters["indent"]
        self.filters |= {
            "tojson": _tojson,
            "indent": lambda text, width=4, *more, **named: indent(text, _narrow(width), *more, **named),
            "replace": _checked("replace", replace),
            "join": _checked_join(join),
            _COUNTED: _counted,
            _JOINED: _joined,
            _PRINTED: _printed,
        }

    def bounded(self, source: str) -> nodes.Template:
        """The program of a template, with its bounds in. Raises `TemplateError` for what is none."""
        program = cast(nodes.Template, _Bounded().visit(self.parse(source)))
        program.set_environment(self)
        return program

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise TemplateRefused("powers are not calculated")
        if operator == "%" and isinstance(left, str):
            raise TemplateRefused("'%' on texts is not supported")
        size = _size(left) + _size(right)
        if operator == "*" and size:
            times = left if isinstance(left, int) else right
            size *= times if isinstance(times, int) else 1
        if size > MAX_LENGTH:
            raise TemplateRefused(_TOO_LONG)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        context.resolve(BUDGET).take(CALL_TURNS)
        owner = getattr(called, "__self__", None)
        if isinstance(owner, str) and called.__name__ in _GROWING:
            _check_growth(called.__name__, owner, args)
        return super().call(context, called, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and ":" in value.__self__:
            raise TemplateRefused("'format' with a format specification is not supported")
        return wrapped


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant said, which only training needs to know."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Bounded(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.Node:
        fixed = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _COUNTED, nodes.Const(fixed))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _JOINED)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [
            child if isinstance(child, nodes.TemplateData) else _filtered(child, _PRINTED) for child in node.nodes
        ]
        return node


def _filtered(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, list(args), [], None, None, lineno=node.lineno)


@pass_context
def _counted(context: Context, value: Any, fixed: int) -> Any:
    items = value if isinstance(value, list | tuple | range | str | dict) else list(value)
    context.resolve(BUDGET).take(len(items), len(items) * fixed)
    return items


@pass_context
def _printed(context: Context, value: Any) -> str:
    text = str(value)
    context.resolve(BUDGET).take(0, len(text))
    return text


def _joined(parts: list[Any]) -> str:
    if sum(map(_size, parts)) > MAX_LENGTH:
        raise TemplateRefused(_TOO_LONG)
    return "".join(map(str, parts))


def _check_growth(name: str, owner: str, args: tuple[Any, ...]) -> None:
    """`args` of a text's method that can make it longer."""
    first, second = (*args, None, None)[:2]
    if name == "replace":
        grown = len(owner) + owner.count(str(first)) * _size(second)
    elif name == "join":
        parts = first if isinstance(first, list | tuple) else ()
        grown = len(owner) * len(parts) + sum(map(_size, parts))
    elif name == "expandtabs":
        grown = len(owner) * (first if isinstance(first, int) else 8)
    else:
        grown = first if isinstance(first, int) else 0
    if grown > MAX_LENGTH:
        raise TemplateRefused(_TOO_LONG)


def _checked(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def checked(eval_ctx: Any, text: Any, *args: Any, **kwargs: Any) -> Any:
        _check_growth(name, str(text), (*args, *kwargs.values()))
        return original(eval_ctx, text, *args, **kwargs)

    return _as_filter(original, checked)


def _checked_join(original: Callable[..., Any]) -> Callable[..., Any]:
    def checked(eval_ctx: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
        items = value if isinstance(value, list | tuple) else list(value)
        if attribute is None:
            _check_growth("join", str(d), (items,))
        return original(eval_ctx, items, d, attribute)

    return _as_filter(original, checked)


def _as_filter(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Jinja marks filters that want its evaluation context by an attribute."""
    vars(replacement).update(vars(original))
    return replacement


def _narrow(width: Any) -> Any:
    if _size(width) > 1000 or (isinstance(width, int) and width > 1000):
        raise TemplateRefused("it indents by more than 1000")
    return width


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _refuse(message: Any) -> None:
    raise TemplateRefused(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As JSON, without escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=_narrow(indent), separators=separators, sort_keys=sort_keys
    )


# Chat templates: messages → the text of the prompt, as `apply_chat_template` of the engine's library renders it.

#: Longer ones are not compiled; the longest in use have 30 kB.
MAX_TEMPLATE = 1 << 20
#: Stands behind the final message while it is rendered, to see where it ends. With it Hugging Face's library finds the
#: place too, and some templates look for it, so it is the same text.
_END = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """One template, compiled."""

    def __init__(self, source: str, now: Callable[[], datetime], variables: Mapping[str, Any]) -> None:
        """`variables`: what every rendering gets, such as `bos_token`. Raises `ValueError` for what is no template."""
        if len(source) > MAX_TEMPLATE:
            raise ValueError(f"a chat template of more than {MAX_TEMPLATE} characters")
        environment = Environment(now)
        try:
            #: What a message's content must be, see `content_format`.
            self.form = content_format(environment.parse(source))
            program = environment.bounded(source)
            self._template: Template = environment.from_string(program)
        except (TemplateError, RecursionError, SyntaxError, ValueError) as exc:
            raise ValueError(f"not a usable chat template: {exc}"[:200]) from None
        #: It knows the role `developer`, as vLLM finds out.
        self.developers = '"developer"' in source or "'developer'" in source
        #: It fails for a message of the role `system` that is not the first, as vLLM finds out: without any variables.
        self.system_first = _fails(environment.from_string(program, _bare(environment)), _LATE_SYSTEM)
        self._variables = dict(variables)

    def render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any], continued: bool = False) -> str:
        """`continued`: the text ends where the last message does. Raises `Absent`."""
        if not continued:
            return self._render(messages, variables)
        marked, final = _marked(messages)
        text = self._render(marked, variables)
        end = text.rfind(_END.strip())
        if end < 0 or final.strip() not in text:
            raise Absent(TEMPLATE, "the template does not print the final message, which is to be continued")
        # A template that strips its messages has taken the mark's blank, and then also the text's own.
        return text[:end] if text.startswith(_END, end) else text[:end].rstrip()

    def _render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        given = {**self._variables, **variables, "messages": messages, BUDGET: Budget()}
        try:
            return self._template.render(given)
        except TemplateRefused as exc:
            raise Absent(TEMPLATE, f"the template refused: {exc}") from None
        except RecursionError:
            raise Absent(TOO_LONG, "nested too deeply for the template") from None
        except Exception as exc:  # whatever a template's program does wrong with what a client sent
            raise Absent(TEMPLATE, f"the template failed: {type(exc).__name__}: {exc}") from None


_LATE_SYSTEM = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]


def _bare(environment: Environment) -> dict[str, Any]:
    """Globals without those that only Hugging Face's library has."""
    return {name: environment.undefined(name=name) for name in ("raise_exception", "strftime_now")}


def _fails(template: Template, messages: list[dict[str, Any]]) -> bool:
    try:
        template.render(messages=messages, add_generation_prompt=False, **{BUDGET: Budget()})
    except Exception:  # whatever its program does
        return True
    return False


def _marked(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The messages with the mark behind the last text, and that text."""
    last = dict(messages[-1]) if messages else {}
    content = last.get("content")
    if isinstance(content, list) and content:
        final = str(content[-1]["text"])
        last["content"] = [*content[:-1], {**content[-1], "text": final + _END}]
    elif isinstance(content, str):
        final = content
        last["content"] = final + _END
    else:
        raise Absent(TEMPLATE, "there is no final message to continue")
    return [*messages[:-1], last], final
