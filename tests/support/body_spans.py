"""Where a value stands in a request's body."""

from fairlead.apis.splice import model_member


def model_span(body: bytes) -> tuple[int, int] | None:
    """Offsets (start, end) of the model's name, quotes included; `None` if the body names none by a string."""
    member = model_member(body)
    return member.value if member and member.value and body[member.value[0]] == 0x22 else None
