"""What a check reads in Envoy's configuration."""

from typing import Any

import pytest

from fairlead.doctor.checks.headers import CHECK, _removals
from fairlead.io.envoy.config import build
from fairlead.io.envoy.options import Options
from fairlead.route.headers import CONTROL_HEADERS

FILTER = {"mutations": {"request_mutations": [{"remove": "X-A"}], "response_mutations": [{"remove": "x-b"}]}}


@pytest.mark.parametrize(
    ("node", "removed"),
    [
        (FILTER, {"x-a"}),
        ({"routes": [{"request_headers_to_remove": ["x-c"]}]}, {"x-c"}),
        ({"early_header_mutation_extensions": [{"typed_config": {"mutations": [{"remove": "x-d"}]}}]}, {"x-d"}),
        ({"remove": "x-e"}, set()),
        ([None, 1, "remove", {"request_mutations": 1}, {"request_headers_to_remove": "x"}], set()),
    ],
)
def test_headers_that_are_taken_off_are_found(node: Any, removed: set[str]) -> None:
    assert set(_removals(node)) == removed


def test_our_own_configuration_takes_off_all() -> None:
    assert set(_removals(build(Options()))) >= CONTROL_HEADERS


def test_the_check_needs_a_gateway() -> None:
    assert CHECK.needs == ("any-gateway",)
