"""Reading metrics pages: captured ones, broken ones, and generated ones against prometheus_client's parser."""

from collections.abc import Callable
from math import isfinite
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from fairlead.apis.engine_metrics import ENGINES, EngineMetrics, Spec, compile_engine, engine_of, parse_spec
from fairlead.apis.prometheus import (
    ENDLESS,
    MOST_LABELS,
    MOST_NAMES,
    MOST_SERIES,
    PageReader,
    Reading,
    find_family,
    parse_labels,
    read_page,
)
from fairlead.core.errors import ConfigError

DATA = Path(__file__).parents[2] / "data" / "metrics"
VLLM = compile_engine(ENGINES["vllm"])
PAGES = sorted(DATA.glob("vllm-*.txt"))


def page_of(name: str) -> bytes:
    return (DATA / f"vllm-{name}.txt").read_bytes()


def read(text: str | bytes, metrics: EngineMetrics = ENGINES["vllm"]) -> Reading:
    return read_page(text if isinstance(text, bytes) else text.encode(), compile_engine(metrics))


def oracle(page: bytes, sample_name: str) -> list[tuple[dict[str, str], float]]:
    return [
        (sample.labels, sample.value)
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
        if sample.name == sample_name
    ]


# ---------------- captured pages ----------------


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_captured_page_reads_as_the_reference_parser_does(path: Path) -> None:
    page = path.read_bytes()
    reading = read(page)
    assert reading.problems == ()
    sample = reading.sample
    assert sample.waiting == sum(value for _, value in oracle(page, "vllm:num_requests_waiting"))
    assert sample.running == sum(value for _, value in oracle(page, "vllm:num_requests_running"))
    assert sample.kv_usage == max(value for _, value in oracle(page, "vllm:kv_cache_usage_perc"))
    assert sample.prefix_queries == sum(value for _, value in oracle(page, "vllm:prefix_cache_queries_total"))
    assert sample.prefix_hits == sum(value for _, value in oracle(page, "vllm:prefix_cache_hits_total"))
    cache = [labels for labels, _ in oracle(page, "vllm:cache_config_info")]
    assert sample.block_size == int(cache[0]["block_size"])
    assert sample.num_blocks == int(cache[0]["num_gpu_blocks"])


def test_figures_of_the_captured_pages() -> None:
    assert (read(page_of("under-load")).sample.waiting, read(page_of("under-load")).sample.running) == (28.0, 0.0)
    two = read(page_of("dp2")).sample
    assert (two.ranks, read(page_of("idle")).sample.ranks) == (2, 1)
    assert (two.block_size, two.num_blocks, two.prefix_queries) == (32, 2 * 2048, 600.0)
    lora = read(page_of("lora")).sample
    assert (lora.waiting, lora.running, lora.max_adapters) == (16.0, 4.0, 2)
    assert lora.adapters == lora.waiting_adapters == {"b", "c"}


def test_without_lora_adapters_are_not_reported() -> None:
    assert read(page_of("idle")).sample.adapters is None


def test_a_page_of_something_else_is_empty() -> None:
    reading = read("process_cpu_seconds_total 12\n")
    assert reading.empty
    assert reading.problems[0] == "waiting: vllm:num_requests_waiting is not on the page"


# ---------------- several series ----------------


def test_counts_are_summed_and_usage_is_the_highest() -> None:
    sample = read(
        'vllm:num_requests_waiting{engine="0"} 3\nvllm:num_requests_waiting{engine="1"} 4\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:kv_cache_usage_perc{engine="1"} 0.5\n'
    ).sample
    assert (sample.waiting, sample.kv_usage, sample.running) == (7.0, 0.5, None)


def test_scattered_samples_of_a_family_all_count() -> None:
    text = (
        "vllm:num_requests_running 1\nother 5\n# a remark\nvllm:num_requests_running 2\n\nvllm:num_requests_running 3\n"
    )
    assert read(text).sample.running == 6.0


def test_one_unreadable_engine_makes_the_field_unknown_rather_than_small() -> None:
    reading = read('vllm:num_requests_waiting{engine="0"} 3\nvllm:num_requests_waiting{engine="1"} NaN\n')
    assert reading.sample.waiting is None
    assert any(problem.startswith("waiting: unreadable") for problem in reading.problems)


def test_newest_lora_set_wins_wherever_it_stands() -> None:
    text = (
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters=" a , b,,",waiting_lora_adapters="c"} 1.7e9\n'
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="old",waiting_lora_adapters=""} 1.6e9\n'
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="broken",waiting_lora_adapters=""} +Inf\n'
    )
    reading = read(text)
    assert reading.sample.adapters == {"a", "b"}
    assert reading.sample.waiting_adapters == {"c"}
    assert reading.sample.max_adapters == 4
    assert any(problem.startswith("adapters: unreadable") for problem in reading.problems)


