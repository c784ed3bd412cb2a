"""Chat templates: messages → the text of the prompt, as `apply_chat_template` of the engine's library renders it."""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError

from fairlead.tokens.content_format import content_format
from fairlead.tokens.prompt_tokens import TEMPLATE, TOO_LONG, Absent
from fairlead.tokens.sandbox import BUDGET, Budget, Environment, TemplateRefused

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
            self._template: Template = environment.from_string(environment.bounded(source))
        except (TemplateError, RecursionError, SyntaxError, ValueError) as exc:
            raise ValueError(f"not a usable chat template: {exc}"[:200]) from None
        self._variables = dict(variables)

    def render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any], continued: bool = False) -> str:
        """`continued`: the text ends where the last message does. Raises `Absent`."""
        if not continued:
            return self._render(messages, variables)
        marked, final = _marked(messages)
        text = self._render(marked, variables)
        at = text.rfind(_END.strip())
        if at < 0 or final.strip() not in text:
            raise Absent(TEMPLATE, "the template does not print the final message, which is to be continued")
        # A template that strips its messages has taken the mark's blank, and then also the text's own.
        return text[:at] if text.startswith(_END, at) else text[:at].rstrip()

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
