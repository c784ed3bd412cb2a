"""How every command behaves: help with examples, unknown files, NO_COLOR, completion."""

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fairlead.cli import main as cli
from fairlead.cli.app import load_command
from fairlead.cli.commands import COMMANDS
from fairlead.cli.options import complain, hint_of

#: A command line that names a file which is not there. `None`: the command reads no file.
UNKNOWN_FILE: dict[str, list[str] | None] = {
    "serve": ["serve", "nope.yaml"],
    "epp": ["epp", "--config-file", "nope.yaml"],
    "init": ["init", "127.0.0.1:1", "--no-probe", "--out", "nope/f.yaml"],
    "indexer": ["indexer", "nope.yaml"],
    "validate": ["validate", "nope.yaml"],
    "config show": ["config", "show", "nope.yaml"],
    "config explain": None,
    "config schema": None,
    "key": None,
    "envoy config": ["envoy", "config", "nope.yaml"],
    "stub": ["stub", "--engine", "nope.yaml"],
    "demo": None,
    "bench": ["bench", "localhost:1", "--workload", "nope.jsonl"],
    "explain": ["explain", "1", "nope"],
    "journal replay": ["journal", "replay", "nope"],
    "journal capture": ["journal", "capture", "nope", "--out", "out.jsonl"],
    "sim run": ["sim", "run", "nope.jsonl"],
    "plan": ["plan", "--workload", "nope.jsonl"],
    "sim workload show": ["sim", "workload", "show", "nope.jsonl"],
    "sim workload convert": ["sim", "workload", "convert", "nope.jsonl", "--out", "out.jsonl"],
    "sim workload generate": None,
    "sim workload kinds": None,
    "scheduler serve": ["scheduler", "serve", "nope.yaml"],
    "scheduler check": None,
    "scheduler proto": None,
    "tune": ["tune", "--observations", "nope.jsonl"],
    "sim quality": ["sim", "quality", "--policy", "nope.yaml"],
    "sim compare": ["sim", "compare", "--workload", "nope.jsonl"],
    "top": None,
    "doctor": ["doctor", "nope.yaml"],
}
#: More ways to name one.
MORE = [
    ["validate", "nope.yaml", "--json"],
    ["sim", "run", "agents", "--policy", "nope.yaml"],
    ["sim", "run", "agents", "--policy", "nope.py"],
    ["sim", "compare", "--against", "nope", "--policy", "default"],
    ["sim", "compare", "--workload", "agents", "--policy", "nope.py"],
    ["envoy", "config", "--tls-ca", "nope.pem"],
    ["plan", "--live", "nope"],
    ["plan", "--workload", "agents", "--engine", "nope.yaml"],
    ["scheduler", "serve", "nope:Policy"],
]
CASES = [arguments for arguments in (*UNKNOWN_FILE.values(), *MORE) if arguments]


def run(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    return int(stopped.value.code or 0)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert "Usage: fairlead" in shown
    text = shown[shown.index("Example") :]
    assert re.search(rf"^\W*fairlead {name}\b", text, re.MULTILINE), "an example begins with the command"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_parameter_is_explained(name: str) -> None:
    silent = [one.name for one in load_command(name, COMMANDS[name]).params if not one.help and not one.hidden]
    assert silent == []


def test_every_command_says_what_it_does_with_an_unknown_file() -> None:
    assert {*COMMANDS} <= {*UNKNOWN_FILE}


@pytest.mark.parametrize("arguments", CASES, ids=" ".join)
def test_an_unknown_file_is_one_clear_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ") and "nope" in line
    assert "Errno" not in line and "Traceback" not in line
    assert [*tmp_path.iterdir()] == [], "nothing was written"


def in_a_terminal(arguments: list[str], **environment: str) -> bytes:
    """What a command writes where stdout and stderr are a terminal."""
    parent, child = pty.openpty()
    plain = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "TERM")}
    process = subprocess.Popen(
        [sys.executable, "-m", "fairlead", *arguments],
        env={**plain, "TERM": "xterm-256color", **environment},
        stdin=subprocess.DEVNULL,
        stdout=child,
        stderr=child,
    )
    os.close(child)
    written = bytearray()
    while True:
        try:
            part = os.read(parent, 65536)
        except OSError:  # Linux says so when the other end is closed.
            break
        if not part:
            break
        written += part
    os.close(parent)
    assert process.wait(60) in (0, 2)
    return bytes(written)


TALKATIVE = [
    ["--help"],
    ["bench", "--help"],
    ["servee"],
    pytest.param(["sim", "run", "agents", "--requests", "20"], marks=pytest.mark.simulation),
    pytest.param(
        ["sim", "compare", "-w", "agents", "-p", "round-robin", "-p", "random", "--requests", "20", "--processes", "1"],
        marks=pytest.mark.simulation,
    ),
]


@pytest.mark.parametrize("arguments", TALKATIVE, ids=" ".join)
def test_no_color_means_no_escape_codes(arguments: list[str], tmp_path: Path) -> None:
    out = ["--out", str(tmp_path)] if arguments[:2] == ["sim", "compare"] else []
    plain = in_a_terminal([*arguments, *out], NO_COLOR="1", FORCE_COLOR="1")
    assert plain and b"\x1b" not in plain


