"""No bytes at all make the reader raise, and the cheap way never disagrees with the full one."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.apis.engine_metrics import ENGINES, compile_engine
from fairlead.apis.prometheus import PageReader, read_page

pytestmark = pytest.mark.fuzzer("Prometheus text")
DATA = Path(__file__).parents[1] / "data" / "metrics"
PAGES = [path.read_bytes() for path in sorted(DATA.glob("*.txt"))]
SPECS = [compile_engine(metrics) for metrics in ENGINES.values()]
VLLM = compile_engine(ENGINES["vllm"])

scraps = st.sampled_from(
    [
        b"vllm:num_requests_waiting",
        b"vllm:kv_cache_usage_perc",
        b"vllm:lora_requests_info",
        b"vllm:cache_config_info",
        b"# TYPE vllm:num_requests_waiting gauge\n",
        b"# HELP ",
        b'{engine="0"}',
        b'{block_size="16",num_gpu_blocks="9"}',
        b'{max_lora="',
        b'running_lora_adapters="a,b"',
        *(b"{", b"}", b'"', b"\\", b",", b"=", b" ", b"\t", b"\n", b"\n", b"\r\n", b"#"),
        *(b" 1", b" 0.5", b" NaN", b" -Inf", b" 1e400", b" 0x10", b" \xd9\xa3", b"\x00", b"\xff\xfe"),
    ]
)
nonsense = st.binary(max_size=200) | st.lists(scraps, max_size=40).map(b"".join)


@given(nonsense)
@settings(max_examples=400, deadline=None)
def test_any_bytes(page: bytes) -> None:
    for specs in SPECS:
        reading = read_page(page, specs)
        assert all(isinstance(problem, str) and len(problem) < 400 for problem in reading.problems)


@given(st.sampled_from(PAGES), st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_pages(page: bytes, data: st.DataObject) -> None:
    """A known page, then the same with a piece replaced: cheap and full reading agree on what both look at."""
    reader = PageReader(VLLM)
    before = reader.read(page)
    at = data.draw(st.integers(0, len(page)))
    piece = data.draw(nonsense)
    damaged = page[:at] + piece + page[at + data.draw(st.integers(0, 80)) :]
    cheap = reader.read(damaged, full=False)
    full = read_page(damaged, VLLM)
    # A second group of a known family, elsewhere or behind a comment, is only seen by the full read.
    if b"#" not in piece:
        for field in ("waiting", "running", "kv_usage", "prefix_queries", "num_blocks"):
            assert getattr(cheap.sample, field) in (getattr(full.sample, field), getattr(before.sample, field))
    assert reader.read(damaged, full=True) == full
