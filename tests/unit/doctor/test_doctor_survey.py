"""What `fairlead init` takes for a model server, and says of unlike ones."""

import asyncio
from pathlib import Path

import pytest
from commands import fairlead

from fairlead.compat.load import load
from fairlead.doctor.survey import Server, differences, survey
from fairlead.lab.stub.config import StubConfig
from fairlead.lab.stub.pool import StubPool


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        (200, "no model server: no version, no known metrics page, no list of models (/v1/models: 200)"),
        (404, "no model server: no version, no known metrics page, no list of models (/v1/models: 404)"),
        (500, "no model server: no version, no known metrics page, no list of models (/v1/models: 500)"),
        (401, ""),
    ],
)
async def test_what_is_no_model_server(server, status: int, problem: str) -> None:
    port = await server(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status)
    (surveyed,) = await survey([f"127.0.0.1:{port}"])
    assert surveyed.problem == problem


async def test_a_page_is_named_as_the_user_named_its_server() -> None:
    async with StubPool(StubConfig(model="m", engine_type="trtllm-serve")) as pool:
        address = pool.addresses[0].replace("127.0.0.1", "localhost")
        (surveyed,) = await survey([address])
    assert surveyed.metrics_url == f"http://{address}/prometheus/metrics"


async def test_a_name_of_several_lines_is_one_comment(tmp_path: Path) -> None:
    async with StubPool(StubConfig(model="m\nscheduler: {address: 'evil.example:1'}\n#\0")) as pool:
        address, out = pool.addresses[0], tmp_path / "fairlead.yaml"
        done = await asyncio.to_thread(fairlead, "init", address, "--out", out)
    assert done.exit_code == 0, done.output
    assert f'  - "{address}"  # m\N{REPLACEMENT CHARACTER}scheduler' in out.read_text()
    assert load(out.read_text()).endpoints.static


def test_a_server_without_a_list_is_named_and_serves_no_other_models() -> None:
    first, second, silent = (
        Server(address="a:1", models=("m", "n")), Server(address="b:1", models=("n", "m")), Server(address="c:1")
    )  # fmt: skip
    assert differences([first, second]) == differences([silent]) == []
    assert differences([first, silent]) == ["no list of models at c:1: requests for any model go there"]
    assert differences([first, Server(address="d:1", models=("o",))]) == [
        "the servers do not serve the same models; each request goes to those that have its model"
    ]


def test_names_of_kubernetes_are_texts(tmp_path: Path) -> None:
    out = tmp_path / "fairlead.yaml"
    done = fairlead("init", "--pool", "123", "--namespace", "1e3", "--out", out)
    assert done.exit_code == 0, done.output
    kubernetes = load(out.read_text()).kubernetes
    assert (kubernetes.pool, kubernetes.namespace) == ("123", "1e3")
    refused = fairlead("init", "--pool", "a: b", "--out", tmp_path / "other.yaml")
    assert refused.exit_code == 2
    assert "'a: b' is no name of Kubernetes" in refused.stderr


def test_addresses_may_have_commas_between_them(tmp_path: Path) -> None:
    out = tmp_path / "fairlead.yaml"
    assert fairlead("init", "10.0.0.1:1,10.0.0.2:2", "--no-probe", "--out", out).exit_code == 0
    assert [entry.endpoint.address for entry in load(out.read_text()).endpoints.static] == ["10.0.0.1:1", "10.0.0.2:2"]


def test_a_pool_needs_servers_that_decode(tmp_path: Path) -> None:
    done = fairlead("init", "--prefill", "10.0.0.1:1", "--no-probe", "--out", tmp_path / "fairlead.yaml")
    assert "also name the servers that decode" in done.stderr
    assert not [*tmp_path.iterdir()]