def test_lora_with_nothing_running_is_known_to_be_empty() -> None:
    text = 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""} 1.7e9\n'
    assert read(text).sample.adapters == frozenset()


# ---------------- line grammar ----------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("vllm:num_requests_waiting 5", 5.0),
        ("vllm:num_requests_waiting\t5", 5.0),
        ("vllm:num_requests_waiting{} 5", 5.0),
        ("vllm:num_requests_waiting 5 1712345678901", 5.0),
        ("vllm:num_requests_waiting 5 -3", 5.0),
        ("vllm:num_requests_waiting 5\r", 5.0),
        ("vllm:num_requests_waiting   5e1  ", 50.0),
        ('vllm:num_requests_waiting{a="b",} 5', 5.0),
        ('vllm:num_requests_waiting{a="}"} 5', 5.0),
        ('vllm:num_requests_waiting{a="} 9"} 5', 5.0),
        ('vllm:num_requests_waiting{a="\\"} 9"} 5', 5.0),
        ('vllm:num_requests_waiting{a="x,y=\\"z\\"",b="{"} 5', 5.0),
        ('vllm:num_requests_waiting{a="é 🙂"} 5', 5.0),
        ('vllm:num_requests_waiting{a="#"} 5 # {trace="}"} 1 1.2', 5.0),
        ("vllm:num_requests_waiting NaN", None),
        ("vllm:num_requests_waiting +Inf", None),
        ("vllm:num_requests_waiting -1", None),
        ("vllm:num_requests_waiting 1e16", None),
        ("vllm:num_requests_waiting 1_0", None),
        ("vllm:num_requests_waiting five", None),
        ("vllm:num_requests_waiting", None),
        ("vllm:num_requests_waiting{", None),
        ('vllm:num_requests_waiting{a="b} 5', None),
        ('vllm:num_requests_waiting{a="b"', None),
        ("vllm:num_requests_waiting 5 6 7", None),
        ("vllm:num_requests_waiting_by_reason 5", None),
        (" vllm:num_requests_waiting 5", None),
        ("# HELP x vllm:num_requests_waiting 5", None),
        ("# HELP x y\\nvllm:num_requests_waiting 5", None),
    ],
)
@pytest.mark.parametrize("before", ["", "other 1\n"], ids=["first", "later"])
def test_line(before: str, line: str, expected: float | None) -> None:
    reading = read(f"{before}{line}\nvllm:num_requests_running 1\n")
    assert reading.sample.waiting == expected
    assert reading.sample.running == 1.0
    assert any(problem.startswith("waiting") for problem in reading.problems) == (expected is None)


def test_a_page_cut_off_in_a_number_is_not_believed() -> None:
    reading = read("vllm:num_requests_running 1\nvllm:num_requests_waiting 12")
    assert (reading.sample.running, reading.sample.waiting) == (1.0, None)
    assert reading.problems[0].startswith("the page is cut off")


def test_every_prefix_of_a_page_is_read_without_lies() -> None:
    page = page_of("lora")
    whole = read(page).sample
    for end in range(0, len(page), 7):
        sample = read(page[:end]).sample
        assert sample.waiting in (None, whole.waiting)
        assert sample.running in (None, whole.running)
        assert sample.kv_usage in (None, whole.kv_usage)


@pytest.mark.parametrize(("text", "expected"), [("1.0004", 1.0), ("1", 1.0), ("37", None), ("-0.1", None)])
def test_kv_usage_is_a_share(text: str, expected: float | None) -> None:
    assert read(f"vllm:kv_cache_usage_perc {text}\n").sample.kv_usage == expected


def test_crlf_page() -> None:
    assert read(page_of("lora").replace(b"\n", b"\r\n")).sample == read(page_of("lora")).sample


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        (b"", {}),
        (b'a="1"', {"a": "1"}),
        (b' a = "1" , b="2", ', {"a": "1", "b": "2"}),
        (b'a="\\\\n\\n\\""', {"a": '\\n\n"'}),
        (b'a="\\x"', {"a": "\\x"}),
        (b'a="1" b="2"', None),
        (b"a=1", None),
        (b',a="1"', None),
        (b'a="\xff"', {"a": "�"}),
    ],
)
def test_labels(inner: bytes, expected: dict[str, str] | None) -> None:
    assert parse_labels(inner) == expected


