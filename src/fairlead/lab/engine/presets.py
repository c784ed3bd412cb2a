"""Model servers by name or as text: step times fitted to measured kernels, and how many tokens their KV cache holds.

Step times are least-squares fits of `spec.LatencyModel` to a vendor's measured kernel database (engine 0.24), with a
mean absolute error of 5-7 %. A step of 8192 prompt tokens and 64 decoding requests with 8k tokens each is predicted to
take 449 ms; it was measured at 502 ms.

KV capacity: Qwen3-32B on two H100 is known to hold 270,000 tokens. The others follow from the same formula,
`(gpus · (0.9 · memory - 8.7 GB) - weights) / KV bytes per token`. The server may use 0.9 of the memory. The 8.7 GB per
GPU stand for activations, CUDA graphs and communication; they are chosen so that the formula gives 270,000 for the
known case.
"""

import msgspec
import yaml
from msgspec import Struct, structs

from fairlead.config.problems import suggestion
from fairlead.lab.engine.spec import EngineSpec, LatencyModel

_UTILISATION = 0.9
_OVERHEAD_GB = 8.7


class _Gpu(Struct, frozen=True):
    #: As reported by the driver, in 10^9 bytes.
    memory_gb: float
    #: The default of vLLM's API server: 1,024 from 70 GiB on, except for the A100; otherwise 256.
    max_num_seqs: int = 1024


class _Model(Struct, frozen=True):
    #: Size of the 16-bit weights, in 10^9 bytes.
    weights_gb: float
    #: KV bytes per token: 2 (K and V) · layers · KV heads · head size · 2 bytes.
    kv_bytes: int
    max_len: int


_H100, _H200, _A100, _L40S = _Gpu(85.5), _Gpu(150.8), _Gpu(85.9, 256), _Gpu(48.3, 256)
_QWEN_32B = _Model(65.5, 262_144, 40_960)
_QWEN_8B = _Model(16.4, 147_456, 40_960)
_LLAMA_8B = _Model(16.1, 131_072, 131_072)
_LLAMA_70B = _Model(141.1, 327_680, 131_072)


