"""A preset as text, YAML or JSON: what `fairlead tune` prints and `--preset FILE` takes.

name: mine
model: Qwen/Qwen3-32B
latency: {c0_ms: 13.2, c_pf_us: 43.3, c_attn_ns: 1.64, c_seq_us: 25.9, c_kv_ns: 45.3}
kv_tokens: 270000
max_model_len: 40960
"""

from typing import Any

import msgspec
import yaml
from msgspec import Struct

from fairlead.engine.presets import Preset
from fairlead.engine.spec import LatencyModel


class _Latency(Struct, forbid_unknown_fields=True):
    c0_ms: float
    c_pf_us: float = 0.0
    c_attn_ns: float = 0.0
    c_seq_us: float = 0.0
    c_kv_ns: float = 0.0


class _Preset(Struct, forbid_unknown_fields=True):
    latency: _Latency
    name: str = "fitted"
    model: str = "fitted"
    kv_tokens: int = 270_000
    max_model_len: int = 40_960
    kv_bytes: int = 262_144


def read_preset(text: str, where: str = "preset") -> Preset:
    """Raises `ValueError` that names the field."""
    try:
        found = msgspec.convert(yaml.safe_load(text), _Preset)
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: not YAML: {error}".replace("\n", " ")) from None
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from None
    numbers = msgspec.structs.astuple(found.latency)
    if not (found.latency.c0_ms > 0 and all(0.0 <= number < 1e9 for number in numbers)):
        raise ValueError(f"{where}: latency: c0_ms must be above 0, the others at least 0")
    if min(found.kv_tokens, found.max_model_len, found.kv_bytes) < 1:
        raise ValueError(f"{where}: kv_tokens, max_model_len and kv_bytes must be at least 1")
    return Preset(
        name=found.name,
        model=found.model,
        latency=LatencyModel(*numbers),
        kv_tokens=found.kv_tokens,
        max_model_len=found.max_model_len,
        kv_bytes=found.kv_bytes,
    )


def write_preset(preset: Preset) -> str:
    """The opposite of `read_preset`."""
    latency = {name: float(f"{value:.5g}") for name, value in msgspec.structs.asdict(preset.latency).items()}
    fields: dict[str, Any] = {**msgspec.structs.asdict(preset), "latency": latency}
    return yaml.safe_dump(fields, sort_keys=False, default_flow_style=None, width=120)
