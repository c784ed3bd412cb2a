"""Structured logs: one event per line, as logfmt or JSON, to stderr.

    log = get("scrape")
    log.warning("endpoint cannot be scraped", endpoint="default/vllm-0", reason="timeout")

    time=2026-01-02T03:04:05.678Z level=warning component=scrape msg="endpoint cannot be scraped" endpoint=vllm-0 …

Rules
* The message is a constant; what varies goes into fields. So lines can be searched, and repeated ones are recognised: a
  warning or error of one logger about one endpoint or problem is written at most `BURST` times per `WINDOW_S` seconds.
  The first line after that says how many were left out. Lines below the level of warning are never left out.
* Lines never contain a prompt, a body or a credential: fields with such names are redacted, passwords in URLs are
  masked, and all values are cut at `MAX_VALUE` characters.
* This is built on the standard library's logging, so log lines of libraries have the same format.
* A process that serves writes `in_background`: a full pipe whose reader stalls must not stop its event loop.
"""

import json
import logging
import os
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from queue import SimpleQueue
from typing import Any, TextIO

from fairlead.core.text import masked

BURST = 5
WINDOW_S = 60.0
MAX_VALUE = 400
_MAX_TRACEBACK = 4000
#: Of a reason: the plugin and the type of its error.
_KIND = re.compile(r"plugin [^:]*: \w+(?=[:(]|$)")
_MAX_KEYS = 1000
#: Bytes that may wait for the reader of stderr; bytes of one write; seconds to write the rest at the end.
_MAX_WAITING, _WRITE = 4 << 20, 64 << 10
_FLUSH_S = 1.0
_ROOT = "fairlead"
#: Names of fields that may contain users' text or credentials. Their values are redacted.
_SECRET = frozenset(
    {
        "prompt", "body", "messages", "content", "input", "text", "authorization", "token", "api_key", "password",
        "cookie",
    }
)  # fmt: skip
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


#: Fields that every line of this process has.
OWN_FIELDS: dict[str, object] = {}


def name_worker(number: int) -> None:
    """Add the number of this worker to every line."""
    OWN_FIELDS["worker"] = number


class Log:
    """A named logger that takes fields. Calls below the logger's level cost little."""

    __slots__ = ("_logger",)

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, message: str, **fields: object) -> None:
        self._write(logging.DEBUG, message, fields)

    def info(self, message: str, **fields: object) -> None:
        self._write(logging.INFO, message, fields)

    def warning(self, message: str, **fields: object) -> None:
        self._write(logging.WARNING, message, fields)

    def error(self, message: str, exc: BaseException | None = None, **fields: object) -> None:
        """Log an error. `exc`: its traceback is added."""
        self._write(logging.ERROR, message, fields, exc)

    def failure(self, message: str, **fields: object) -> Callable[[Any], None]:
        """A callback for a task (`asyncio.Task`), which logs the exception that it has ended with."""

        def ended(task: Any) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self.error(message, exc=error, **fields)

        return ended

    def _write(self, level: int, message: str, fields: Mapping[str, object], exc: BaseException | None = None) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", message, extra={"fields": fields}, exc_info=exc)


class Counted:
    """A line about something that happens often. It says how often, at most once in `GAP_S` seconds. `now`: returns
    seconds."""

    GAP_S = 15.0

    def __init__(self, write: Callable[..., None], message: str, now: Callable[[], float]) -> None:
        """`write`: a method of a `Log`."""
        self._write, self._message, self._now = write, message, now
        self._count, self._written_at = 0, -inf
        self._last: object = None

    def happened(self, last: object) -> None:
        """Count once. The line names the `last` one."""
        self._count, self._last = self._count + 1, last
        self.look()

    def look(self, at_end: bool = False) -> None:
        """Write what was not written yet, if it is time or the end. Call this every second or so."""
        now = self._now()
        if self._count and (at_end or now - self._written_at >= self.GAP_S):
            self._write(self._message, requests=self._count, last=self._last)
            self._count, self._written_at = 0, now


def get(component: str) -> Log:
    """The logger of one component, e.g. `scrape`."""
    return Log(logging.getLogger(f"{_ROOT}.{component}"))


