"""What the prefix index knows of a prompt, endpoint by endpoint."""

from fairlead.core.prefix import PrefixIndex
from fairlead.core.request import PrefixChain


def matches(index: PrefixIndex, chain: PrefixChain, slots: int = 65) -> dict[int, int]:
    """Matched bytes of every endpoint that holds at least the first block."""
    column = index.match(chain, slots)
    return {} if column is None else {slot: int(matched) for slot, matched in enumerate(column) if matched}
