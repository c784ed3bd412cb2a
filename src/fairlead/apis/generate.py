"""APIs that take token ids: vLLM's `/inference/v1/generate` and SGLang's `/generate`, which also takes text. TGI and
vLLM's former demo server have a `/generate` of their own, with other names for the same."""

from typing import Any

from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder
from msgspec.structs import replace

from fairlead.apis.body import (
    ABSENT,
    SALVAGE_LIMIT,
    Body,
    Reader,
    Scalar,
    StreamOptions,
    count,
    flag,
    refuse_transfers,
)
from fairlead.apis.parsed import MAX_N, Parsed, ParsedRequest, Text, choices, is_sent, named, reading, scope, short_text
from fairlead.apis.prompt import MEDIA_BYTES, items, list_prefix, prompts_in, text_or_list, token_ids, truncated
from fairlead.core.apis import GENERATE, SGLANG
from fairlead.core.errors import ClientError


class GenerateBody(Body, gc=False):
    token_ids: Raw = ABSENT
    sampling_params: Raw = ABSENT
    stream_options: StreamOptions | None = None
    #: Hashes and positions of media, whose tokens in `token_ids` are only placeholders.
    features: Raw = ABSENT


class SglangBody(Body, gc=False):
    text: Raw = ABSENT
    input_ids: Raw = ABSENT
    input_embeds: Raw = ABSENT
    sampling_params: Raw = ABSENT
    #: SGLang's cache salt.
    extra_key: Raw = ABSENT
    lora_path: Raw = ABSENT
    image_data: Raw = ABSENT
    audio_data: Raw = ABSENT
    video_data: Raw = ABSENT
    session_params: Raw = ABSENT
    #: TGI's names for `text` and `sampling_params`.
    inputs: Raw = ABSENT
    parameters: Raw = ABSENT
    #: The name of vLLM's former demo server for `text`.
    prompt: Raw = ABSENT


class _Sampling(Struct, gc=False):
    max_tokens: Scalar = None
    max_new_tokens: Scalar = None
    n: Scalar = None
    prompt_logprobs: Scalar = None
    #: vLLM's `kv_transfer_params` may also be in there.
    extra_args: Raw = ABSENT
    #: TGI's adapter, and the tokens at the prompt's end that it reads.
    adapter_id: Raw = ABSENT
    truncate: Scalar = None


class _Batch(Struct, array_like=True, gc=False):
    """A list of sets of sampling parameters, one per prompt of a batch. Only the first is read."""

    first: _Sampling | None = None


class _Features(Struct, gc=False):
    mm_hashes: Raw = ABSENT


_read_generate = Reader(GenerateBody).read
_read_sglang = Reader(SglangBody).read
_decode_sampling = Decoder(_Sampling | None).decode
_decode_batch = Decoder(_Batch).decode
_decode_features = Decoder(_Features).decode
_decode_hashes = Decoder(dict[str, list[Any] | None]).decode


@reading(_read_generate)
def parse_generate(read: GenerateBody) -> ParsedRequest:
    ids = list_prefix(read.token_ids)
    tokens = token_ids(ids) if ids is not None else 0
    if ids is None or not tokens:
        raise ClientError("Missing required parameter: 'token_ids' must be a non-empty list.", param="token_ids")
    hashes, media = _features(read.features)
    sampling = _sampling(read.sampling_params)
    options = read.stream_options
    return ParsedRequest(
        GENERATE,
        read.model or "",
        flag(read.stream, "stream"),
        count(sampling.max_tokens, "max_tokens"),
        options is not None and flag(options.include_usage, "stream_options"),
        choices(sampling.n),
        prompt=(ids,),
        # Placeholder tokens are the same for all media. Without the hashes, two images would share one prefix.
        root=scope(b"generate %b" % named(read.model, read.cache_salt), (b"media", hashes)),
        prompt_bytes=len(ids),
        prompt_tokens=tokens,
        media=media,
        recomputed=sampling.prompt_logprobs is not None,
    )


@reading(_read_sglang)
def parse_sglang(read: SglangBody) -> ParsedRequest:
    """Parse a body of SGLang's `/generate`. The adapter (`lora_path`) is the model if the body names no model."""
    text, prompts = _sglang_prompt(read)
    sampling = _sampling(read.sampling_params if is_sent(read.sampling_params) else read.parameters)
    media = sum(map(items, (read.image_data, read.audio_data, read.video_data)))
    root = scope(
        b"sglang %b" % named(read.model, read.extra_key),
        (b"lora", read.lora_path),
        (b"adapter", sampling.adapter_id),
        (b"image", read.image_data),
        (b"audio", read.audio_data),
        (b"video", read.video_data),
        (b"session", read.session_params),
    )
    root, text = truncated(root, text, count(sampling.truncate, "truncate") * prompts, "left")
    return ParsedRequest(
        SGLANG,
        read.model or short_text(read.lora_path),
        flag(read.stream, "stream"),
        count(sampling.max_new_tokens, "max_new_tokens"),
        # Every reply and every event of a stream reports its usage in `meta_info`.
        include_usage=True,
        n=choices(sampling.n, prompts),
        prompt=(text.view,),
        root=root,
        prompt_bytes=text.size + media * MEDIA_BYTES,
        prompt_tokens=text.tokens,
        media=media,
    )


def parse_sglang_stream(body: bytes, content_type: str) -> Parsed:
    """Parse a body of TGI's `/generate_stream`, which has no field that asks for the stream."""
    parsed = parse_sglang(body, content_type)
    return None if parsed is None else replace(parsed, stream=True)


def _sglang_prompt(read: SglangBody) -> tuple[Text, int]:
    """The prompt or list of prompts, and the number of prompts."""
    for raw in (read.input_ids, read.text, read.inputs, read.prompt):
        text = text_or_list(raw)
        if text is not None:
            return text, prompts_in(raw)
    embeds = list_prefix(read.input_embeds)
    if embeds is None:
        raise ClientError("Missing required parameter: 'input_ids' or 'text'.", param="input_ids")
    return Text(embeds, 0, 0), 1


def _sampling(raw: Raw) -> _Sampling:
    """Read the sampling parameters; in a batch, the first set counts. The model server refuses what cannot be read."""
    if raw is ABSENT:
        return _Sampling()
    try:
        sampling = _decode_batch(raw).first if list_prefix(raw) is not None else _decode_sampling(raw)
    except (DecodeError, UnicodeDecodeError, RecursionError):
        refuse_transfers(raw)
        return _Sampling()
    if sampling is None:
        return _Sampling()
    refuse_transfers(sampling.extra_args)
    return sampling


def _features(raw: Raw) -> tuple[Raw, int]:
    """The media hashes as sent, and their number, `MAX_N` if they are large."""
    if not is_sent(raw):
        return ABSENT, 0
    try:
        hashes = _decode_features(raw).mm_hashes
        if len(memoryview(hashes)) > SALVAGE_LIMIT:
            return hashes, MAX_N  # as objects they would take many times their size
        return hashes, sum(len(of_kind or ()) for of_kind in _decode_hashes(hashes).values()) if is_sent(hashes) else 0
    except (DecodeError, UnicodeDecodeError, RecursionError):
        return ABSENT, 0
