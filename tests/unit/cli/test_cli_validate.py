"""`fairlead validate`: what it prints, and its exit code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from certificates_made import make_pair

from fairlead.cli.main import main

EXAMPLES = Path(__file__).parents[3] / "examples"


def validate(file: Path, *options: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["validate", str(file), *options])
    return int(stopped.value.code or 0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("minimal", "valid. Policy default: 4 filters, cost-model. Endpoints: 3."),
        ("documents", "valid. Policy custom: 6 filters, 2 scorers, picker top-k. Endpoints: 2."),
        ("file-discovery", "valid. Policy default: 4 filters, cost-model. Endpoints: 3."),
    ],
)
def test_examples_are_valid(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = EXAMPLES / f"{name}.yaml"
    assert validate(file) == 0
    *notes, last = capsys.readouterr().out.splitlines()
    assert last == f"{file}: {said}"
    assert all(note.startswith("note: ") for note in notes)


def test_every_problem_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("endpoints: [localhost]\nscorers:\n- type: load-aware\n  wieght: 3\nlog: {level: 1}\n")
    assert validate(file) == 2
    assert capsys.readouterr().out.splitlines() == [
        f"{file}:1: $.endpoints[0]: `port` is missing (write it behind the address: 10.0.0.1:8000)",
        f"{file}:4: $.scorers[0].wieght: unknown field 'wieght' (did you mean 'weight'?)",
        f"{file}:5: $.log.level: expected one of debug, info, warning, error; got 1",
        "3 problems",
    ]


def test_files_that_are_not_here_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, there = tmp_path / "f.yaml", tmp_path / "there"
    there.mkdir()
    file.write_text(
        "endpoints: ['10.0.0.1:1']\ntokens:\n  models:\n    m: {modelPath: there, tokenizerFile: gone.json}\n"
        "kvEvents: {port: 5557, snapshot: later.bin}\njournal: {path: later}\nmetrics: {tokenFile: gone}\n"
        "shadows: {policies: [{name: a, scheduler: {address: '127.0.0.1:1', tls: {caFile: gone}}}]}\n"
    )
    assert validate(file) == 0
    *notes, _ = capsys.readouterr().out.splitlines()
    assert {note for note in notes if "there is no" in note} == {
        f"note: {file}:4: $.tokens.models.m.tokenizerFile: there is no {tmp_path / 'gone.json'} on this machine",
        f"note: {file}:7: $.metrics.tokenFile: there is no {tmp_path / 'gone'} on this machine",
        f"note: {file}:8: $.shadows.policies[0].scheduler.tls.caFile: there is no {tmp_path / 'gone'} on this machine",
    }


def test_one_of_a_kind_is_counted_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(
        "endpoints: ['10.0.0.1:1']\nfilters: [{type: role}]\nbuiltinFilters: false\nscorers: [{type: queue}]\n"
    )
    assert validate(file) == 0
    assert "Policy custom: 1 filter, 1 scorer, picker top-k." in capsys.readouterr().out


def test_what_is_wrong_as_a_whole_has_no_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("endpoints: [\n")
    assert validate(file) == 2
    assert capsys.readouterr().out.startswith(f"{file}:1: not valid YAML")


@pytest.mark.parametrize(
    ("more", "where", "said"),
    [
        ("kvEvents: {bind: 'tcp://*:5557'}", "{}:2: $.kvEvents.bind: ", "workers cannot listen at one address"),
        ("journal: {path: j, maxBytes: 3Mi}", "{}:2: $.journal.maxBytes: ", "4 workers share it"),
        ("gateway: none", "--workers: ", "workers need the embedded gateway"),
    ],
)
def test_what_workers_cannot_share_is_a_problem_with_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str, where: str, said: str
) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(f"endpoints: ['10.0.0.1:1']\n{more}\n")
    assert validate(file) == 0
    capsys.readouterr()
    assert validate(file, "--workers", "4") == 2
    out = capsys.readouterr().out
    assert out.startswith(where.format(file) + said)
    assert out.endswith("\n1 problem\n")
    file.write_text("endpoints: ['10.0.0.1:1']\n")
    assert validate(file, "--workers", "4", "--json") == 0


def test_notes_do_not_make_it_invalid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(
        "endpoints: ['10.0.0.1:1']\ninferenceExtension: {replicas: 2, pluginsCustomConfig: {filters: []}}\n"
    )
    assert validate(file) == 0
    out = capsys.readouterr().out
    assert f"note: {file}:2: $.inferenceExtension.replicas: belongs to the Helm chart" in out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            "models: [{name: base}]",
            "rewrites: 0. Requests for other names get 404, also for mine, v2 (models.unmatched).\n",
        ),
        ("models: [{name: base}, {name: v2}, {name: x, targets: {mine: 1}}]", "Requests for other names get 404 (mod"),
        ("models: {list: [{name: base}], unmatched: pass}", "rewrites: 0.\n"),
    ],
)
def test_names_that_are_refused_are_said(
    tmp_path: Path, more: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "f.yaml"
    labels = "{address: '10.0.0.%d:80', labels: {model-id: %s, lora-adapters: mine}}"
    file.write_text(f"endpoints: [{labels % (1, 'base')}, {labels % (2, 'v2')}]\n{more}\n")
    assert validate(file) == 0
    assert said in capsys.readouterr().out


def test_the_endpoints_file_is_read_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, endpoints = tmp_path / "f.yaml", tmp_path / "e.yaml"
    file.write_text("endpoints: {file: e.yaml}")
    assert validate(file) == 2
    assert f"{file}:1: $.endpoints.file: {endpoints}: cannot be read: No such file" in capsys.readouterr().out
    endpoints.write_text("endpoints:\n- 10.0.0.1:1\n- localhost:nonsense\n")
    assert validate(file) == 2
    assert f"{endpoints}:3: $.endpoints[1]: 'nonsense' is not a port (1 to 65535)" in capsys.readouterr().out


def test_a_duplicate_in_a_followed_file_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, endpoints = tmp_path / "f.yaml", tmp_path / "e.yaml"
    file.write_text("endpoints: {file: e.yaml}")
    endpoints.write_text("endpoints:\n- {name: a, address: '10.0.0.1:1'}\n- {name: a, address: '10.0.0.2:1'}\n")
    assert validate(file) == 2
    assert f"{endpoints}:3: $.endpoints[1]: default/a is listed twice (leave one out" in capsys.readouterr().out


MYSTERY = "{address: '10.0.0.%d:1', labels: {llm-d.ai/engine-type: mystery}}"


def test_an_engine_that_nobody_knows_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, endpoints = tmp_path / "f.yaml", tmp_path / "e.yaml"
    listed = f"endpoints:\n- 10.0.0.1:1\n- {MYSTERY % 2}\n- {MYSTERY % 3}\n"
    file.write_text(listed)
    assert validate(file) == 0
    out = capsys.readouterr().out
    said = "endpoint 10.0.0.2:1 and 1 more: the label names the engine 'mystery', which is not known"
    engines = "llamacpp, lmdeploy, sglang, tgi, triton, triton-tensorrt-llm, trtllm-serve, vllm"
    known = f"metrics are read as those of vllm (known: {engines};"
    assert f"note: {file}:3: $.endpoints[1]: {said}; {known}" in out and "valid." in out
    endpoints.write_text(listed)
    file.write_text("endpoints: {file: e.yaml}")
    assert validate(file) == 0
    assert f"note: {file}:1: $.endpoints.file: {endpoints}: {said}" in capsys.readouterr().out
    file.write_text(f"{listed}metrics: {{engines: {{mystery: {{waiting: w, running: r, kvUsage: k}}}}}}\n")
    assert validate(file) == 0
    assert "mystery" not in capsys.readouterr().out


def test_a_plugin_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fairlead.plugins.scorers.load import LoadAware

    def refuse(self: LoadAware, params: object, name: str = "") -> None:
        raise ValueError("not today")

    monkeypatch.setattr(LoadAware, "__init__", refuse)
    file = tmp_path / "f.yaml"
    file.write_text("endpoints: ['10.0.0.1:1']\nscorers:\n- type: load-aware\nlog: {level: loud}\n")
    assert validate(file) == 2
    problem, other = capsys.readouterr().out.splitlines()[:2]
    assert problem.startswith(f"{file}:3: $.scorers[0]: plugin load-aware") and "ValueError: not today" in problem
    assert "$.log.level" in other


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validate(tmp_path / "nope.yaml") == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'nope.yaml'}: cannot be read: No such file or directory\n"


def test_a_certificate_that_does_not_fit_its_key_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "certs").mkdir()
    file = tmp_path / "f.yaml"
    file.write_text("endpoints: ['10.0.0.1:1']\ngateway: none\nextProc: {tls: {certDir: certs}}\n")
    assert validate(file) == 0, "files that are missing may be elsewhere"
    make_pair(tmp_path / "certs", "20200131235959Z", "20990131235959Z")
    assert validate(file) == 0
    (tmp_path / "other").mkdir()
    make_pair(tmp_path / "other", "20200131235959Z", "20990131235959Z")
    (tmp_path / "other" / "tls.key").replace(tmp_path / "certs" / "tls.key")
    capsys.readouterr()
    assert validate(file) == 2
    said = capsys.readouterr().out
    assert "$.extProc.tls.certDir: TLS files" in said and "key values mismatch" in said


@pytest.mark.parametrize(
    ("more", "files", "said"),
    [
        ("replicas: {via: 'valkeys://h:1/0', certDir: there}", {}, ""),
        (
            "replicas: {via: 'valkeys://h:1/0', certDir: there}",
            {"tls.crt": "x", "tls.key": "x"},
            "$.replicas.certDir: ",
        ),
        ("replicas: {via: 'valkeys://h:1/0', caFile: there/ca}", {"ca": "x"}, "$.replicas.caFile: cannot use"),
        ("scheduler: {address: 'h:1', tls: {certDir: there}}", {}, ""),
        (
            "scheduler: {address: 'h:1', tls: {certDir: there}}",
            {"tls.crt": "x", "tls.key": "x"},
            "$.scheduler.tls.certDir: ",
        ),
        ("metrics: {tls: {caFile: there/ca}}", {"ca": ""}, "$.metrics.tls.caFile: cannot use"),
        ("admin: {tokenFile: there/token}", {"token": ""}, "$.admin.tokenFile: "),
        ("admin: {tokenFile: there}", {}, "$.admin.tokenFile: cannot read"),
        ("gateway: {upstreamTokenFile: there/token}", {"token": ""}, "$.gateway.upstreamTokenFile: "),
        (
            "kubernetes: {pool: p, kubeconfig: there/k}",
            {"k": "x"},
            "$.kubernetes.kubeconfig: not a kubeconfig",
        ),
        ("gateway: {jwt: {issuer: i, jwksFile: there/keys}}", {"keys": "{}"}, "$.gateway.jwt.jwksFile: expected"),
        (
            "kvEvents: {enabled: true, port: 1, curve: {publicKeyFile: there/p, secretKeyFile: there/s, serverKey: k}}",
            {"p": "x", "s": "x"},
            "$.kvEvents.curve.publicKeyFile: ",
        ),
    ],
)
def test_files_that_serve_could_not_use_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str, files: dict[str, str], said: str
) -> None:
    file, there = tmp_path / "f.yaml", tmp_path / "there"
    there.mkdir()
    for name, text in files.items():
        (there / name).write_text(text)
    endpoints = "" if "kubernetes" in more else "endpoints: ['10.0.0.1:1']\n"
    file.write_text(f"{endpoints}{more}\n")
    assert validate(file) == (2 if said else 0)
    out = capsys.readouterr().out
    assert said in out
    assert said or f"certDir: there is no {there / 'tls.crt'} on this machine" in out
    for name in files:
        (there / name).unlink()
    assert validate(file) == 0 or not files, "files that are missing may be elsewhere"


@pytest.mark.parametrize(
    "section",
    ["replicas: {caFile: ca}", "kvEvents: {port: 1, curve: {publicKeyFile: ca, secretKeyFile: ca, serverKey: k}}"],
)
def test_files_of_what_is_off_are_not_read(tmp_path: Path, section: str) -> None:
    file = tmp_path / "f.yaml"
    (tmp_path / "ca").write_text("x")
    file.write_text(f"endpoints: ['10.0.0.1:1']\n{section}\n")
    assert validate(file) == 0


def test_files_that_this_user_cannot_read_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, token = tmp_path / "f.yaml", tmp_path / "token"
    token.touch()
    file.write_text("endpoints: ['10.0.0.1:1']\nmetrics: {tokenFile: token}\n")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert validate(file) == 0
    assert f"$.metrics.tokenFile: this user cannot read {token} on this machine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ("metrics: {tls: {caFile: pipe}}", "$.metrics.tls.caFile"),
        ("extProc: {tls: {certDir: certs}}", "$.extProc.tls.certDir"),
        ("gateway: {keys: {file: pipe}}", "$.gateway.keys.file"),
        ("models: {file: pipe}", "$.models.file"),
        ("endpoints: {file: pipe}", "$.endpoints.file"),
    ],
)
def test_a_pipe_is_named_and_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str, where: str
) -> None:
    file = tmp_path / "f.yaml"
    (tmp_path / "certs").mkdir()
    for pipe in "pipe", "certs/tls.crt", "certs/tls.key":
        os.mkfifo(tmp_path / pipe)
    endpoints = "" if "endpoints" in more else "endpoints: ['10.0.0.1:1']\n"
    file.write_text(f"{endpoints}{more}\n")
    assert validate(file) == 2
    out = capsys.readouterr().out
    assert f"{where}: {tmp_path}/" in out and "is neither a file nor a directory" in out


@pytest.mark.parametrize("more", ["journal: {path: N}", "metrics: {tokenFile: N}", "endpoints: {file: N}"])
def test_what_cannot_be_a_path_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str) -> None:
    file = tmp_path / "f.yaml"
    endpoints = "" if "endpoints" in more else "endpoints: ['10.0.0.1:1']\n"
    file.write_text(endpoints + more.replace("N", '"a\\0b"'))
    assert validate(file) == 2
    assert "is neither a file nor a directory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("journal: {path: taken}", "problem"),
        ("journal: {path: taken/j}", "problem"),
        ("state: {file: taken/learned.state}", "problem"),
        ("journal: {path: shut/j}", "note"),
        ("kvEvents: {port: 1, snapshot: shut/index.kv}", "note"),
        ("journal: {path: new/j}", ""),
    ],
)
def test_directories_that_serve_could_not_write_to_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, more: str, said: str
) -> None:
    file, shut, access = tmp_path / "f.yaml", tmp_path / "shut", os.access
    (tmp_path / "taken").touch()
    shut.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(shut) and access(path, mode))
    file.write_text(f"endpoints: ['10.0.0.1:1']\n{more}\n")
    assert validate(file) == (2 if said == "problem" else 0)
    out = capsys.readouterr().out
    assert (f": {tmp_path / 'taken'} is not a directory" in out) == (said == "problem")
    assert (f": this user cannot write to {shut} on this machine" in out) == (said == "note")
    assert not (tmp_path / "new").exists()


CONFIG_MAP = """apiVersion: v1
kind: ConfigMap
metadata: {name: picker}
data:
  notes: none
  fairlead.yaml: |
    endpoints: ['10.0.0.1:1']
    log: {level: LEVEL}
