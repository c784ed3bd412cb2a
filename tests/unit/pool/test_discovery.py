"""Where endpoints come from: the configuration's own list, or a file."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from fairlead.compat.load import load
from fairlead.config.problems import Problem
from fairlead.core.errors import ConfigError
from fairlead.core.events import EndpointDown, EndpointUp
from fairlead.pool.endpoints_file import EndpointSet, follow_endpoints


async def followed(text: str | Path) -> tuple[dict[str, str], list[Problem]]:
    """(addresses by id, problems) of what is there at the start."""
    up: dict[str, str] = {}
    problems: list[Problem] = []

    def feed(event: EndpointUp | EndpointDown) -> None:
        assert isinstance(event, EndpointUp)
        up[event.endpoint.id] = event.endpoint.address

    async with AsyncExitStack() as stack:
        await follow_endpoints(stack, load(text).endpoints, feed, problems.append)
    return up, problems


async def test_names_in_the_configuration_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        if host == "gone":
            raise OSError("Name or service not known")
        return ["10.0.0.7"]

    monkeypatch.setattr(EndpointSet.__init__, "__kwdefaults__", {"resolver": resolve, "resolve_s": 30.0})
    up, problems = await followed("endpoints: [model:80, 10.0.0.1:80, gone:80, {name: a, address: model, port: 81}]")
    assert up == {"10.0.0.1:80": "10.0.0.1:80", "model:80": "10.0.0.7:80", "default/a": "10.0.0.7:81"}
    assert [str(problem) for problem in problems] == ["cannot resolve gone: Name or service not known"]


async def test_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("endpoints: {file: e.yaml}")
    (tmp_path / "e.yaml").write_text("endpoints: ['10.0.0.1:80', 'nonsense:x']")
    up, problems = await followed(tmp_path / "f.yaml")
    assert up == {"10.0.0.1:80": "10.0.0.1:80"}
    assert [str(problem) for problem in problems] == ["line 1, $.endpoints[1]: 'x' is not a port (1 to 65535)"]


@pytest.mark.parametrize(("text", "said"), [(None, "No such file"), ("endpoints: [", "line 1: not valid YAML")])
async def test_a_file_that_cannot_be_used_at_the_start(tmp_path: Path, text: str | None, said: str) -> None:
    (tmp_path / "f.yaml").write_text("endpoints: {file: e.yaml}")
    if text is not None:
        (tmp_path / "e.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"\$\.endpoints\.file") as caught:
        await followed(tmp_path / "f.yaml")
    assert said in str(caught.value)
