"""The API of a request path. Only whole path segments count: `/v1/foocompletions` is not `/v1/completions`.

The names are labels of metrics and keys of learned values, so there are few of them and their meaning never changes.
"""

import re
from urllib.parse import unquote

CHAT = "chat"
COMPLETIONS = "completions"
EMBEDDINGS = "embeddings"
#: OpenAI's Responses API, and the conversations and responses that it may store.
RESPONSES = "responses"
#: A response that depends on what one server stores, or is to be stored there: no other server knows of it.
RESPONSES_STORED = "responses_stored"
CONVERSATIONS = "conversations"
#: Anthropic's Messages API, and its token count.
MESSAGES = "messages"
COUNT_TOKENS = "count_tokens"
SCORE = "score"
RERANK = "rerank"
#: vLLM's `/pooling` and `/classify`.
POOLING = "pooling"
AUDIO = "audio"
IMAGES = "images"
#: vLLM's token-in, token-out API, and SGLang's own.
GENERATE = "generate"
SGLANG = "sglang"
#: vLLM's gRPC engine service: `Generate` and `Embed`.
GRPC = "grpc"
GRPC_EMBED = "grpc_embed"
#: Tokenise and detokenise; and convert a prompt into a token-in request (`…/render`).
TOKENIZE = "tokenize"
RENDER = "render"
#: The list of models.
MODELS = "models"
#: Every other path; its body is passed on unread.
OTHER = "other"

#: APIs that generate no tokens, or none that a scheduler could count.
WITHOUT_OUTPUT = frozenset(
    (EMBEDDINGS, CONVERSATIONS, COUNT_TOKENS, SCORE, RERANK, POOLING, IMAGES, GRPC_EMBED, TOKENIZE, RENDER, MODELS)
)
#: APIs whose requests may have several prompts. All others have one, whatever number of answers they ask for.
PROMPT_LISTS = frozenset((COMPLETIONS, SGLANG, EMBEDDINGS, POOLING, SCORE, RERANK))
#: APIs whose requests are turns of a conversation.
CONVERSED = frozenset((CHAT, MESSAGES, RESPONSES, RESPONSES_STORED))
#: APIs that the engine's model has nothing to do for.
WITHOUT_MODEL = frozenset((CONVERSATIONS, COUNT_TOKENS, TOKENIZE, RENDER, MODELS))
#: APIs whose requests are not repeated once they may have begun: their effect is unknown, or they use stored data.
#: All others sample, or compute the same result again.
BEGUN_ONCE = frozenset((OTHER, CONVERSATIONS, RESPONSES_STORED))
#: APIs whose requests may ask for a stream. A request that could not be read is assumed to have asked for one.
STREAMING = frozenset((CHAT, COMPLETIONS, RESPONSES, RESPONSES_STORED, MESSAGES, AUDIO, IMAGES, GENERATE, SGLANG, GRPC))

#: Paths that are recognised after any prefix, because they are unambiguous.
ANYWHERE = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/embeddings": EMBEDDINGS,
    "/v1/responses": RESPONSES,
    "/v1/conversations": CONVERSATIONS,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT_TOKENS,
    "/v1/score": SCORE,
    "/v1/rerank": RERANK,
    "/v2/rerank": RERANK,
    "/v1/audio/transcriptions": AUDIO,
    "/v1/audio/translations": AUDIO,
    "/v1/audio/speech": AUDIO,
    "/v1/images/generations": IMAGES,
    "/v1/images/edits": IMAGES,
    "/v1/images/variations": IMAGES,
    "/inference/v1/generate": GENERATE,
    "/v1/chat/completions/render": RENDER,
    "/v1/completions/render": RENDER,
    "/v1/models": MODELS,
}
#: Recognised only as the whole path, because other paths end in the same words.
_BARE = {
    "/generate": SGLANG,
    "/generate_stream": SGLANG,
    "/score": SCORE,
    "/rerank": RERANK,
    "/pooling": POOLING,
    "/classify": POOLING,
    "/tokenize": TOKENIZE,
    "/detokenize": TOKENIZE,
    "/vllm.grpc.engine.VllmEngine/Generate": GRPC,
    "/vllm.grpc.engine.VllmEngine/Embed": GRPC_EMBED,
}
#: Whole paths.
EXACT = ANYWHERE | _BARE
_MAX_SEGMENTS = max(path.count("/") for path in EXACT)
#: What is stored under an id, and what may be done to it.
_STORED = re.compile(r"/v1/(?:responses/resp|conversations/conv)[_-][\w-]*(?:/[\w-]+){0,2}\Z", re.ASCII)


def untimed(api: str, path: str) -> bool:
    """Return whether a request's tokens say nothing about the time that it takes, because its answer is an image or
    speech. The engine may compute it for minutes, and its token counters do not move."""
    return api == IMAGES or (api == AUDIO and "/audio/speech" in path)


#: Path syntax that servers may normalise: escapes, empty and dot segments, parameters, a whole URL.
_ODD = re.compile(r"%|//|/\.|\\|;|^[^/]")
_AUTHORITY = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*")
_MOST_ESCAPED = 3


def read_path(path: str) -> str:
    """Return the path as a model server or gateway may normalise it, if the result is the path of a known API; else the
    path itself. So no unusual spelling can bypass the rules for an API."""
    if _ODD.search(path) is None:
        return path
    bare, question, query = _AUTHORITY.sub("", path, count=1).partition("?")
    for _ in range(_MOST_ESCAPED):
        bare = unquote(bare, errors="replace")
    segments: list[str] = []
    for segment in bare.replace("\\", "/").split("/"):
        name = segment.partition(";")[0].strip()
        if name == "..":
            del segments[-1:]
        elif name not in ("", "."):
            segments.append(name)
    read = "/" + "/".join(segments)
    return read + question + query if api_of(read) != OTHER else path


def names_stored(path: str) -> bool:
    """Whether the path names what is stored under an id. Bodies there have no form that is known here."""
    return _STORED.search(path.partition("?")[0].removesuffix("/")) is not None


def api_of(path: str) -> str:
    """Return the API of a request path; the query and one trailing slash are ignored.

    Any whole segments may precede an unambiguous path (`/v1/…`). If several API paths match, the longest wins. Nothing
    is decoded (`read_path` does). O(length of the path).
    """
    api = EXACT.get(path)
    if api is not None:
        return api
    path = path.partition("?")[0].removesuffix("/")
    segments = path.rsplit("/", _MAX_SEGMENTS)
    for first in range(1, len(segments)):
        tail = "/" + "/".join(segments[first:])
        api = EXACT.get(tail)
        if api is not None:
            return api if tail in ANYWHERE or tail == path else OTHER
    return CONVERSATIONS if _STORED.search(path) else OTHER
