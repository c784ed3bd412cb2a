"""The exceptions, one per party at fault. A refused request is a value (`instructions.Reject`), not an exception."""

from errno import EADDRINUSE, EADDRNOTAVAIL

#: Beginning of the admin port's answer to paths that it does not serve, so that misdirected clients recognise it.
ADMIN_PORT = "this is Fairlead's admin port"
#: Why no process or thread can be started. The system does not tell the two apart.
PROCESS_LIMIT = (
    "the limit of processes is reached (ulimit -u, Docker's --pids-limit, systemd's TasksMax), or that of memory "
    "(ulimit -v); raise it"
)


class FairleadError(Exception):
    """Base of all errors that Fairlead raises on purpose."""


class ConfigError(FairleadError):
    """The operator's configuration is wrong. `path`: a JSON path such as `$.scorers[1].weight`; `$` (the whole
    document) is left out of the message."""

    def __init__(self, message: str, path: str = "$", source: str = "") -> None:
        self.message = message
        self.path = path
        self.source = source
        super().__init__(": ".join(part for part in (source, path, message) if part not in ("", "$")))


class Unavailable(ConfigError):
    """What the configuration names cannot be used now, such as a port that another process has. Trying again with the
    same configuration may help."""


def cannot_listen(where: str, error: OSError, path: str = "$") -> ConfigError:
    """Return the error for an address on which listening failed. Without an error code, which gRPC does not report, the
    port is assumed to be taken."""
    kind = Unavailable if error.errno in (None, EADDRINUSE, EADDRNOTAVAIL) else ConfigError
    if error.errno == EADDRINUSE:
        return kind(f"cannot listen on {where}: the port is taken; stop what listens there, or set a free one", path)
    return kind(f"cannot listen on {where}: {error.strerror or error}", path)


class ClientError(FairleadError):
    """A client's request is wrong. It is answered with `status`, in the format of its API."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        super().__init__(message)


class EngineError(FairleadError):
    """A model server misbehaved: unreachable, an unreadable metrics page, a malformed reply."""

    def __init__(self, endpoint: str, message: str) -> None:
        self.endpoint = endpoint
        super().__init__(f"{endpoint}: {message}")


class PluginError(FairleadError):
    """A plugin could not be loaded, or raised when it was called."""

    def __init__(self, plugin: str, message: str) -> None:
        self.plugin = plugin
        self._message = message
        super().__init__(f"plugin {plugin}: {message}")

    def with_note(self, note: str) -> "PluginError":
        return PluginError(self.plugin, f"{self._message}; {note}")

    def __reduce__(self) -> tuple[type["PluginError"], tuple[str, str]]:  # from processes of simulations
        return PluginError, (self.plugin, self._message)


#: Parts of paths of files whose lines say nothing about a plugin: this package, the import machinery, numpy.
_PASSED = (__file__.rpartition("core/")[0], "importlib", "/numpy/")


def described(error: BaseException, most: int | None = None) -> str:
    """An exception that a plugin raised: its type and text, and the line of the plugin's file. `most`: characters of
    type and text, at most."""
    error = error.__cause__ if isinstance(error, Stray) and error.__cause__ is not None else error
    file, line, trace = "", 0, error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name == file or not (file or any(part in name for part in _PASSED)):
            file, line = name, trace.tb_lineno
        trace = trace.tb_next
    where = f" ({file.rpartition('/')[2]}, line {line})" if file else ""
    return f"{type(error).__name__}: {error}"[:most] + where


class NeverReturned(BaseException):
    """Raised in a call of a plugin to end it. Not an `Exception`, which plugins may catch in their loops."""

    def __init__(self) -> None:
        super().__init__("did not return and was interrupted")


def hung(error: BaseException) -> bool:
    """Whether a plugin failed because it did not return, whatever it made of that."""
    link: BaseException | None = error
    passed = set[int]()
    while link is not None and id(link) not in passed:  # a plugin may have linked them in a circle
        if isinstance(link, NeverReturned):
            return True
        passed.add(id(link))
        link = link.__context__
    return False


#: Seconds for which a policy that did not return twice is not called again: each call holds up all requests.
REST_S = 60.0


def rests_until(before: float, now: float) -> float:
    """Until when a policy rests that did not return at `now`. `before`: what this returned last; -inf = it never hung.
    All are clock seconds. The first time may be chance, so it does not rest; one that hangs within `REST_S` of that or
    of its last rest does."""
    return now + REST_S if now < before + REST_S else now


class EndsThread(BaseException):
    """Raised in a thread to end it. A plugin that it runs does not fail by this."""


class Stray(Exception):
    """A plugin raised its cause, which is no `Exception`, such as `asyncio.CancelledError`. That would end more than
    the call."""


#: What the call of a plugin may raise. `sys.exit` in a plugin must not end the scheduler.
PLUGIN_FAILURES = (Exception, SystemExit, NeverReturned)


#: What passes through a plugin's call without being its failure. Ctrl+C may come as a plugin's own `raise`: that of
#: `asyncio.run`.
PASSING = (EndsThread, KeyboardInterrupt)


def of_plugin(plugin: str, error: BaseException) -> PluginError:
    """The error as one of this plugin. A `PluginError` is returned as it is, because it names its own."""
    return error if isinstance(error, PluginError) else PluginError(plugin, described(error))


class ProtocolError(FairleadError):
    """The peer broke a wire protocol (HTTP/2, gRPC, ext_proc). `code` is the HTTP/2 or gRPC error code to answer."""

    def __init__(self, message: str, code: int = 1) -> None:
        self.code = code
        super().__init__(message)
