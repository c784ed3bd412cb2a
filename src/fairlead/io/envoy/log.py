"""Envoy's log lines: their level for our log, and their meaning when it does not start."""

import logging
import re
import signal
from collections.abc import Iterable

#: Given to Envoy as `--log-format`: level, component, text.
FORMAT = "[%l][%n] %v"

_LINE = re.compile(r"(?:\[\d{4}-[^\]]*\]\[\d+\])?\[([a-z]+)\]\[([a-z0-9_]+)\] (?:\[[^\]]*:\d+\] )?(.*)", re.DOTALL)
_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.ERROR,
}
_MAX_WORDS = 1500


def parse(line: str) -> tuple[int, str, str] | None:
    """(level of `logging`, Envoy's component, text); `None` for a line that continues the one before.

    Understands `FORMAT` and Envoy's default format, which it uses before it has read its arguments.
    """
    match = _LINE.fullmatch(line)
    if match is None or match[1] not in _LEVELS:
        return None
    return _LEVELS[match[1]], match[2], match[3]


def explain(lines: Iterable[str], code: int | None = None) -> str:
    """One clear sentence (or few lines) from the last words of an Envoy that ended. `code`: what it ended with."""
    words = [_bare(line) for line in lines if line.strip()]
    text = "\n".join(words)
    taken = re.search(r"cannot bind '([^']+)': ([^\n]+)", text)
    if taken:
        if "in use" in taken[2]:
            return f"{taken[1]} is taken: stop what listens there, or choose another port for the gateway"
        return f"the gateway cannot listen on {taken[1]}: {taken[2]}"
    if code is not None and code < 0:
        name = _signal_name(-code)
        return f"Envoy was ended by {name}" + (f" after saying:\n{text[-_MAX_WORDS:]}" if text else "")
    refused = re.search(r"error initializing configuration '[^']*': (.*)", text, re.DOTALL)
    if refused:
        return f"Envoy refuses the configuration: {refused[1][:_MAX_WORDS].strip()}"
    if not text:
        return f"Envoy ended with code {code} and said nothing"
    return f"Envoy ended with code {code}:\n{text[-_MAX_WORDS:]}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _bare(line: str) -> str:
    parsed = parse(line)
    return line.rstrip() if parsed is None else parsed[2].rstrip()
