"""Render chat templates in a sandbox, as vLLM does."""

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

from fairlead.apis.tokens.pieces import PARTS, STRING, TEMPLATE, TOO_LONG, Absent

# Finds out whether a chat template takes a message's content as a text or as a list of parts, as vLLM does.
#
# vLLM inspects the template's program. If it loops over the content of a message, vLLM passes parts (`openai`);
# otherwise it joins the texts of the parts with line feeds (`string`). Message variables are the targets of loops over
# `messages`, or over a variable assigned from it, filtered or sliced. Since 0.22, a loop over a variable named
# `content` counts too, as in macros.


def content_format(program: nodes.Template) -> str:
    """The content that a template's program takes: `STRING` or `PARTS`."""
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
    """Yield `name` and every variable that is assigned from it, directly or through other variables."""
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
    """Whether an expression is the variable `name` (or its member `key`), possibly filtered or sliced."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key:
        node = _owner(node, key)
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _owner(node: nodes.Node | None, key: str) -> nodes.Node | None:
    """The object whose member `key` an expression reads; `None` if it reads no such member."""
    if isinstance(node, nodes.Getattr):
        return node.node if node.attr == key else None
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return node.node if node.arg.value == key else None
    return None


# A Jinja environment for chat templates: the functions that Hugging Face's templates expect, and bounds on their cost.
#
# Theory. A template is a program that is delivered with a model. Jinja's sandbox keeps it from reaching Python's
# internals and from changing its input, but not from running forever, and it cannot be stopped from outside. So its
# program is rewritten before it is compiled:
#
# * The turns of every `for` are counted, and every call counts as `CALL_TURNS` turns. A rendering may take at most
#   `MAX_TURNS`. Calls count because macros that call themselves twice take exponential time without any loop.
# * All output is counted, including output into variables and macros and the fixed text in loop bodies: at most
#   `MAX_PRINTED` characters.
# * Operations that can grow a text or list in one step (`+`, `*`, `%`, `~`, padding, `replace`, `join`) check sizes
#   first, because 40 doublings fill any memory. Powers and widths in format strings are refused.
#
# Filters and functions whose result changes from call to call are removed, except `strftime_now`, whose time is passed
# in. Python's recursion limit bounds the nesting. A template that exceeds a bound raises `TemplateRefused`.

#: 1,000 messages in a template with three loops take 3,000 turns. A million take about a second.
MAX_TURNS = 1_000_000
#: Turns that a call counts as: it takes about three times as long as a turn.
CALL_TURNS = 3
#: Characters printed in one rendering.
MAX_PRINTED = 64 << 20
#: Characters of one text, or items of one list.
MAX_LENGTH = 16 << 20
#: The variable with the `Budget` of a rendering. No template can assign it: it is not a valid name.
BUDGET = "fairlead budget"
_COUNTED, _JOINED, _PRINTED = "_fairlead_counted", "_fairlead_joined", "_fairlead_printed"
_GLOBALS = frozenset(("range", "dict", "namespace", "joiner", "cycler"))
#: Filters that are impure, made for HTML, or able to grow their input.
_LEFT_OUT = ("random", "center", "urlize", "xmlattr", "wordwrap", "pprint", "forceescape", "format", "batch", "slice")
_GROWING = frozenset(("center", "ljust", "rjust", "zfill", "expandtabs", "replace", "join"))
_TOO_LONG = "a text or list grows too long"


class TemplateRefused(TemplateError):
    """The template exceeds a bound, or raised an error itself."""


class Budget:
    """The turns and characters that a rendering has left."""

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
    """The bounded environment. `now` gives the time for `strftime_now`."""

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
        """The program of a template, with the bounds added. Raises `TemplateError` if it is not a template."""
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
    """Accepts `{% generation %}…{% endgeneration %}`, which marks the assistant's text for training."""

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
    """Raise `TemplateRefused` if the method `name` of the text `owner` with `args` would make it too long."""
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
    """Copy the attributes of a filter: Jinja marks filters that need its evaluation context by one."""
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
    """Encode as JSON, without escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=_narrow(indent), separators=separators, sort_keys=sort_keys
    )


# Renders messages to the text of the prompt, as `apply_chat_template` of the engine's library does.

#: Longer templates are not compiled. The longest in use have 30 kB.
MAX_TEMPLATE = 1 << 20
#: Marks the end of the final message while it is rendered. Hugging Face's library uses the same text, and some
#: templates look for it.
_END = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    def __init__(self, source: str, now: Callable[[], datetime], variables: Mapping[str, Any]) -> None:
        """`variables`: passed to every rendering, such as `bos_token`. Raises `ValueError` for an unusable template."""
        if len(source) > MAX_TEMPLATE:
            raise ValueError(f"a chat template of more than {MAX_TEMPLATE} characters")
        environment = Environment(now)
        try:
            #: The form that a message's content must have, see `content_format`.
            self.form = content_format(environment.parse(source))
            program = environment.bounded(source)
            self._template: Template = environment.from_string(program)
        except (TemplateError, RecursionError, SyntaxError, ValueError) as exc:
            raise ValueError(f"not a usable chat template: {exc}"[:200]) from None
        #: The template knows the role `developer`, by vLLM's test.
        self.developers = '"developer"' in source or "'developer'" in source
        #: The template fails if a message of the role `system` is not the first, by vLLM's test without variables.
        self.system_first = _fails(environment.from_string(program, _bare(environment)), _LATE_SYSTEM)
        self._variables = dict(variables)

    def render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any], continued: bool = False) -> str:
        """The text of the prompt. `continued`: it ends with the last message, to be continued. Raises `Absent`."""
        if not continued:
            return self._render(messages, variables)
        marked, final = _marked(messages)
        text = self._render(marked, variables)
        end = text.rfind(_END.strip())
        if end < 0 or final.strip() not in text:
            raise Absent(TEMPLATE, "the template does not print the final message, which is to be continued")
        # A template that strips its messages removed the blank at the end of the mark, so it strips the text too.
        return text[:end] if text.startswith(_END, end) else text[:end].rstrip()

    def _render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        given = {**self._variables, **variables, "messages": messages, BUDGET: Budget()}
        try:
            return self._template.render(given)
        except TemplateRefused as exc:
            raise Absent(TEMPLATE, f"the template refused: {exc}") from None
        except RecursionError:
            raise Absent(TOO_LONG, "nested too deeply for the template") from None
        except Exception as exc:  # a template's program may fail in any way on a client's messages
            raise Absent(TEMPLATE, f"the template failed: {type(exc).__name__}: {exc}") from None


_LATE_SYSTEM = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]


def _bare(environment: Environment) -> dict[str, Any]:
    """Globals in which the functions that only Hugging Face's library has are undefined."""
    return {name: environment.undefined(name=name) for name in ("raise_exception", "strftime_now")}


def _fails(template: Template, messages: list[dict[str, Any]]) -> bool:
    try:
        template.render(messages=messages, add_generation_prompt=False, **{BUDGET: Budget()})
    except Exception:  # a template's program may fail in any way
        return True
    return False


def _marked(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The messages with the mark appended to the last text, and the last text without it."""
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