class Preset(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model on given hardware, and the limits that its server was started with. Raises `ValueError` if no server
    could start with them."""

    latency: LatencyModel
    name: str = "fitted"
    model: str = "fitted"
    kv_tokens: int = 270_000
    max_model_len: int = 40_960
    #: KV bytes per token, the size of what a prefill server hands over.
    kv_bytes: int = 262_144
    #: Tokens per KV block. 0 = unknown: the stub uses 16, the simulator the block size of the workload.
    block_size: int = 0
    max_num_seqs: int = 256
    max_batched_tokens: int = 8192
    #: Time of a request in addition to its steps: HTTP, tokenization, the way to the engine.
    overhead_ms: float = 0.0
    #: CPU time of the API server per request and per prompt token. The API server handles requests one after another.
    api_ms: float = 0.0
    api_us_per_token: float = 0.0
    #: As in `EngineSpec`.
    async_scheduling: bool = False
    chunked_prefill: bool = True
    noise: float = 0.0
    draft_tokens: int = 0
    acceptance: float = 0.0
    #: See `EngineSpec`. Unless it is 0, all servers of this preset are simulated on one machine, and
    #: `contended_overhead_ms` replaces `overhead_ms` while another of them computes.
    contention: float = 0.0
    contended_overhead_ms: float = 0.0

    def __post_init__(self) -> None:
        latency = self.latency
        linear = (latency.c0_ms, latency.c_pf_us, latency.c_attn_ns, latency.c_seq_us, latency.c_kv_ns)
        besides = (self.overhead_ms, self.api_ms, self.api_us_per_token)
        bent = (latency.weights_ms, *(more for _, more in latency.jumps))
        if not (latency.c0_ms > 0 and all(0.0 <= number < 1e9 for number in (*linear, *bent, *besides))):
            raise ValueError("latency: c0_ms must be above 0, its other fields, overhead_ms and api_… at least 0")
        if min(self.kv_tokens, self.max_model_len, self.kv_bytes) < 1 or self.block_size < 0:
            raise ValueError("kv_tokens, max_model_len and kv_bytes must be at least 1")
        self.spec()

    def spec(
        self,
        *,
        block_size: int = 0,
        max_num_seqs: int = 0,
        max_batched_tokens: int = 0,
        max_model_len: int = 0,
        max_loras: int = 0,
        kv_tokens: int = 0,
    ) -> EngineSpec:
        """An `EngineSpec` of this preset; 0 keeps the preset's own value. The token budget of a step is raised to fit
        the tokens of every sequence, or the longest prompt if prompts are not chunked. Raises `ValueError` on limits
        that no server could start with."""
        size = block_size or self.block_size or 16
        blocks = (kv_tokens or self.kv_tokens) // max(1, size)
        longest = max_model_len or self.max_model_len
        if size > 0 and blocks * size < longest:
            raise ValueError(
                f"max_model_len {longest} does not fit into a KV cache of {kv_tokens or self.kv_tokens} tokens: it has"
                f" {blocks} whole blocks of {size} tokens; use more kv_tokens or a smaller max_model_len"
            )
        sequences = max_num_seqs or self.max_num_seqs
        fields = {name: value for name, value in structs.asdict(self).items() if name in EngineSpec.__struct_fields__}
        fields |= {
            "num_blocks": blocks + 1,
            "block_size": size,
            "max_model_len": longest,
            "max_num_seqs": sequences,
            "max_batched_tokens": max(
                max_batched_tokens or self.max_batched_tokens,
                sequences * (1 + self.draft_tokens),
                0 if self.chunked_prefill else longest,
            ),
            "max_loras": max_loras,
        }
        return EngineSpec(**fields)


def _capacity(model: _Model, gpu: _Gpu, count: int) -> int:
    """Tokens that the KV cache holds, rounded down to thousands."""
    room_gb = count * (_UTILISATION * gpu.memory_gb - _OVERHEAD_GB) - model.weights_gb
    return int(room_gb * 1e9 / model.kv_bytes) // 1000 * 1000


def _preset(name: str, model_name: str, model: _Model, gpu: _Gpu, count: int, *latency: float) -> Preset:
    c0, c_pf, c_attn, c_seq, c_kv = latency
    return Preset(
        name=name,
        model=model_name,
        latency=LatencyModel(c0, c_pf, c_attn, c_seq, c_kv),
        kv_tokens=_capacity(model, gpu, count),
        max_model_len=model.max_len,
        kv_bytes=model.kv_bytes,
        max_num_seqs=gpu.max_num_seqs,
        async_scheduling=True,
    )


_QWEN_32B_ID = "Qwen/Qwen3-32B"
_LLAMA_8B_ID = "meta-llama/Llama-3.1-8B-Instruct"
_LLAMA_70B_ID = "meta-llama/Llama-3.1-70B-Instruct"

_ALL = (
    _preset("qwen3-32b-h100", _QWEN_32B_ID, _QWEN_32B, _H100, 2, 13.16, 43.34, 1.642, 25.9, 45.32),
    _preset("qwen3-32b-h200", _QWEN_32B_ID, _QWEN_32B, _H200, 2, 10.43, 43.23, 1.661, 25.9, 30.74),
    _preset("llama-8b-h100", _LLAMA_8B_ID, _LLAMA_8B, _H100, 1, 5.99, 16.46, 0.811, 12.2, 44.63),
    _preset("llama-8b-h200", _LLAMA_8B_ID, _LLAMA_8B, _H200, 1, 4.61, 16.65, 0.819, 12.7, 32.44),
    _preset("qwen3-8b-h100", "Qwen/Qwen3-8B", _QWEN_8B, _H100, 1, 6.36, 17.25, 0.904, 11.8, 49.01),
    _preset("llama-8b-a100", _LLAMA_8B_ID, _LLAMA_8B, _A100, 1, 11.11, 50.52, 2.974, 39.6, 82.54),
    _preset("llama-8b-l40s", _LLAMA_8B_ID, _LLAMA_8B, _L40S, 1, 20.93, 53.73, 2.994, 43.5, 202.26),
    _preset("llama-70b-h100-tp4", _LLAMA_70B_ID, _LLAMA_70B, _H100, 4, 14.43, 53.69, 1.037, 35.1, 30.85),
    _preset("llama-70b-h100-tp8", _LLAMA_70B_ID, _LLAMA_70B, _H100, 8, 9.55, 35.94, 0.499, 27.8, 16.18),
    _preset("llama-70b-h200-tp4", _LLAMA_70B_ID, _LLAMA_70B, _H200, 4, 11.58, 53.32, 1.019, 35.3, 20.75),
)

#: The built-in presets by name.
PRESETS: dict[str, Preset] = {preset.name: preset for preset in _ALL}

DEFAULT_PRESET = "qwen3-32b-h100"


def preset(name: str) -> Preset:
    """The preset of that name, in any case and with its parts in any order (`h100-qwen3-32b`). A `name` of more than
    one line is read as the text of a preset. Raises `ValueError` that lists the known names."""
    if "\n" in name:
        return read_preset(name)
    parts = sorted(name.lower().split("-"))
    for known, made in PRESETS.items():
        if sorted(known.split("-")) == parts:
            return made
    raise ValueError(f"unknown preset {name!r}; {suggestion(name, PRESETS)}")


# A preset as text, YAML or JSON: what `fairlead tune` prints and `--engine FILE` takes.
#
# name: mine
# model: Qwen/Qwen3-32B
# latency: {c0_ms: 13.2, c_pf_us: 43.3, c_attn_ns: 1.64, c_seq_us: 25.9, c_kv_ns: 45.3}
# kv_tokens: 270000
# max_model_len: 40960
# max_num_seqs: 256


def read_preset(text: str, where: str = "preset") -> Preset:
    """Parse a preset. Raises `ValueError` that names the field."""
    try:
        return msgspec.convert(yaml.safe_load(text), Preset)
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: not YAML: {error}".replace("\n", " ")) from None
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from None


_ALWAYS = ("name", "model", "latency", "kv_tokens", "max_model_len", "max_num_seqs", "max_batched_tokens")


def write_preset(preset: Preset) -> str:
    """The opposite of `read_preset`. Values that equal the defaults are left out, except the fields in `_ALWAYS`."""
    fields, usual = msgspec.to_builtins(preset), msgspec.to_builtins(Preset(latency=LatencyModel(1.0)))
    fields["latency"] = {
        name: float(f"{value:.5g}") if isinstance(value, float) else value
        for name, value in fields["latency"].items()
        if value
    }
    shown = {name: fields[name] for name in _ALWAYS}
    shown |= {name: value for name, value in fields.items() if value != usual[name]}
    return yaml.safe_dump(shown, sort_keys=False, default_flow_style=None, width=120)
