"""Log lines: their form, what they never show, and how repetition is held back."""

import io
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from subprocess import PIPE

import pytest

from fairlead.server.observe import log


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def lines(stream: io.StringIO) -> list[str]:
    """All lines without their time."""
    return [line.split(" ", 1)[1] for line in stream.getvalue().splitlines()]


def test_logfmt(stream: io.StringIO) -> None:
    log.setup("info", "logfmt", stream)
    log.get("scrape").info("endpoint up", endpoint="default/vllm-0", count=3, fresh=True, age=0.5, why=None, empty="")
    line = stream.getvalue()
    assert line.startswith("time=20")
    assert line.split(" ", 1)[0].endswith("Z")
    assert lines(stream) == [
        'level=info component=scrape msg="endpoint up" '
        'endpoint=default/vllm-0 count=3 fresh=true age=0.5 why=null empty=""'
    ]


def test_one_event_stays_one_line(stream: io.StringIO) -> None:
    log.setup("info", "logfmt", stream)
    log.get("x").info("odd", value='a\nb "c" \\ = \x1b[31m é\u2028')
    assert lines(stream) == [r'level=info component=x msg=odd value="a\nb \"c\" \\ = \u001b[31m \u00e9\u2028"']


def test_json(stream: io.StringIO) -> None:
    log.setup("debug", "json", stream)
    log.get("x").debug("odd\nevent", value=float("1.5"), names=["é"], msg="mine")
    entry = json.loads(stream.getvalue())
    assert entry.pop("time").endswith("Z")
    assert entry == {
        "level": "debug",
        "component": "x",
        "msg": "odd\nevent",
        "value": 1.5,
        "names": "['é']",
        "msg_": "mine",
    }


@pytest.mark.parametrize("form", ["logfmt", "json"])
def test_passwords_in_urls_are_masked(stream: io.StringIO, form: str) -> None:
    log.setup("info", form, stream)
    url = "http://user:s3cret@indexer:1/"
    log.get("x").info("asking", url=url, reason=f"{url}: refused")
    logging.getLogger("library").warning("no answer from %s", url + "x" * log.MAX_VALUE)
    try:
        raise ValueError(url)
    except ValueError:
        logging.getLogger("library").exception("failed")
    assert "s3cret" not in stream.getvalue()
    assert stream.getvalue().count("http://user:***@indexer:1/") == 4


def test_levels(stream: io.StringIO) -> None:
    log.setup("warning", "logfmt", stream)
    logger = log.get("x")
    logger.debug("no")
    logger.info("no")
    logger.warning("yes")
    logger.error("yes too")
    assert lines(stream) == ["level=warning component=x msg=yes", 'level=error component=x msg="yes too"']


def test_unknown_level_or_format() -> None:
    with pytest.raises(ValueError, match="unknown log level 'loud'"):
        log.setup("loud")
    with pytest.raises(ValueError, match="unknown log format 'xml'"):
        log.setup("info", "xml")


def test_what_users_said_is_never_shown(stream: io.StringIO) -> None:
    log.setup("info", "logfmt", stream)
    log.get("x").info(
        "request", prompt="secret", Body=b"secret", messages=["secret"], authorization="secret", model="m"
    )
    assert "secret" not in stream.getvalue()
    assert "model=m" in stream.getvalue()


def test_values_are_cut(stream: io.StringIO) -> None:
    log.setup("info", "json", stream)
    log.get("x").info("y" * 100_000, value="z" * 100_000)
    assert len(stream.getvalue()) < 1200


def test_exceptions(stream: io.StringIO) -> None:
    log.setup("info", "json", stream)
    try:
        raise RuntimeError("broken")
    except RuntimeError as error:
        log.get("x").error("it failed", exc=error)
    entry = json.loads(stream.getvalue())
    assert entry["msg"] == "it failed"
    assert entry["exc"].endswith("RuntimeError: broken")


def test_libraries_come_out_the_same_way(stream: io.StringIO) -> None:
    log.setup("info", "logfmt", stream)
    logging.getLogger("asyncio").warning("task %s took %d ms", "x", 5)
    logging.getLogger("asyncio").info("chatter")
    assert lines(stream) == ['level=warning component=asyncio msg="task x took 5 ms"']


