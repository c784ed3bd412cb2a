"""What runs when the file does not say otherwise. The one place to tune weights; shapes are those of the file."""

from collections.abc import Mapping
from typing import Any

Entry = Mapping[str, Any]

#: Put before every configured filter list, unless it has the same type or `builtinFilters` is false.
ABILITY_FILTERS: tuple[Entry, ...] = (
    {"type": "role"},
    {"type": "subset"},
    {"type": "model-compatibility"},
    {"type": "health"},
)

#: Where the file names neither a policy nor scorers; see docs/policies.md.
DEFAULT_POLICY = "cost-model"

FILTERS: tuple[Entry, ...] = (
    # 80 % of vLLM's default max_num_seqs of 256.
    # No memory-pressure filter: under load every engine's cache is nearly full, and a filter that then takes away the
    # endpoint which holds the prefix makes others compute (and store) it again, which fills them too. On the demo's
    # workload it costs a fourteenth of the throughput and ten times the p95 of TTFT; `kv-utilization` weighs instead.
    {"type": "queue-depth", "maxQueueLength": 200},
)

SCORERS: tuple[Entry, ...] = (
    {"type": "prefix-aware", "weight": 100, "hashBlockSize": 64},
    {"type": "load-aware", "weight": 50},
    {"type": "kv-utilization", "weight": 100},
    {"type": "inflight-tokens", "weight": 100},
    {"type": "lora-aware", "weight": 100},
    {"type": "session-affinity", "weight": 20},
)

SELECTION: Entry = {"picker": "max-score"}

#: For configurations that bring their own scorers and say nothing of selection.
CUSTOM_SELECTION: Entry = {"topK": 3}

#: Shorthands: `policy: round-robin`.
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "default": {"filters": FILTERS, "scorers": SCORERS, "selection": SELECTION},
    "round-robin": {"filters": (), "scorers": (), "selection": {"picker": "round-robin"}},
    "random": {"filters": (), "scorers": (), "selection": {"picker": "random"}},
}

#: Prompt bytes per token when a block size in tokens becomes one in bytes.
BYTES_PER_TOKEN = 4
#: Where no scorer names a block size, in tokens.
HASH_BLOCK_SIZE = 64