def test_no_color_alone_is_enough() -> None:
    assert b"\x1b" not in in_a_terminal(["sim", "run", "agents", "--requests", "20"], NO_COLOR="1")


def test_a_terminal_gets_a_bar() -> None:
    """So the test before this one can fail."""
    assert b"\x1b[" in in_a_terminal(["sim", "run", "agents", "--requests", "20"])


def asked_by_bash(words: str) -> dict[str, str]:
    """The environment in which bash asks what it may offer for the last word."""
    return {"_FAIRLEAD_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("fairlead sim workload ge", "generate"),
        ("fairlead sim run --kv", "--kv-lag-ms"),
        ("fairlead sim run ag", "agents"),
        ("fairlead sim compare -w ag", "agents"),
        ("fairlead sim run agents --policy round-", "round-robin"),
        ("fairlead sim run agents --engine llama-8b-l", "llama-8b-l40s"),
        ("fairlead sim workload generate inter", "interactive-chat"),
        ("fairlead bench localhost:1 --workload conv", "conversation"),
        ("fairlead bench localhost:1 -w agents", "agents"),
        ("fairlead config explain gateway.re", "gateway.retry"),
        ("fairlead doctor --only endp", "endpoints"),
        ("fairlead top --sort wai", "waiting"),
        ("fairlead envoy config --retry he", "hedge"),
    ],
)
def test_completion(
    typed: str, offered: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in asked_by_bash(typed).items():
        monkeypatch.setenv(name, value)
    assert run([]) == 0
    assert offered in capsys.readouterr().out.split()


def test_completion_in_a_process() -> None:
    command = [sys.executable, "-c", "from fairlead.cli.main import main; main()"]
    done = subprocess.run(command, env=os.environ | asked_by_bash("fairlead s"), capture_output=True, text=True)
    assert "sim" in done.stdout.split()


def test_completion_can_be_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "--install-completion" in shown and "--show-completion" in shown


@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        ("sim workload kinds > /dev/full", 1, "error: No space left on device\n"),
        ("sim run cold-bursts --requests 1 | true; exit ${PIPESTATUS[0]}", 1, ""),
        ("sim run cold-bursts --requests 1 --csv /dev/null > /dev/null", 0, ""),
        ("--help >&-", 0, ""),
        ("sim run cold-bursts --requests 1 <&- >&-", 0, ""),
        ("validate nowhere.yaml <&- >&- 2>&-", 2, ""),
    ],
)
def test_where_the_output_goes(shell: str, code: int, said: str) -> None:
    ended = subprocess.run(["bash", "-c", f"{sys.executable} -m fairlead {shell}"], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (code, said)


def test_a_terminal_without_utf8_shows_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(SystemExit):
        cli.main(["validate", "nope.yaml"])
    stream.write("✓ all is well")
    stream.seek(0)
    assert stream.read() == "? all is well"


def test_errors_show_no_password_of_a_url(capsys: pytest.CaptureFixture[str]) -> None:
    complain("URL: 'http://me:s3cret@host/v1?token=s3cret' is not http://HOST:PORT")
    assert capsys.readouterr().err == "error: URL: 'http://me:***@host/v1?token=***' is not http://HOST:PORT\n"


@pytest.mark.parametrize(
    ("why", "hint"),
    [
        ("self-signed certificate in certificate chain", "SSL_CERT_FILE"),
        ("unable to get local issuer certificate", "SSL_CERT_FILE"),
        ("certificate has expired", "a certificate that is valid"),
        ("Hostname mismatch, certificate is not valid for '10.0.0.1'.", "a name that is in there"),
    ],
)
def test_only_for_an_unknown_authority_a_file_of_authorities_helps(why: str, hint: str) -> None:
    assert hint in hint_of(f"[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: {why} (_ssl.c:1006)")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["scheduler", "serve", "default", "--listen", "127.0.0.1:99999"], "a port up to 65535, or unix:/PATH"),
        (["scheduler", "check", "127.0.0.1:99999"], "'127.0.0.1:99999' is neither host:port"),
        (["stub", "--engine", "random.yaml"], "random.yaml: the text is not valid UTF-8"),
        (["sim", "run", "random.jsonl"], "random.jsonl: is in no known format"),
        (["sim", "run", "agents", "--kv-tokens", "5"], "no whole block of 64 tokens"),
        (["sim", "quality", "--out", "random.yaml"], "'random.yaml' is a file"),
        (["sim", "workload", "generate", "conversation", "-n", "1", "--set", "turns=x"], "turns: expected `float`"),
        (["sim", "workload", "generate", "conversation", "-n", "1", "--arrivals", "bursty", "--cv", "inf"], "not inf"),
        (["sim", "workload", "generate", "conversation", "--seconds", "inf"], "arrivals never end"),
        (["sim", "run", "agents", "--kv-tokens", "99999999999999"], "less than or equal to 100000000"),
        (["plan", "--workload", "interactive-chat", "--seconds", "5", "--warm-up", "foo"], "--warm-up foo: expected"),
        (["plan", "--live", "http://[::1"], "--live: expected HOST:PORT or a URL"),
    ],
)
def test_what_is_wrong_is_named(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("random.yaml", "random.jsonl"):
        Path(name).write_bytes(b"\xf2\x00\xff")
    assert run(arguments) == 2
    shown = capsys.readouterr().err
    assert said in shown and "Traceback" not in shown
