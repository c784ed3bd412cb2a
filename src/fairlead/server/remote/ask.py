"""`Ask`: what Fairlead tells a scheduler. Encoded for every batch, so columns travel as they lie in memory."""

import numpy as np
from msgspec.structs import asdict

from fairlead.core.errors import ProtocolError
from fairlead.core.request import Request
from fairlead.gateway.protobuf import field, fields
from fairlead.server.remote.messages import (
    COLUMNS,
    MAX_SLOT,
    Ask,
    Asked,
    Batch,
    EndpointState,
    Floats,
    Forecast,
    Hello,
    Slots,
    Speeds,
    State,
    double,
    doubles,
    integer,
    read_double,
    read_doubles,
    read_integer,
    read_slots,
    read_text,
    slots,
    sub,
    text,
)

_SPEEDS = ("c0", "c_pf", "c_attn", "c_seq", "c_kv", "hold_ms", "answer_steps")
_FORECAST = ("ttft_ms", "prefill_ms", "step_ms", "used")
_UINT32 = (1 << 32) - 1


# ---- to bytes ----


def encode_ask(ask: Ask) -> bytes:
    parts = []
    if ask.hello is not None:
        parts.append(field(1, _hello(ask.hello)))
    if ask.state is not None:
        parts.append(field(2, _state(ask.state)))
    if ask.batch is not None:
        parts.append(field(3, _batch(ask.batch)))
    return b"".join(parts)


def _hello(hello: Hello) -> bytes:
    return b"".join(
        (integer(1, hello.version), text(2, hello.gateway), text(3, hello.pool), integer(4, hello.budget_us))
    )


def _state(state: State) -> bytes:
    parts = [integer(1, state.version), integer(2, state.full)]
    parts += [field(3, _endpoint(endpoint)) for endpoint in state.endpoints]
    parts.append(slots(4, state.gone))
    if len(state.slots):
        load = [slots(1, state.slots.tolist()), *(doubles(number, column) for number, column in state.columns.items())]
        parts.append(field(5, b"".join(load)))
    parts.append(integer(6, state.settled))
    if state.speeds is not None:
        speeds = asdict(state.speeds)
        values = [double(number, speeds[name]) for number, name in enumerate(_SPEEDS, 1)]
        parts.append(field(7, b"".join(values)))
    return b"".join(parts)


def _endpoint(state: EndpointState) -> bytes:
    parts = [integer(1, state.slot), text(2, state.id), text(3, state.address)]
    parts += [field(4, text(1, key) + text(2, value)) for key, value in state.labels.items()]
    if state.adapters is not None:
        # An empty name is no default here: it would shift nothing, but it is an entry.
        parts.append(field(5, b"".join([field(1, name.encode("utf-8", "replace")) for name in state.adapters])))
    return b"".join(parts)


def _batch(batch: Batch) -> bytes:
    parts = [integer(1, batch.number), double(2, batch.now)]
    parts += [field(3, _asked(asked)) for asked in batch.requests]
    return b"".join(parts)


def _asked(asked: Asked) -> bytes:
    request = asked.request
    priority = request.priority
    parts = [
        integer(1, request.id),
        text(2, request.api),
        text(3, request.target_model),
        integer(4, request.stream),
        integer(5, min(request.prompt_tokens, _UINT32)),
        integer(6, request.prompt_bytes),
        integer(7, min(request.max_tokens, _UINT32)),
        integer(8, priority << 1 if priority >= 0 else ~(priority << 1)),
        text(9, request.session),
        text(10, request.fairness_id),
        double(11, request.slo_ttft_ms),
        double(12, request.slo_tpot_ms),
        integer(13, min(request.media, _UINT32)),
        double(14, asked.expected_output),
        slots(15, asked.hit_slots.tolist()),
        doubles(16, asked.hit_shares),
    ]
    if asked.candidates is not None:
        parts.append(field(17, slots(1, asked.candidates.tolist())))
    if asked.forecast is not None:
        forecast = asdict(asked.forecast)
        columns = [doubles(number, forecast[name]) for number, name in enumerate(_FORECAST, 1)]
        parts.append(field(18, b"".join(columns)))
    return b"".join(parts)


# ---- from bytes ----


def decode_ask(data: bytes) -> Ask:
    """Raises `ProtocolError` for anything malformed; unknown fields are skipped."""
    ask = Ask()
    for part in fields(data):
        number = part[0]
        if number == 1:
            ask.hello = _read_hello(data, *sub(part))
        elif number == 2:
            ask.state = _read_state(data, *sub(part))
        elif number == 3:
            ask.batch = _read_batch(data, *sub(part))
    return ask


def _read_hello(data: bytes, pos: int, end: int) -> Hello:
    version = budget = 0
    gateway = pool = ""
    for part in fields(data, pos, end):
        if part[0] == 1:
            version = read_integer(part, _UINT32)
        elif part[0] == 2:
            gateway = read_text(data, part)
        elif part[0] == 3:
            pool = read_text(data, part)
        elif part[0] == 4:
            budget = read_integer(part, _UINT32)
    return Hello(version=version, gateway=gateway, pool=pool, budget_us=budget)


