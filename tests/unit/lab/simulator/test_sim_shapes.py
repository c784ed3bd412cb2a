"""The default policy serves traffic in the shape of published traces as it did before."""

import json
import sys
from pathlib import Path

import pytest

from fairlead.lab.workload.describe import ideal_hit
from fairlead.lab.workload.formats import read_native, write_native

sys.path.insert(0, str(Path(__file__).parents[4] / "tools"))
import write_shapes as shapes

pytestmark = pytest.mark.simulation


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_each_trace_is_what_its_recipe_makes(name: str) -> None:
    assert shapes.path(name).read_bytes() == write_native(shapes.made(name))


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_each_trace_has_the_published_shape(name: str) -> None:
    shape, workload = shapes.SHAPES[name], read_native(shapes.path(name).read_bytes())
    records = workload.records
    assert sum(record.in_tokens for record in records) / len(records) == pytest.approx(shape.prompt_tokens, rel=0.15)
    assert sum(record.out_tokens for record in records) / len(records) == pytest.approx(shape.output_tokens, rel=0.15)
    if shape.reuse is not None:
        assert ideal_hit(workload) == pytest.approx(shape.reuse, abs=0.05)


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_the_default_policy_serves_it_as_before(name: str) -> None:
    before, now = json.loads(shapes.FIGURES.read_text())[name], shapes.figures(name)
    counts = ("requests", "done", "shed", "failed")
    assert [now[key] for key in counts] == [before[key] for key in counts]
    assert now["prefix_hit_rate"] == pytest.approx(before["prefix_hit_rate"], abs=0.03)
    for key in ("ttft_mean_ms", "ttft_p99_ms", "e2e_mean_ms"):
        assert now[key] <= 1.2 * before[key], f"{key} was {before[key]:g}"


def test_another_policy_is_noticed() -> None:
    before = json.loads(shapes.FIGURES.read_text())["mooncake-synthetic-like"]
    now = shapes.figures("mooncake-synthetic-like", "policy: round-robin")
    assert (
        now["prefix_hit_rate"] < before["prefix_hit_rate"] - 0.03 and now["ttft_mean_ms"] > 1.2 * before["ttft_mean_ms"]
    )
