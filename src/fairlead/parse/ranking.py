"""Texts compared with texts: `/score` (vLLM and SGLang) and `/rerank` (the form of Jina and Cohere)."""

from msgspec import Raw

from fairlead.model.errors import ClientError
from fairlead.parse.api import RERANK, SCORE
from fairlead.parse.body import ABSENT, Body, Reader
from fairlead.parse.media import media_items, text_size
from fairlead.parse.parsed import Parsed, ParsedRequest, is_sent, named, short_text
from fairlead.parse.prompt import anything


class RankingBody(Body, gc=False):
    query: Raw = ABSENT
    documents: Raw = ABSENT
    #: SGLang's word for the documents of `/v1/score`.
    items: Raw = ABSENT
    #: vLLM's words for the two sides of `/score`, newest first.
    queries: Raw = ABSENT
    data_1: Raw = ABSENT
    data_2: Raw = ABSENT
    text_1: Raw = ABSENT
    text_2: Raw = ABSENT
    user: Raw = ABSENT


_read = Reader(RankingBody).read


def parse_rerank(body: bytes, content_type: str = "") -> Parsed:
    """Raises `ClientError`."""
    read = _read(body)
    if read is None:
        return None
    for name, side in (("query", read.query), ("documents", read.documents)):
        if not is_sent(side):
            raise ClientError(f"Missing required parameter: '{name}'.", param=name)
    return _compared(RERANK, read, read.query, read.documents)


def parse_score(body: bytes, content_type: str = "") -> Parsed:
    """Raises `ClientError`."""
    read = _read(body)
    if read is None:
        return None
    for one, other in (
        (read.queries, read.documents),
        (read.data_1, read.data_2),
        (read.text_1, read.text_2),
        (read.query, read.items),
    ):
        if is_sent(one) and is_sent(other):
            return _compared(SCORE, read, one, other)
    raise ClientError("Missing required parameters: 'queries' and 'documents' (or 'text_1' and 'text_2').")


def _compared(api: str, read: RankingBody, one: Raw, other: Raw) -> ParsedRequest:
    views = (anything(one).view, anything(other).view)
    items = [media_items(view) for view in views]
    return ParsedRequest(
        api,
        read.model or "",
        prompt=views,
        root=b"%b %b" % (api.encode(), named(read.model, read.cache_salt)),
        prompt_bytes=sum(map(text_size, views, items)),
        user=short_text(read.user),
        media=sum(items),
    )