def _read_state(data: bytes, pos: int, end: int) -> State:
    state = State()
    for part in fields(data, pos, end):
        number = part[0]
        if number == 1:
            state.version = read_integer(part)
        elif number == 2:
            state.full = bool(read_integer(part))
        elif number == 3:
            state.endpoints.append(_read_endpoint(data, *sub(part)))
        elif number == 4:
            state.gone += read_slots(data, part, None).tolist()
        elif number == 5:
            _read_load(data, *sub(part), state)
        elif number == 6:
            state.settled = read_integer(part)
        elif number == 7:
            state.speeds = _read_speeds(data, *sub(part))
    return state


def _read_load(data: bytes, pos: int, end: int, state: State) -> None:
    columns: dict[int, Floats] = {}
    for part in fields(data, pos, end):
        number = part[0]
        if number == 1:
            state.slots = read_slots(data, part, state.slots if len(state.slots) else None)
        elif number in COLUMNS:
            columns[number] = read_doubles(data, part, columns.get(number))
    for number, column in columns.items():
        if len(column) != len(state.slots):
            raise ProtocolError(f"column {COLUMNS[number]} has {len(column)} entries for {len(state.slots)} slots")
    state.columns = columns


def _read_endpoint(data: bytes, pos: int, end: int) -> EndpointState:
    slot, name, address = 0, "", ""
    labels: dict[str, str] = {}
    adapters: tuple[str, ...] | None = None
    for part in fields(data, pos, end):
        number = part[0]
        if number == 1:
            slot = read_integer(part, MAX_SLOT)
        elif number == 2:
            name = read_text(data, part)
        elif number == 3:
            address = read_text(data, part)
        elif number == 4:
            pair = {inner[0]: read_text(data, inner) for inner in fields(data, *sub(part)) if inner[0] in (1, 2)}
            labels[pair.get(1, "")] = pair.get(2, "")
        elif number == 5:
            names = tuple(read_text(data, inner) for inner in fields(data, *sub(part)) if inner[0] == 1)
            adapters = (*(adapters or ()), *names)
    if not name:
        raise ProtocolError("an endpoint without an id")
    return EndpointState(slot=slot, id=name, address=address, labels=labels, adapters=adapters)


def _read_speeds(data: bytes, pos: int, end: int) -> Speeds:
    known = len(_SPEEDS)
    return Speeds(**{_SPEEDS[p[0] - 1]: read_double(p) for p in fields(data, pos, end) if p[0] <= known})


def _read_batch(data: bytes, pos: int, end: int) -> Batch:
    batch = Batch()
    for part in fields(data, pos, end):
        if part[0] == 1:
            batch.number = read_integer(part)
        elif part[0] == 2:
            batch.now = read_double(part)
        elif part[0] == 3:
            batch.requests.append(_read_asked(data, *sub(part), batch.now))
    return batch


#: Scalar fields of a request: field number → name, and how it is read.
_TEXTS = {2: "api", 3: "model", 9: "session", 10: "fairness_id"}
_NUMBERS = {5: "prompt_tokens", 6: "prompt_bytes", 7: "max_tokens", 13: "media"}
_DOUBLES = {11: "slo_ttft_ms", 12: "slo_tpot_ms"}


def _read_asked(data: bytes, pos: int, end: int, now: float) -> Asked:
    values: dict[str, object] = {"id": 0, "api": ""}
    hit_slots: Slots | None = None
    hit_shares: Floats | None = None
    expected, candidates, forecast = 0.0, None, None
    for part in fields(data, pos, end):
        number = part[0]
        if number in _TEXTS:
            values[_TEXTS[number]] = read_text(data, part)
        elif number in _NUMBERS:
            values[_NUMBERS[number]] = read_integer(part)
        elif number in _DOUBLES:
            values[_DOUBLES[number]] = read_double(part)
        elif number == 1:
            values["id"] = read_integer(part)
        elif number == 4:
            values["stream"] = bool(read_integer(part))
        elif number == 8:
            coded = read_integer(part)
            values["priority"] = coded >> 1 ^ -(coded & 1)
        elif number == 14:
            expected = read_double(part)
        elif number == 15:
            hit_slots = read_slots(data, part, hit_slots)
        elif number == 16:
            hit_shares = read_doubles(data, part, hit_shares)
        elif number == 17:
            candidates = _read_candidates(data, *sub(part))
        elif number == 18:
            forecast = _read_forecast(data, *sub(part))
    asked = Asked(
        request=Request(arrived=now, **values),  # type: ignore[arg-type]
        expected_output=expected,
        candidates=candidates,
        forecast=forecast,
    )
    if hit_slots is not None or hit_shares is not None:
        if hit_slots is None or hit_shares is None or len(hit_slots) != len(hit_shares):
            raise ProtocolError("hit_slots and hit_shares are not parallel")
        asked.hit_slots, asked.hit_shares = hit_slots, hit_shares
    return asked


def _read_candidates(data: bytes, pos: int, end: int) -> Slots:
    slots: Slots | None = None
    for part in fields(data, pos, end):
        if part[0] == 1:
            slots = read_slots(data, part, slots)
    return np.zeros(0, dtype=np.intp) if slots is None else slots


def _read_forecast(data: bytes, pos: int, end: int) -> Forecast:
    columns: dict[str, Floats] = {}
    for part in fields(data, pos, end):
        if part[0] <= len(_FORECAST):
            name = _FORECAST[part[0] - 1]
            columns[name] = read_doubles(data, part, columns.get(name))
    if len({len(columns.get(name, ())) for name in _FORECAST}) != 1:
        raise ProtocolError("the columns of a forecast are not parallel")
    return Forecast(**{name: columns.get(name, np.zeros(0)) for name in _FORECAST})