def test_hostile_labels_take_linear_time() -> None:
    many = b"vllm:num_requests_waiting{" + b'a="\\\\",' * 50_000 + b"\n"
    assert read(many).sample.waiting is None
    assert read(b"vllm:num_requests_waiting{" + b'"' * 100_001 + b"} 1\n").sample.waiting is None


# ---------------- engines ----------------


#: Waiting, running, KV usage, tokens per block, blocks, prefix queries, hits and generated tokens of each page.
READINGS = {
    "sglang": (7.0, 5.0, 0.42, 64, 15499, 10_000.0, 6600.0, 500.0),
    "trtllm-serve": (1.0, 2.0, 0.3, 32, 77, 10_000.0, 6500.0, 500.0),
    "triton-tensorrt-llm": (4.0, 2.0, 0.5, 64, 1000, None, None, None),
    "triton": (9.0, None, None, 0, 0, None, None, None),
    "lmdeploy": (3.0, 5.0, 0.5, 0, 0, None, None, 500.0),
    "llamacpp": (6.0, 4.0, None, 0, 0, None, None, None),
    "tgi": (8.0, 3.0, None, 0, 0, None, None, None),
}


LOAD = "vllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc 0\n"
ADAPTERS = 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="%s",waiting_lora_adapters="w"} %d\n'


@pytest.mark.parametrize("typed", ["", "# TYPE vllm:num_requests_running gauge\n"])
def test_a_family_has_a_thousand_series_at_most(typed: str) -> None:
    for most, running in ((MOST_SERIES, MOST_SERIES), (MOST_SERIES + 1, None), (50_000, None)):
        rows = "".join(f'vllm:num_requests_running{{engine="{number}"}} 1\n' for number in range(most))
        reading = read(f"{typed}{rows}# TYPE x gauge\n{LOAD}")
        assert (reading.sample.running, reading.sample.waiting) == (running, 2)
        assert reading.problems == (() if running else ("running: more series than are read",))
    family = find_family(rows.encode(), b"vllm:num_requests_running")
    assert family is not None and family.series == [ENDLESS]


def test_the_newest_adapters_are_read_of_ten_thousand_sets() -> None:
    rows = [ADAPTERS % (f"a{number}", number) for number in range(9_999)]
    rows.insert(5, ADAPTERS % ("first", 9_999) + 'vllm:lora_requests_info{running_lora_adapters="newest"} 9999\n')
    assert read("".join(rows[:-2])).sample.adapters == {"newest"}
    assert "adapters: more series than are read" in read("".join([*rows, *rows])).problems


def test_an_endpoint_has_ten_thousand_adapters_at_most() -> None:
    names = [f"a{number}" for number in range(MOST_NAMES + 1)]
    assert len(read(ADAPTERS % (",".join(names[1:]), 1)).sample.adapters or ()) == MOST_NAMES
    reading = read(ADAPTERS % (",".join(names), 1))
    assert reading.sample.adapters is None and f"adapters: more than {MOST_NAMES} names" in reading.problems


def test_endless_labels_are_none() -> None:
    assert parse_labels(b",".join(b'l%d="1"' % number for number in range(MOST_LABELS)))
    assert parse_labels(b",".join(b'l%d="1"' % number for number in range(300_000))) is None


def test_a_page_with_an_endless_family_is_still_read_cheaply() -> None:
    reader = PageReader(VLLM)
    rows = "vllm:num_requests_running 1\n" * 2000
    page = f"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting %d\n# TYPE x gauge\n{rows}"
    first = reader.read((page % 2).encode())
    assert first.sample.running is None
    assert reader.read((page % 2).encode(), full=False) is first
    assert reader.read((page % 3).encode(), full=False).sample.waiting == 3
    assert reader.read((page % 3 + "x 1\n").replace(rows, rows[:28]).encode()).sample.running == 1


def test_a_page_tells_when_all_its_engines_sleep() -> None:
    page = page_of("dp2")
    awake = b'{engine="%d",model_name="tiny",sleep_state="awake"} 1.0'
    one = page.replace(awake % 0, (awake % 0).replace(b"1.0", b"0.0"))
    both = one.replace(awake % 1, (awake % 1).replace(b"1.0", b"0.0"))
    assert [read(text).asleep for text in (page, one, both)] == [False, False, True]
    reader = PageReader(VLLM)
    assert [reader.read(text, full=False).asleep for text in (page, both, page)] == [False, True, False]
    assert not read("vllm:num_requests_waiting 0\n").asleep


def test_every_engine_has_a_page() -> None:
    assert set(READINGS) | {"vllm"} == set(ENGINES)


