"""The entry point: runs a command, and turns errors into one line and an exit code."""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from errno import EAGAIN, EDQUOT, EIO, EMFILE, ENFILE, ENOENT, ENOSPC, EROFS
from io import TextIOWrapper
from typing import NoReturn

from fairlead.cli.commands import overview

#: Errors of the machine that do not name a file: disks, limits, no directory for temporary files or to work in.
_OF_MACHINE = (EAGAIN, EDQUOT, EIO, EMFILE, ENFILE, ENOENT, ENOSPC, EROFS)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit. Expected errors become one line on stderr, others a traceback. SIGTERM ends a command
    and what it started, as Ctrl-C does; the exit code is 143, or 130 for Ctrl-C.

    With NO_COLOR in the environment nothing is drawn: neither colours nor bars, no escape codes at all.
    """
    _open_closed()
    given = sys.argv[1:] if arguments is None else [*arguments]
    if given == ["--help"]:
        _show_overview()
    # Otherwise pydantic looks for its plugins in all installed packages, which takes 6 % of the time of `validate`.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from fairlead.cli.basics import FAILED, INTERRUPTED, WRONG_INPUT
    from fairlead.core.errors import PROCESS_LIMIT, ConfigError, FairleadError, PluginError, Unavailable

    if os.environ.get("NO_COLOR"):
        os.environ["TERM"] = "dumb"  # Rich and click look at TERM; NO_COLOR alone leaves bold, dim and cursor codes.
    for size in ("COLUMNS", "LINES"):
        if os.environ.get(size) == "0":
            del os.environ[size]  # it is not known, and Rich would print empty tables and screens
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows `?`
    with _terminable() as terminated:
        try:
            _run(given)
        except FairleadError as error:
            wrong = isinstance(error, ConfigError | PluginError) and not isinstance(error, Unavailable)
            _fail(error, WRONG_INPUT if wrong else FAILED)
        except BrokenPipeError:
            _end_unread()
        except OSError as error:
            if error.filename is None and error.errno not in _OF_MACHINE:
                raise
            _fail(error, FAILED)
        except RuntimeError as error:
            if "can't start new thread" not in str(error):
                raise
            _fail(PROCESS_LIMIT, FAILED)
        except (KeyboardInterrupt, SystemExit) as ended:
            if isinstance(ended, SystemExit) and ended.code != INTERRUPTED:
                raise
            sys.stderr.write("terminated\n" if terminated else "interrupted\n")
            sys.exit(128 + signal.SIGTERM if terminated else INTERRUPTED)


def _open_closed() -> None:
    """Open /dev/null for standard files that are closed. Otherwise sockets would get their numbers, and this process
    and its children would write into those."""
    streams = vars(sys)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if streams[name] is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest one that is free
            os.set_inheritable(number, True)
            streams[name] = os.fdopen(number, mode)


def _show_overview() -> NoReturn:
    """Print what commands there are, without importing typer, which takes three times as long."""
    try:
        sys.stdout.write(overview() + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _end_unread()
    except OSError as error:
        sys.exit(f"error: {error}")
    sys.exit()


def _end_unread() -> NoReturn:
    """End without a word, because the reader of the output (such as `head`) has ended."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python complains when it flushes its output at the end
    sys.exit(1)


def _run(given: list[str]) -> None:
    files = [word for word in given[1:] if word != "--json"]
    if given[:1] == ["validate"] and len(files) < 2 and not any(word.startswith("-") for word in files):
        # `validate` runs without importing typer, which would take a quarter of its time.
        from pathlib import Path

        from fairlead.cli.basics import DEFAULT_FILE, config_file
        from fairlead.cli.validate import run_validate

        code = run_validate(config_file(Path(*files) if files else DEFAULT_FILE), "--json" in given)
        sys.stdout.flush()
        sys.exit(code)
    import typer

    from fairlead.cli.app import build_app

    typer.main.get_command(build_app())(args=given, prog_name="fairlead")


def _fail(problem: str | Exception, code: int) -> NoReturn:
    from fairlead.cli.options import complain

    complain(problem)
    sys.exit(code)


@contextmanager
def _terminable() -> Iterator[list[int]]:
    """Make SIGTERM act like Ctrl-C, also in an event loop, until a command sets a handler of its own. Yields a list
    that is empty until SIGTERM arrives."""
    came: list[int] = []

    def terminate(number: int, _: object) -> None:
        came.append(number)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells start background jobs with SIGINT ignored
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    try:
        before = signal.signal(signal.SIGTERM, terminate)
    except ValueError:  # only the main thread can handle signals, and this is another
        yield came
        return
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)
