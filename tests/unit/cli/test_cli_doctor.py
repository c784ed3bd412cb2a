"""`fairlead doctor` as a command: exit codes, and what goes where."""

import json
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from certificates_made import make_pair

from fairlead.cli.main import main
from fairlead.doctor.checks import CHECKS


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    return int(ended.value.code or 0)


@pytest.fixture
def config(tmp_path: Path) -> str:
    """One endpoint, where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file = tmp_path / "fairlead.yaml"
    file.write_text(f"endpoints: ['127.0.0.1:{port}']\ngateway: none\nadmin: {{port: 0}}\n")
    return str(file)


def test_findings_are_exit_code_1(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(config, "--only", "endpoints") == 1
    said = capsys.readouterr()
    assert "critical  endpoints.unreachable" in said.out and "refused" in said.out
    assert "\x1b" not in said.out
    assert said.err == ""


def test_nothing_found_is_exit_code_0(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(config, "--only", "roles, limits") == 0
    assert capsys.readouterr().out.endswith("2 checks: nothing found\n")


def test_json_is_for_machines(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(config, "--only", "endpoints", "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert [one["code"] for one in told["findings"]] == ["endpoints.unreachable"]


def test_the_list_needs_no_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--list") == 0
    said = capsys.readouterr().out
    assert [check.name for check in CHECKS if f"{check.name}: " not in said] == []
    assert "critical  endpoints.unreachable" in said


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "name the configuration"),
        (("CONFIG", "--only", "endpoint"), "there is no check 'endpoint'"),
        (("CONFIG", "--admin", "127.0.0.1:9"), "no scheduler at http://127.0.0.1:9"),
        (("CONFIG", "--gateway-admin", "ftp://x"), "--gateway-admin: expected HOST:PORT or a URL"),
        (("CONFIG", "--gateway", "http://[::1"), "--gateway: expected HOST:PORT or a URL"),
        (("CONFIG", "--gateway", "127.0.0.1:99999"), "--gateway: expected HOST:PORT or a URL"),
        (("CONFIG", "--admin", "http://127.0.0.1:9"), "--admin is the URL of its admin port"),
        (("CONFIG", "--gateway-admin", "http://127.0.0.1:9"), "--gateway-admin is the URL of its admin page"),
        (
            ("CONFIG", "--gateway", "http://127.0.0.1:9", "--gateway-admin", "http://127.0.0.1:9"),
            "no Envoy at http://127.0.0.1:9",
        ),
        (("missing.yaml",), "missing.yaml"),
    ],
)
def test_what_cannot_run_is_exit_code_2(
    arguments: tuple[str, ...], complaint: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*(config if one == "CONFIG" else one for one in arguments)) == 2
    assert complaint in capsys.readouterr().err


def test_a_certificate_of_an_unknown_authority_is_told_with_what_to_do(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_pair(tmp_path, "20200101000000Z", "20900101000000Z")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def shake_hands() -> None:
            with listener.accept()[0] as connection, suppress(OSError):
                context.wrap_socket(connection, server_side=True)

        port = listener.getsockname()[1]
        with ThreadPoolExecutor(1) as pool:
            pool.submit(shake_hands)
            assert run(config, "--admin", f"https://127.0.0.1:{port}") == 2
    assert "environment variable SSL_CERT_FILE" in capsys.readouterr().err


def test_a_configuration_with_problems_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text("endpoints: []\nmetrix: {}\n")
    assert run(str(file)) == 2
    assert "metrix" in capsys.readouterr().err
