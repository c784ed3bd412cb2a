"""What the demo runs, and with which settings; every choice is printed or written next to the results."""

import json
from pathlib import Path

from msgspec import Struct, structs

from fairlead.bench.arrivals import Poisson
from fairlead.bench.spec import Options, RunSpec
from fairlead.bench.workload import SharedPrefix

#: The documents' headline workload: 150 groups × 5 prompts share a 6,000-token system prompt.
WORKLOAD = SharedPrefix(groups=150, prompts=5, system_tokens=6000, question_tokens=1200, output_tokens=1000)

HOST = "127.0.0.1"
MODEL = "Qwen/Qwen3-32B"

POLICIES = {"round-robin": "round robin", "default": "Fairlead"}


class Plan(Struct, frozen=True, kw_only=True):
    """One demo. Rates and times are in model time unless a name says `wall`."""

    #: Requests per policy. Six passes over the workload: the first fills the caches.
    requests: int = 4500
    #: Poisson arrivals per second of model time, over the whole pool. Round robin saturates at about 7.
    rate: float = 13.8
    #: Model seconds per wall-clock second.
    time_ratio: float = 8.0
    replicas: int = 8
    preset: str = "qwen3-32b-h100"
    #: Tokens per streamed event, as vLLM's --stream-interval; spares client and gateway work that decides nothing.
    stream_interval: int = 25
    seed: int = 1
    #: The gateway's; see `own_ports` and `replica_ports` for the others.
    port: int = 8080
    out: Path = Path("out/demo")

    @property
    def own_ports(self) -> tuple[int, int, int]:
        """Gateway, ext_proc, admin."""
        return self.port, self.port + 1, self.port + 2

    @property
    def replica_ports(self) -> range:
        return range(self.port + 10, self.port + 10 + self.replicas)

    @property
    def usual(self) -> bool:
        """Whether it is the demo whose results are known; where it listens and writes makes no difference."""
        return self == structs.replace(Plan(), port=self.port, out=self.out)

    def load(self, policy: str) -> RunSpec:
        """The load run against the gateway. Model-time rates become wall-clock rates here."""
        return RunSpec(
            target=f"http://{HOST}:{self.port}",
            name=POLICIES[policy],
            workload=SharedPrefix(
                groups=WORKLOAD.groups,
                prompts=WORKLOAD.prompts,
                system_tokens=WORKLOAD.system_tokens,
                question_tokens=WORKLOAD.question_tokens,
                output_tokens=WORKLOAD.output_tokens,
                seed=self.seed,
                model=MODEL,
                extra={"ignore_eos": True},
            ),
            arrivals=Poisson(self.rate * self.time_ratio, self.seed),
            options=Options(requests=self.requests, time_ratio=self.time_ratio, timeout_s=600.0, time_limit_s=600.0),
        )

    def config(self, policy: str, endpoints: Path) -> str:
        """The configuration of `fairlead serve` for this policy, as JSON (which is YAML)."""
        gateway, ext_proc, admin = self.own_ports
        return json.dumps(
            {
                "policy": policy,
                "gateway": {"mode": "embedded", "host": HOST, "port": gateway, "concurrency": 1},
                "extProc": {"host": HOST, "port": ext_proc},
                "admin": {"host": HOST, "port": admin},
                "endpoints": {"file": str(endpoints), "watch": False},
                "log": {"level": "warning"},
                "seed": self.seed,
            },
            indent=2,
        )

    def describe(self) -> str:
        return (
            f"{self.requests} requests at {self.rate:g}/s (Poisson) to {self.replicas} simulated replicas of "
            f"Qwen3-32B on 2×H100; {WORKLOAD.groups} groups × {WORKLOAD.prompts} prompts, "
            f"{WORKLOAD.system_tokens:,} + {WORKLOAD.question_tokens:,} tokens in, {WORKLOAD.output_tokens:,} out. "
            f"The replicas run {self.time_ratio:g}× faster than real ones; all figures are converted to real time."
        )