"""


def test_the_configuration_in_a_config_map_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rendered.yaml"
    file.write_text(CONFIG_MAP.replace("LEVEL", "debug"))
    assert validate(file) == 0
    said = "valid. Policy default: 4 filters, cost-model. Endpoints: 1."
    assert capsys.readouterr().out.splitlines()[-1] == f'{file} (data["fairlead.yaml"]): {said}'
    file.write_text(CONFIG_MAP.replace("LEVEL", "1"))
    assert validate(file) == 2
    problem = "expected one of debug, info, warning, error; got 1"
    assert f'{file}:8: $.data["fairlead.yaml"].log.level: {problem}' in capsys.readouterr().out.splitlines()
    file.write_text(CONFIG_MAP.replace("LEVEL", "["))
    assert validate(file) == 2
    assert capsys.readouterr().out.startswith(f'{file}:8: $.data["fairlead.yaml"]: not valid YAML')


def test_a_config_map_without_the_configuration_names_its_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rendered.yaml"
    file.write_text(CONFIG_MAP.replace("fairlead.yaml", "other.yaml"))
    assert validate(file) == 2
    said = "a ConfigMap's configuration is its only text, or the one named fairlead.yaml (there are: notes, other.yaml)"
    assert capsys.readouterr().out.splitlines() == [f"{file}:4: $.data: {said}", "1 problem"]


def test_a_dash_is_standard_input(tmp_path: Path) -> None:
    file = tmp_path / "rendered.yaml"
    file.write_text(CONFIG_MAP.replace("LEVEL", "debug"))
    asked = [sys.executable, "-m", "fairlead", "validate", "-"]
    with file.open() as text:
        run = subprocess.run(asked, stdin=text, capture_output=True, text=True, timeout=30, check=True)
    assert run.stdout.splitlines()[-1].startswith('/dev/stdin (data["fairlead.yaml"]): valid.')