class Repeated:
    """A filter with a clock of our own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.filter = log.RepeatFilter(lambda: self.now)

    def passes(self, message: str = "m", level: int = logging.WARNING, **fields: object) -> bool | int:
        """Whether it passes; the number left out, if the record tells of any."""
        record = logging.LogRecord("fairlead.x", level, "", 0, "%s", (message,), None)
        record.fields = fields
        passed = self.filter.filter(record)
        return getattr(record, "left_out", passed)


def test_repetition_is_held_back_and_owned_up_to() -> None:
    repeated = Repeated()
    assert [repeated.passes() for _ in range(8)] == [True] * log.BURST + [False] * (8 - log.BURST)
    assert repeated.passes("another") is True
    assert repeated.passes(endpoint="a") is True
    assert repeated.passes(problem="the file names no endpoints") is True
    assert repeated.passes(resource="pods") is True
    repeated.now = log.WINDOW_S
    assert repeated.passes() == 8 - log.BURST
    assert repeated.passes() is True


def test_other_plugins_and_other_errors_of_a_plugin_are_told_but_not_each_text() -> None:
    repeated = Repeated()
    reasons = [f"plugin a: RuntimeError: prompt {number} (a.py, line {number})" for number in range(8)]
    passed = [repeated.passes(plugin="a", reason=reason) for reason in reasons]
    assert passed == [True] * log.BURST + [False] * (8 - log.BURST)
    assert repeated.passes(plugin="a", reason="plugin a: ValueError: NaN or -inf for 2 of 2 slots") is True
    assert repeated.passes(plugin="a", reason="plugin a: RuntimeError") is False
    assert repeated.passes(plugin="b", reason="plugin b: RuntimeError: prompt") is True


def test_below_warning_nothing_is_held_back() -> None:
    repeated = Repeated()
    assert all(repeated.passes(level=logging.INFO) for _ in range(100))


def test_what_is_remembered_is_bounded(bytes_kept: Callable[[Callable[[], object]], int]) -> None:
    def filled(messages: int) -> Repeated:
        repeated = Repeated()
        for i in range(messages):
            repeated.passes(f"m{i}", problem=f"{i} " * 1000)
        return repeated

    assert bytes_kept(lambda: filled(10_000)) < 2 * bytes_kept(lambda: filled(1_000))


def test_library_lines_that_differ_only_in_arguments_are_one_message() -> None:
    repeated = Repeated()
    passed = 0
    for i in range(50):
        record = logging.LogRecord("aiohttp", logging.ERROR, "", 0, "client %s failed", (i,), None)
        passed += repeated.filter.filter(record)
    assert passed == log.BURST


def process(lines: int) -> subprocess.Popen[str]:
    """A process that logs that many lines in the background, and then prints how many were lost."""
    code = (
        "import sys\n"
        "from fairlead.server.observe import log\n"
        "log.setup('info', 'logfmt')\n"
        "log.get('x').info('first')\n"
        "with log.in_background():\n"
        f"    for number in range({lines}):\n"
        "        log.get('x').info('line', number=number)\n"
        "    print('went on', flush=True)\n"
        "print(log.Written.lost)\n"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=PIPE, stderr=PIPE, text=True)


def test_a_reader_that_stalls_stops_nothing_and_what_it_misses_is_counted() -> None:
    with process(120_000) as running:
        try:
            running.wait(300)  # nobody reads stderr meanwhile
        finally:
            running.kill()
        assert running.returncode == 0
        assert running.stdout is not None and running.stderr is not None
        went_on, lost = running.stdout.read().splitlines()
        written = running.stderr.read().splitlines()
    assert went_on == "went on"
    assert 30_000 < int(lost) < 100_000, "4 MiB wait"
    assert [line.rpartition("=")[2] for line in written[:101]] == ["first", *map(str, range(100))]


@pytest.mark.parametrize("lines", [3_000, 30_000])
def test_lines_in_the_background_are_all_written_at_the_end(lines: int) -> None:
    with process(lines) as running:
        out, written = running.communicate(timeout=300)
    assert out.splitlines() == ["went on", "0"]
    assert [line.rpartition("=")[2] for line in written.splitlines()] == ["first", *map(str, range(lines))]


def test_without_stderr_nothing_is_written_in_the_background(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    log.setup()
    with log.in_background():
        log.get("x").info("here")
        assert "msg=here" in stream.getvalue()
    monkeypatch.setattr(sys, "stderr", None)
    with log.in_background():
        log.get("x").info("nowhere")


def test_without_a_thread_lines_are_written_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def start(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    log.setup()
    with log.in_background():
        log.get("x").info("here")
        assert "msg=here" in capfd.readouterr().err


def test_lines_of_a_worker_say_which_it_is(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "OWN_FIELDS", {})
    log.setup("info", "logfmt", stream)
    log.name_worker(2)
    log.get("x").info("word", worker="not this")
    assert lines(stream) == ['level=info component=x worker=2 msg=word worker_="not this"']
