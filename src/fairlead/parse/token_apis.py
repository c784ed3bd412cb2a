"""`/tokenize`, `/detokenize` and `…/render`: the model's tokenizer and template are asked, not the model.

Nothing of these bodies goes through the engine's cache, so there is no prompt to hash and none to charge for.
"""

from fairlead.parse.api import RENDER, TOKENIZE
from fairlead.parse.body import Body, Reader
from fairlead.parse.parsed import Parsed, ParsedRequest, model_bytes

_read = Reader(Body).read


def parse_tokenize(body: bytes, content_type: str = "") -> Parsed:
    """Raises `ClientError`."""
    return _named(TOKENIZE, body)


def parse_render(body: bytes, content_type: str = "") -> Parsed:
    """Raises `ClientError`."""
    return _named(RENDER, body)


def _named(api: str, body: bytes) -> Parsed:
    read = _read(body)
    if read is None:
        return None
    model_bytes(read.model)
    return ParsedRequest(api, read.model or "")