def setup(level: str = "info", form: str = "logfmt", stream: TextIO | None = None) -> None:
    """Send all log lines to `stream` (default: stderr), instead of where they went before. Raises `ValueError` for an
    unknown level or format."""
    if level not in _LEVELS:
        raise ValueError(f"unknown log level {level!r}, expected one of {', '.join(_LEVELS)}")
    formatters: dict[str, Callable[[], logging.Formatter]] = {"logfmt": LogfmtFormatter, "json": JsonFormatter}
    if form not in formatters:
        raise ValueError(f"unknown log format {form!r}, expected one of {', '.join(formatters)}")
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter(formatters[form]())
    handler.addFilter(RepeatFilter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Libraries log only warnings and errors.
    root.setLevel(max(_LEVELS[level], logging.WARNING))
    logging.getLogger(_ROOT).setLevel(_LEVELS[level])


class Written:
    """Lines that could not be written since the start, e.g. because the disk is full or the pipe has no reader."""

    lost = 0


class _Background:
    """Writes lines from a thread of its own until `close()`. The thread does not use `sys.stderr`: if it waited there
    for a reader, it would still hold the lock of `sys.stderr` when the process ends."""

    #: The writer of all handlers; `None` = each line is written when it is logged.
    running: "_Background | None" = None

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        #: Bytes taken and written since the start. No lock is needed: only `put` changes the first, under the handler's
        #: lock, and only the thread changes the second.
        self._taken = self._written = 0
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        encoded = line.encode(errors="replace")
        if self._taken - self._written < _MAX_WAITING:
            self._taken += len(encoded)
            self._lines.put(encoded)
        else:
            Written.lost += 1

    def close(self) -> bool:
        """Write the waiting lines. False = the reader of stderr did not take them within `_FLUSH_S`."""
        self._lines.put(None)
        self._thread.join(_FLUSH_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while lines := self._several():
            left = memoryview(b"".join(lines))
            self._written += len(left)
            try:
                while left:
                    left = left[os.write(self._descriptor, left) :]
            except OSError:
                Written.lost += len(lines)

    def _several(self) -> list[bytes]:
        """Wait for lines, and return those for one write; empty = the log was closed. One write per line would be too
        slow for a burst."""
        lines: list[bytes] = []
        size = 0
        while not self._ended and size < _WRITE and not (lines and self._lines.empty()):
            line = self._lines.get()
            if line is None:
                self._ended = True
            else:
                lines.append(line)
                size += len(line)
        return lines


@contextmanager
def in_background() -> Iterator[None]:
    """Write log lines to stderr from a thread until the context ends. Threads do not survive a fork, so enter this
    context after forking."""
    try:
        sys.stderr.flush()
        background = _Background(sys.stderr.fileno())
    except (AttributeError, OSError, ValueError, RuntimeError):  # stderr is closed or no file, or no thread starts
        yield
        return
    _Background.running = background
    try:
        yield
    finally:
        if background.close():
            _Background.running = None


class _Handler(logging.StreamHandler[TextIO]):
    def emit(self, record: logging.LogRecord) -> None:
        if _Background.running is None or self.stream is not sys.stderr:
            super().emit(record)
            return
        try:
            _Background.running.put(self.format(record) + self.terminator)
        except Exception:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Count the failure instead of reporting it: a report would fail in the same way."""
        Written.lost += 1


class RepeatFilter(logging.Filter):
    """Passes a repeating warning or error at most `BURST` times per `WINDOW_S` seconds. Different plugins and different
    kinds of their errors are different lines."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        #: Key of a message → start of its window, and lines in it so far.
        self._seen: OrderedDict[tuple[str, ...], tuple[float, int]] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        fields: Mapping[str, object] = vars(record).get("fields", {})
        # Our own messages are an argument of "%s"; in a library's line the constant part is the format.
        message = record.args[0] if record.msg == "%s" and isinstance(record.args, tuple) else record.msg
        texts = (message, *(fields.get(name, "") for name in ("endpoint", "problem", "resource")))
        plugin = fields.get("plugin", "")
        # The kind of an error is its text up to its own words, which may hold a prompt: "plugin x: KeyError".
        kind = _KIND.match(str(fields.get("reason", ""))[:MAX_VALUE]) if plugin else None
        key = (record.name, *(str(text)[:MAX_VALUE] for text in (*texts, plugin)), kind[0] if kind else "")
        now = self._clock()
        began, count = self._seen.pop(key, (now, 0))
        left_out = 0
        if now - began >= WINDOW_S:
            left_out = max(count - BURST, 0)
            began, count = now, 0
        self._seen[key] = (began, count + 1)
        if len(self._seen) > _MAX_KEYS:
            self._seen.popitem(last=False)
        if left_out:
            record.left_out = left_out
        return count < BURST


def _entry(record: logging.LogRecord) -> dict[str, Any]:
    """The fields of a line in their order, with values that are not formatted yet."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    entry: dict[str, Any] = {
        "time": f"{stamp}.{int(record.msecs):03d}Z",
        "level": record.levelname.lower(),
        "component": record.name.removeprefix(_ROOT + "."),
        **OWN_FIELDS,
        "msg": masked(record.getMessage())[:MAX_VALUE],
    }
    fields: Mapping[str, object] = vars(record).get("fields", {})
    for name, value in fields.items():
        entry[f"{name}_" if name in entry else name] = "[redacted]" if name.lower() in _SECRET else _short(value)
    left_out = vars(record).get("left_out")
    if left_out is not None:
        entry["left_out"] = left_out
    if record.exc_info and record.exc_info[0] is not None:
        entry["exc"] = masked(logging.Formatter().formatException(record.exc_info))[-_MAX_TRACEBACK:]
    return entry


def _short(value: object) -> object:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = masked(str(value))
    return text if len(text) <= MAX_VALUE else text[:MAX_VALUE] + "…"


class LogfmtFormatter(logging.Formatter):
    """`key=value` pairs, ASCII only; values are quoted as in JSON when they need it."""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(f"{name}={_logfmt(value)}" for name, value in _entry(record).items())


class JsonFormatter(logging.Formatter):
    """One JSON object per line, ASCII only."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_entry(record), separators=(",", ":"))


def _logfmt(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    text = str(value)
    plain = text.isascii() and text.isprintable() and text and not any(char in ' "=\\' for char in text)
    return text if plain else json.dumps(text)
