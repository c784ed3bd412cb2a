"""How a benchmark tells what it found."""

import json
from collections.abc import Callable
from typing import Any


def tell(found: Any, as_json: bool, show: Callable[[Any], None]) -> None:
    """One JSON object on one line, or what `show` prints."""
    if as_json:
        print(json.dumps(found))
    else:
        show(found)
