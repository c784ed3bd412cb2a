"""What `fairlead bench` is asked for on its command line → what to send, and when."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fairlead.bench.arrivals import ClosedLoop, OpenLoop
from fairlead.bench.replay import Paced, Recorded, Replay
from fairlead.bench.workload import Chat, SharedPrefix, Workload
from fairlead.model.errors import ConfigError
from fairlead.sim.workfiles import read_workload
from fairlead.workload.catalogue import CATALOGUE
from fairlead.workload.conversation import Conversation
from fairlead.workload.generate import ADVERSARIAL, Pace, arrivals_of, generate
from fairlead.workload.record import Record

#: Smaller than those of published figures, so that any endpoint answers them in a minute.
SHARED_PREFIX = SharedPrefix(groups=20, prompts=10, system_tokens=2000, question_tokens=200, output_tokens=200)
CHAT = Chat()
#: Made as one long list before the run.
SESSIONS = ("conversation", *CATALOGUE)
KINDS = ("shared-prefix", "chat", *SESSIONS, *ADVERSARIAL)
DEFAULT_RATE, DEFAULT_REQUESTS = 5.0, 200
#: Conversations start at this rate before they are paced: with 45 s between turns, some 30 go on at a time.
_SESSION_RATE = 0.2


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """The command line. 0 and empty = not given."""

    workload: str = "shared-prefix"
    parameters: Mapping[str, str] = {}
    rate: float = 0.0
    arrivals: str = ""
    cv: float = 3.0
    to_rate: float = 0.0
    closed: int = 0
    requests: int = 0
    seconds: float = 0.0
    speedup: float = 0.0
    output_tokens: int = 0
    extra: Mapping[str, Any] = {}
    seed: int = 0


class Load(msgspec.Struct, kw_only=True):
    """What to send and when; `workload` makes the requests once the model's name is known."""

    arrivals: OpenLoop | ClosedLoop
    #: One of both bounds the run.
    requests: int
    seconds: float
    #: In words, for the title and the summary.
    described: str
    #: `None`: made endlessly from `wish`.
    records: Sequence[Record] | None
    wish: Wish

    @property
    def names_models(self) -> bool:
        """Every record says which model it wants."""
        return self.records is not None and all(record.model or record.lora for record in self.records)

    def workload(self, model: str, fallback: str) -> Workload:
        """Raises ConfigError for a parameter that cannot be. `fallback` is used where nobody names a model."""
        wish = self.wish
        if self.records is not None:
            return Replay(
                self.records,
                model=model,
                fallback_model=fallback,
                output_tokens=wish.output_tokens,
                extra=dict(wish.extra),
                seed=wish.seed,
            )
        return _endless(wish, model or fallback)


def build(wish: Wish) -> Load:
    """Raises ConfigError for a wish that makes no sense, TraceError or OSError for a file that cannot be read."""
    _check(wish)
    records = _records(wish)
    if records is None:
        _endless(wish, "")
    elif not records:
        raise ConfigError("the workload holds no request", "--workload")
    if wish.closed:
        arrivals: OpenLoop | ClosedLoop = ClosedLoop(workers=wish.closed)
        when = f"closed loop of {wish.closed}"
    elif records is not None and _has_own_times(wish):
        speedup = wish.speedup or 1.0
        arrivals = Recorded(records, speedup)
        when = "at its own times" + (f", {speedup:g} times as fast" if speedup != 1 else "")
    else:
        arrivals, when = _paced(wish)
    requests = wish.requests or (0 if wish.seconds else DEFAULT_REQUESTS)
    if records is not None:
        requests = min(wish.requests or len(records), len(records))
    return Load(
        arrivals=arrivals,
        requests=requests,
        seconds=wish.seconds,
        described=f"{Path(wish.workload).name}, {when}",
        records=records,
        wish=wish,
    )


