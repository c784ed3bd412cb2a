"""`Answer`: what a scheduler says. It comes from anybody: everything is bounded, nothing is believed yet."""

from fairlead.model.errors import ProtocolError
from fairlead.model.remote import RemotePick
from fairlead.wire.protobuf import field, fields
from fairlead.wire.scheduler import Answer, Picks, Welcome
from fairlead.wire.scheduler_fields import double, integer, read_double, read_integer, read_text, sub, text

#: Alternatives of one pick that are kept.
MAX_ALTERNATIVES = 16
#: Characters of a reason that are kept.
MAX_REASON = 200
_UINT32 = (1 << 32) - 1


def encode_answer(answer: Answer) -> bytes:
    parts = []
    if answer.welcome is not None:
        welcome = answer.welcome
        parts.append(
            field(
                1,
                integer(1, welcome.version)
                + text(2, welcome.scheduler)
                + text(3, welcome.policy)
                + integer(4, welcome.wants_forecasts),
            )
        )
    if answer.picks is not None:
        picks = [field(2, _pick(one)) for one in answer.picks.picks]
        parts.append(field(2, integer(1, answer.picks.batch) + b"".join(picks)))
    return b"".join(parts)


def _pick(pick: RemotePick) -> bytes:
    parts = [
        integer(1, pick.request_id),
        integer(2, pick.outcome),
        text(3, pick.endpoint),
        double(4, pick.score),
        text(5, pick.reason),
        *(field(6, text(1, name) + double(2, score)) for name, score in pick.alternatives),
        text(7, pick.prefill),
    ]
    return b"".join(parts)


def decode_answer(data: bytes) -> Answer:
    """Raises `ProtocolError` for anything malformed; unknown fields and outcomes are kept out."""
    welcome: Welcome | None = None
    picks: Picks | None = None
    for part in fields(data):
        if part[0] == 1:
            welcome = _read_welcome(data, *sub(part))
        elif part[0] == 2:
            if picks is not None:
                raise ProtocolError("an Answer with two Picks")
            picks = _read_picks(data, *sub(part))
    return Answer(welcome=welcome, picks=picks)


def _read_welcome(data: bytes, pos: int, end: int) -> Welcome:
    version, scheduler, policy, wants = 0, "", "", False
    for part in fields(data, pos, end):
        if part[0] == 1:
            version = read_integer(part, _UINT32)
        elif part[0] == 2:
            scheduler = read_text(data, part)
        elif part[0] == 3:
            policy = read_text(data, part)
        elif part[0] == 4:
            wants = bool(read_integer(part))
    return Welcome(version=version, scheduler=scheduler, policy=policy, wants_forecasts=wants)


def _read_picks(data: bytes, pos: int, end: int) -> Picks:
    batch = 0
    picks: list[RemotePick] = []
    for part in fields(data, pos, end):
        if part[0] == 1:
            batch = read_integer(part)
        elif part[0] == 2:
            picks.append(_read_pick(data, *sub(part)))
    return Picks(batch=batch, picks=tuple(picks))


def _read_pick(data: bytes, pos: int, end: int) -> RemotePick:
    request = outcome = 0
    endpoint = reason = prefill = ""
    score = 0.0
    alternatives: list[tuple[str, float]] = []
    for part in fields(data, pos, end):
        number = part[0]
        if number == 1:
            request = read_integer(part)
        elif number == 2:
            outcome = read_integer(part)
        elif number == 3:
            endpoint = read_text(data, part)
        elif number == 4:
            score = read_double(part)
        elif number == 5:
            reason = read_text(data, part)[:MAX_REASON]
        elif number == 6 and len(alternatives) < MAX_ALTERNATIVES:
            alternatives.append(_read_alternative(data, *sub(part)))
        elif number == 7:
            prefill = read_text(data, part)
    return RemotePick(request, outcome, endpoint, score, reason, tuple(alternatives), prefill)


def _read_alternative(data: bytes, pos: int, end: int) -> tuple[str, float]:
    name, score = "", 0.0
    for part in fields(data, pos, end):
        if part[0] == 1:
            name = read_text(data, part)
        elif part[0] == 2:
            score = read_double(part)
    return name, score