@pytest.mark.parametrize("engine", READINGS)
def test_page_of_each_engine(engine: str) -> None:
    page = (DATA / f"{engine}.txt").read_bytes()
    sample, problems = (reading := read(page, ENGINES[engine])).sample, reading.problems
    assert problems == ()
    assert READINGS[engine] == (
        sample.waiting, sample.running, sample.kv_usage, sample.block_size, sample.num_blocks,
        sample.prefix_queries, sample.prefix_hits, sample.generation_tokens,
    )  # fmt: skip
    fits = [name for name, metrics in ENGINES.items() if not read(page, metrics).empty]
    assert fits[0] == engine  # so `init` and `doctor` tell it from the page


@pytest.mark.parametrize("separator", [":", "_"])
def test_sglang_before_0_5_11(separator: str) -> None:
    names = {"num_queue_reqs": "3", "num_running_reqs": "2", "token_usage": "0.4"}
    text = "".join(f'sglang{separator}{name}{{model_name="m"}} {value}\n' for name, value in names.items())
    text += f'sglang{separator}cache_config_info{{page_size="64",num_pages="100"}} 1\n'
    sample = read(text, ENGINES["sglang"]).sample
    assert (sample.waiting, sample.running, sample.kv_usage) == (3.0, 2.0, 0.4)
    assert (sample.block_size, sample.num_blocks) == (64, 100)


def test_old_and_relabelled_names_of_vllm() -> None:
    assert read("vllm:gpu_cache_usage_perc 0.7\n").sample.kv_usage == 0.7
    assert read("vllm:gpu_cache_usage_perc 0.7\nvllm:kv_cache_usage_perc 0.2\n").sample.kv_usage == 0.2
    sample = read("vllm_queue_depth 5\nvllm_kv_cache_utilization 0.1\n").sample
    assert (sample.waiting, sample.kv_usage) == (5.0, 0.1)


def test_block_counts_that_are_not_known_yet() -> None:
    text = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1\nvllm:num_requests_waiting 0\n'
    assert (read(text).sample.block_size, read(text).sample.num_blocks) == (16, 0)


def test_custom_metrics() -> None:
    metrics = EngineMetrics(waiting=("depth",), extra={"heat": 'gpu_temp{zone="a"}', "debt": "debt", "gone": "gone"})
    text = 'depth 1\ngpu_temp{zone="a",gpu="0"} 40\ngpu_temp{zone="a",gpu="1"} 41\ngpu_temp{zone="b"} 9\ndebt -3\n'
    reading = read(text, metrics)
    assert reading.sample.extra == {"heat": 81.0, "debt": -3.0}
    assert reading.problems == ("extra.gone: gone is not on the page",)


def test_the_engine_comes_from_the_labels() -> None:
    assert engine_of({}, ENGINES) == "vllm"
    assert engine_of({"llm-d.ai/engine-type": "sglang"}, ENGINES) == "sglang"
    assert engine_of({"inference.networking.k8s.io/engine-type": "triton"}, ENGINES) == "triton"
    assert engine_of({"llm-d.ai/engine-type": "never-heard-of"}, ENGINES) == "vllm"


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("a:b", Spec(b"a:b")),
        (" a{} ", Spec(b"a")),
        ('a{x=1,y="two, {2}\\"\\n"}', Spec(b"a", (("x", "1"), ("y", 'two, {2}"\n')))),
        ("a{x=tokens_per}", Spec(b"a", (("x", "tokens_per"),))),
        ('a{x=""}', Spec(b"a", (("x", ""),))),
    ],
)
def test_spec(text: str, spec: Spec) -> None:
    assert parse_spec(text) == spec