def _check(wish: Wish) -> None:
    for name in ("rate", "to_rate", "seconds", "speedup", "requests", "closed", "output_tokens"):
        if getattr(wish, name) < 0:
            raise ConfigError("must not be negative", f"--{name.replace('_', '-')}")
    if wish.workload not in KINDS and not Path(wish.workload).is_file():
        raise ConfigError(f"{wish.workload!r} is neither a file nor one of {', '.join(KINDS)}", "--workload")
    if wish.closed and (wish.rate or wish.arrivals):
        raise ConfigError("a closed loop has no rate and no arrivals: leave out --rate and --arrivals", "--closed")
    if wish.speedup and not _has_own_times(wish):
        raise ConfigError("is for a file that is replayed at its own times; here --rate says how fast", "--speedup")
    if wish.parameters and wish.workload not in KINDS:
        raise ConfigError("a file has no parameters", "--set")
    if wish.workload in SESSIONS and wish.closed and not wish.requests:
        raise ConfigError("say how many, conversations are made before they are sent", "--requests")


def _has_own_times(wish: Wish) -> bool:
    made_to_measure = wish.workload in ("shared-prefix", "chat", *SESSIONS)
    return not (made_to_measure or wish.rate or wish.arrivals or wish.closed)


def _paced(wish: Wish) -> tuple[OpenLoop, str]:
    kind, rate = wish.arrivals or "poisson", wish.rate or DEFAULT_RATE
    if kind == "ramp" and not (wish.to_rate and wish.seconds):
        raise ConfigError("a ramp goes from --rate to --to-rate within --seconds: give all three", "--arrivals")
    pace = Pace(rate=rate, arrivals=kind, cv=wish.cv, to_rate=wish.to_rate, seconds=wish.seconds)
    try:
        made = arrivals_of(pace)
    except ValueError as error:
        raise ConfigError(str(error), "--arrivals") from None
    until = f" to {wish.to_rate:g}" if kind == "ramp" else ""
    return Paced(made, wish.seed), f"{kind} arrivals at {rate:g}{until}/s"


def _records(wish: Wish) -> Sequence[Record] | None:
    """`None` for a workload that has no end."""
    if wish.workload in ("shared-prefix", "chat"):
        return None
    if wish.workload not in KINDS:
        return read_workload(Path(wish.workload)).records
    try:
        if wish.workload in ADVERSARIAL:
            return generate(wish.workload, Pace(seed=wish.seed), wish.parameters).records
        return _conversations(wish)
    except ValueError as error:
        raise ConfigError(str(error), "--set") from None


def _conversations(wish: Wish) -> Sequence[Record]:
    """So many sessions that they hold the requests wanted; turns of many sessions lie between each other."""
    count = wish.requests or DEFAULT_REQUESTS
    if wish.seconds and not wish.requests:
        # Half as many again as are expected, since arrivals are random.
        count = int(max(wish.rate or DEFAULT_RATE, wish.to_rate) * wish.seconds * 1.5) + 100
    spec = CATALOGUE[wish.workload].spec if wish.workload in CATALOGUE else Conversation()
    # A few long ones hold as much as many short ones, and a list of all turns has to fit into memory.
    sessions = max(int(2 * count / spec.turns) + 1, 20 if spec.turns <= 30 else 4)
    while True:
        pace = Pace(rate=_SESSION_RATE, count=sessions, seed=wish.seed)
        records = generate(wish.workload, pace, wish.parameters).records
        if len(records) >= count:
            return records[:count]
        sessions *= 2


def _endless(wish: Wish, model: str) -> SharedPrefix | Chat:
    base: SharedPrefix | Chat = CHAT if wish.workload == "chat" else SHARED_PREFIX
    fields = msgspec.structs.asdict(base)
    settable = [name for name in fields if name not in ("seed", "model", "extra")]
    for name in wish.parameters:
        if name not in settable:
            raise ConfigError(f"unknown parameter {name!r}; known: {', '.join(settable)}", "--set")
    fields |= {**wish.parameters, "seed": wish.seed, "model": model, "extra": dict(wish.extra)}
    if wish.output_tokens:
        fields["output_tokens"] = wish.output_tokens
    try:
        return msgspec.convert(fields, type(base), strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error), "--set") from None
