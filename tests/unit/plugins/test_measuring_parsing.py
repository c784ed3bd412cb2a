"""Metric sources and parsers of others: asked, and harmless."""

from collections.abc import Mapping
from math import inf

import numpy as np
import pytest

from fairlead.apis.request import ParsedRequest
from fairlead.core.endpoint import Endpoint
from fairlead.core.errors import ClientError, PluginError
from fairlead.plugins.guarding import Measuring, Parsing
from fairlead.testing import endpoint


class Source:
    name = "mine"
    provides = ("heat", "power")

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def measure(self, endpoint: Endpoint, page: bytes) -> Mapping[str, float]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value]


class Rank:
    name = "rank"

    def __init__(self, answer: object = None, paths: tuple[str, ...] = ("/v1/rank",)) -> None:
        self.answer = answer
        self.paths = paths

    def parse(self, path: str, body: bytes) -> ParsedRequest:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer or ParsedRequest(api="other", model="ranker")  # type: ignore[return-value]


def test_columns_of_all_sources_together() -> None:
    measuring = Measuring([Source({"heat": 3}), Source({"power": inf})])
    assert measuring(endpoint(), b"page") == {"heat": 3.0, "power": 1e300}


@pytest.mark.parametrize("answer", [RuntimeError("oops"), {"heat": "hot"}, {"other": 1.0}, None, 3], ids=repr)
def test_a_broken_source_is_left_out_and_reported(answer: object) -> None:
    errors: list[PluginError] = []
    assert Measuring([Source(answer), Source({"heat": 1.0})], errors.append)(endpoint(), b"") == {"heat": 1.0}
    assert [error.plugin for error in errors] == ["mine"]


BODY = b'{"model": "m", "prompt": "hello"}'


def test_the_longest_end_of_the_path_decides() -> None:
    short = Rank(ParsedRequest(model="short"), ("rank",))
    parsing = Parsing([short, Rank()])
    assert parsing("/v1/rank?x=1", BODY).model == "ranker"
    assert parsing("/v1/rank/", BODY).model == "ranker"
    assert parsing("/v2/rank", BODY).model == "short"


def test_a_list_of_prompt_parts_is_taken() -> None:
    errors: list[PluginError] = []
    parsed = Parsing([Rank(ParsedRequest(prompt=[b"a", b"b"]))], errors.append)("/v1/rank", BODY)  # type: ignore[arg-type]
    assert (parsed.prompt, errors) == ((b"a", b"b"), [])


def test_other_paths_are_read_as_ever() -> None:
    parsed = Parsing([Rank()])("/v1/completions", BODY)
    assert (parsed.api, parsed.model) == ("completions", "m")


NUMPY = ParsedRequest(max_tokens=np.int64(3))  # type: ignore[arg-type]


TEXT, NEGATIVE = ParsedRequest(prompt=("hello",)), ParsedRequest(prompt_tokens=-1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "answer",
    [RuntimeError("oops"), "nonsense", NUMPY, TEXT, NEGATIVE],
    ids=["raises", "text", "numpy", "a prompt of text", "negative"],
)
def test_a_broken_parser_leaves_the_request_unread(answer: object) -> None:
    errors: list[PluginError] = []
    parsed = Parsing([Rank(answer)], errors.append)("/v1/rank", BODY)
    assert (parsed.api, parsed.unread) == ("other", "path")
    assert [error.plugin for error in errors] == ["rank"]


def test_a_parser_may_refuse_and_never_sees_compressed_bodies() -> None:
    with pytest.raises(ClientError, match="no query"):
        Parsing([Rank(ClientError("no query"))])("/v1/rank", BODY)
    parsed = Parsing([Rank()])("/v1/rank", BODY, content_encoding="gzip")
    assert parsed.unread == "content-encoding"
