"""Which API a path speaks. Only whole path segments count: `/v1/foocompletions` is not `/v1/completions`."""

CHAT = "chat"
COMPLETIONS = "completions"
#: Everything that is passed on unread.
OTHER = "other"

_EXACT = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETIONS}


def api_of(path: str, prefix: str | None = None) -> str:
    """The API of a request path; the query and one trailing slash are ignored.

    `prefix` is what may stand before `/v1`, such as `/openai`; `None` allows any whole segments. The bare `/v1/…` is
    always accepted. Percent-encoded slashes are not decoded: such a path is `other`, hence still scheduled.
    """
    api = _EXACT.get(path)
    if api is not None:
        return api
    path = path.partition("?")[0].removesuffix("/")
    for tail, api in _EXACT.items():
        if path.endswith(tail):
            before = path[: -len(tail)]
            allowed = prefix is None or before in ("", prefix.rstrip("/"))
            return api if allowed else OTHER
    return OTHER
