"""Whether a chat template takes a message's content as a text or as a list of parts, found out as vLLM does.

vLLM looks at the template's program: a loop over the content of a message means parts (`openai`), else it joins the
texts of the parts with line feeds (`string`). Message variables are the targets of loops over `messages`, or over what
was assigned from it, filtered or sliced. Since 0.22 a loop over a variable named `content` counts too, as in macros.
"""

from collections.abc import Iterator

from jinja2 import nodes

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
        (one.target.name, one.node) for one in program.find_all(nodes.Assign) if isinstance(one.target, nodes.Name)
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