@pytest.mark.parametrize("text", ["", "1a", "a{", "a}", "a{x}", "a{x=}", "a{x=1 y=2}", "a{x=1,x=2}", 'a{x="1}', "a b"])
def test_bad_spec_names_its_path(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^\$\.engines\.e\.waiting\[1\]: "):
        compile_engine(EngineMetrics(waiting=("fine", text)), "$.engines.e")


# ---------------- reading the next page cheaply ----------------


def test_an_unchanged_page_gives_the_same_object() -> None:
    reader = PageReader(VLLM)
    first = reader.read(page_of("lora"))
    assert reader.read(page_of("lora"), full=False) is first
    assert reader.read(b"a 1\n" * 20 + page_of("lora"), full=False) is first
    assert reader.read(page_of("lora"), full=True) is first


def test_a_page_with_other_bytes_moved_about_is_unchanged() -> None:
    reader = PageReader(VLLM)
    first = reader.read(page_of("under-load"))
    longer = page_of("under-load").replace(b"python_gc_objects_collected", b"python_gc_objects_collected_and_more")
    assert reader.read(longer, full=False) is first


@st.composite
def changes(draw: st.DrawFn) -> list[tuple[int, float, str]]:
    """(engines, waiting, padding) of successive pages."""
    step = st.tuples(st.integers(1, 3), st.integers(0, 3).map(float), st.sampled_from(["", "pad 1\n", "pad 1\n" * 99]))
    return draw(st.lists(step, min_size=2, max_size=6))


@given(changes(), st.booleans(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_cheap_reads_equal_full_reads(steps: list[tuple[int, float, str]], typed: bool, last: bool) -> None:
    reader = PageReader(VLLM)
    for engines, waiting, padding in steps:
        lines = [f'vllm:num_requests_waiting{{engine="{i}"}} {waiting}\n' for i in range(engines)]
        head = "# TYPE vllm:num_requests_waiting gauge\n" if typed else ""
        tail = "" if last else "# HELP z z\nz 1\n"
        page = ("# HELP a a\n" + padding + head + "".join(lines) + tail).encode()
        assert reader.read(page, full=False) == read_page(page, VLLM)


def test_a_family_that_appears_is_seen_by_the_next_full_read() -> None:
    reader = PageReader(VLLM)
    reader.read(page_of("idle"))
    lora = page_of("idle") + page_of("lora")[page_of("lora").index(b"# HELP vllm:lora_requests_info") :]
    assert reader.read(lora, full=False).sample.adapters is None
    assert reader.read(lora, full=True).sample.adapters == {"b", "c"}


@pytest.mark.parametrize("full", [True, False])
def test_the_page_of_a_new_process_says_that_its_adapters_are_gone(full: bool) -> None:
    reader = PageReader(VLLM)
    assert reader.read(page_of("lora")).sample.adapters == {"b", "c"}
    fresh = reader.read(page_of("idle"), full)
    assert (fresh.sample.adapters, fresh.sample.max_adapters, fresh.problems) == (frozenset(), 0, ())
    assert reader.read(page_of("idle"), full) is fresh
    assert reader.read(page_of("lora")).sample.adapters == {"b", "c"}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda page: page.replace(b"vllm:kv_cache_usage_perc{", b"vllm:another{"),
        lambda page: page.replace(b"vllm:num_requests_running{", b"vllm:num_requests_running"),
        lambda page: page.rstrip(b"\n"),
        lambda page: page + b"vllm:lora_requests_info{max_lora=} nonsense\n",
    ],
    ids=["a gauge is missing", "a gauge is unreadable", "cut off", "the adapters are unreadable"],
)
def test_a_page_that_is_not_whole_says_nothing_of_adapters(spoil: Callable[[bytes], bytes]) -> None:
    reader = PageReader(VLLM)
    reader.read(page_of("lora"))
    assert reader.read(spoil(page_of("idle"))).sample.adapters is None
    assert reader.read(page_of("idle")).sample.adapters == frozenset()


# ---------------- against the reference parser ----------------

label_values = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=12)
numbers = st.floats(allow_nan=True, allow_infinity=True) | st.integers(0, 50).map(float)


def escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


@given(st.lists(st.tuples(st.dictionaries(st.sampled_from("abc"), label_values), numbers), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_family_reads_as_the_reference_parser_does(series: list[tuple[dict[str, str], float]]) -> None:
    lines = ["# HELP before some_gauge{} 1", "before 1", "# TYPE some_gauge gauge"]
    for labels, value in series:
        inner = ",".join(f'{name}="{escaped(text)}"' for name, text in labels.items())
        lines.append(f"some_gauge{{{inner}}} {value!r}")
    page = ("\n".join(lines) + "\nafter 2\n").encode()
    expected = oracle(page, "some_gauge")
    family = find_family(page, b"some_gauge")
    assert family is not None
    assert len(family.series) == len(expected) == len(series)
    for (wanted_labels, wanted), one in zip(expected, family.series, strict=True):
        if isfinite(wanted):
            assert (one.labels(), one.value) == (wanted_labels, wanted)
        else:
            assert one.value is None


@pytest.mark.parametrize(("values", "expected"), [(["True"], True), (["False"], False), (["True", "False"], False)])
def test_a_page_says_whether_prefixes_are_reused(values: list[str], expected: bool) -> None:
    """The label that vLLM 0.32 writes with `--no-enable-prefix-caching`."""
    rows = [
        f'vllm:cache_config_info{{block_size="16",enable_prefix_caching="{value}",engine="{rank}"}} 1\n'
        for rank, value in enumerate(values)
    ]
    assert read("".join(rows)).sample.prefix_caching is expected
    assert read("vllm:num_requests_waiting 0\n").sample.prefix_caching is True
