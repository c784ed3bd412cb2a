import json
from pathlib import Path
from typing import Any

import pytest

from fairlead.apis.body import SALVAGE_LIMIT
from fairlead.apis.parsed import MAX_MODEL_CHARS, MAX_USER_CHARS, ParsedRequest
from fairlead.apis.prompt import MEDIA_BYTES
from fairlead.apis.request import parse_request
from fairlead.core.errors import ClientError

DATA = Path(__file__).parents[2] / "data" / "vllm-0.32-responses"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": 'Say "hi"\n🦊'}]


def chat(**members: Any) -> ParsedRequest:
    return parse_request(CHAT, json.dumps({"model": "m", "messages": MESSAGES} | members).encode())


def completion(**members: Any) -> ParsedRequest:
    return parse_request(COMPLETIONS, json.dumps({"model": "m", "prompt": "hi"} | members).encode())


def joined(parsed: ParsedRequest) -> bytes:
    return b"".join(parsed.prompt)


def recorded(case: str) -> tuple[str, bytes, int]:
    """Path and body of a recorded request, and the status it got."""
    head, _, body = (DATA / f"{case}.request.bin").read_bytes().partition(b"\r\n\r\n")
    status = (DATA / f"{case}.response.bin").read_bytes().split(b" ", 2)[1]
    return head.split(b" ")[1].decode(), body, int(status)


CASES = sorted(path.name.split(".")[0] for path in DATA.glob("*.request.bin"))
REFUSED_HERE_TOO = {"err_bad_json", "err_missing_messages", "err_missing_prompt", "err_type", "empty_messages"}


def test_recordings_are_there() -> None:
    assert len(CASES) > 25


@pytest.mark.parametrize("case", CASES)
def test_only_what_the_engine_refused_is_refused(case: str) -> None:
    path, body, status = recorded(case)
    if case in REFUSED_HERE_TOO:
        assert status == 400
        with pytest.raises(ClientError) as error:
            parse_request(path, body)
        assert error.value.status == 400
        return
    parsed = parse_request(path, body)
    if parsed.api not in ("chat", "completions"):
        assert path in ("/v1/responses", "/v1/models")
        return
    sent = json.loads(body)
    assert parsed.model == sent.get("model", "")
    assert parsed.stream == sent.get("stream", False)
    assert parsed.max_tokens == max(sent.get("max_tokens", 0), 0)
    assert parsed.include_usage == sent.get("stream_options", {}).get("include_usage", False)
    prompts = sent.get("prompt", "")
    each = len(prompts) if isinstance(prompts, list) and not isinstance(prompts[0], int) else 1
    assert parsed.n == sent.get("n", 1) * each
    raw = joined(parsed)
    if parsed.api == "chat":
        assert json.loads(raw + b"]") == sent["messages"]
    elif isinstance(sent["prompt"], str):
        assert json.loads(b'"' + raw + b'"') == sent["prompt"]
    else:
        assert json.loads(raw + b"]") == sent["prompt"]


def test_a_chat() -> None:
    parsed = chat(stream=True, max_tokens=9, user="u-1", stream_options={"include_usage": True}, n=2)
    raw = json.dumps(MESSAGES).encode()[:-1]
    assert joined(parsed) == raw
    assert parsed == ParsedRequest(
        api="chat",
        model="m",
        stream=True,
        max_tokens=9,
        include_usage=True,
        n=2,
        prompt=parsed.prompt,
        root=b"chat 1:m",
        prompt_bytes=len(raw),
        user="u-1",
    )


@pytest.mark.parametrize(
    ("api", "fields", "recomputed"),
    [
        ("chat", {}, False),
        ("chat", {"prompt_logprobs": 0}, True),
        ("chat", {"prompt_logprobs": None, "echo": False, "logprobs": True, "top_logprobs": 2}, False),
        ("chat", {"echo": True}, True),
        ("completions", {"logprobs": 1}, False),
        ("completions", {"echo": True}, False),
        ("completions", {"echo": True, "logprobs": 0}, True),
        ("completions", {"prompt_logprobs": 1}, True),
    ],
)
def test_log_probabilities_of_a_prompt_are_computed_without_the_cache(
    api: str, fields: dict[str, object], recomputed: bool
) -> None:
    parsed = chat(**fields) if api == "chat" else completion(prompt="a", **fields)
    assert (parsed.api, parsed.recomputed, parsed.n) == (api, recomputed, 1)


@pytest.mark.parametrize("indent", [None, 2])
def test_appended_messages_keep_the_prefix(indent: int | None) -> None:
    def body(messages: list[dict[str, str]]) -> bytes:
        return json.dumps({"stream": True, "messages": messages, "model": "m"}, indent=indent).encode()

    grown = [*MESSAGES, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "again"}]
    earlier = parse_request(CHAT, body(MESSAGES))
    later = parse_request(CHAT, body(grown))
    assert joined(later).startswith(joined(earlier))
    assert joined(later) != joined(earlier)
    assert later.root == earlier.root


def test_a_growing_token_list_keeps_the_prefix_and_is_counted() -> None:
    short, long = completion(prompt=[1, 2, 3]), completion(prompt=[1, 2, 3, 4])
    assert joined(long).startswith(joined(short))
    assert (short.prompt_tokens, long.prompt_tokens) == (3, 4)
    assert completion(prompt=[[1, 2], [3, 4, 5]]).prompt_tokens == 5
    assert completion(prompt=["1, 2", "3"]).prompt_tokens == 0
    assert completion(prompt="1, 2").prompt_tokens == 0
    assert completion(prompt=[]).prompt_tokens == 0


def test_output_limits() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert chat(max_tokens=5, max_completion_tokens=None).max_tokens == 5
    assert completion(max_tokens=5, max_completion_tokens=7).max_tokens == 5
    assert chat().max_tokens == 0
    assert chat(max_tokens="12").max_tokens == 12
    assert chat(max_tokens=1e3).max_tokens == 1000
    assert chat(max_tokens=10**30).max_tokens == 2**31 - 1
    assert completion(max_tokens=-1).max_tokens == 0


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"cache_salt": "s"},
        {"tools": [{"type": "function"}]},
        {"documents": [{"text": "d"}]},
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "high"},
        {"mm_processor_kwargs": {"fps": 1}},
        {"media_io_kwargs": {"video": {"num_frames": 4}}},
    ],
)
def test_what_scopes_the_prefix(change: dict[str, Any]) -> None:
    assert chat(**change).root != chat().root
    name = next(iter(change))
    if name != "model":
        assert chat(**{name: None}).root == chat().root


@pytest.mark.parametrize("ids", [True, False])
def test_of_a_truncated_prompt_only_the_end_counts(ids: bool) -> None:
    def turn(count: int, limit: object = 400) -> ParsedRequest:
        prompt: object = list(range(10_000, 10_000 + count)) if ids else "words of some letters " * (count // 5)
        return completion(prompt=prompt, truncate_prompt_tokens=limit)

    whole, cut = turn(2000, None), turn(2000)
    assert cut.root == turn(2000).root
    assert joined(cut) == joined(turn(2000))
    assert joined(whole).endswith(joined(cut))
    assert len(joined(cut)) == cut.prompt_bytes
    assert 4.0 <= cut.prompt_bytes / 400 <= 7.1
    assert cut.prompt_tokens == (400 if ids else 0)
    assert len({whole.root, cut.root, turn(2100).root, turn(2000, 500).root}) == 4
    for kept in (turn(2000, -1), turn(2000, 2100), turn(2000, 10**12)):
        assert (kept.root, joined(kept), kept.prompt_tokens) == (whole.root, joined(whole), whole.prompt_tokens)


@pytest.mark.parametrize("ids", [True, False])
def test_a_prompt_whose_end_is_dropped_begins_like_the_whole_one(ids: bool) -> None:
    def turn(count: int, **members: object) -> ParsedRequest:
        prompt: object = list(range(10_000, 10_000 + count)) if ids else "words of some letters " * (count // 5)
        return completion(prompt=prompt, **members)

    whole, cut = turn(2000), turn(2000, truncate_prompt_tokens=400, truncation_side="right")
    longer = turn(2500, truncate_prompt_tokens=400, truncation_side="right")
    assert whole.root == cut.root == longer.root
    assert joined(whole).startswith(joined(cut))
    assert joined(cut) == joined(longer)
    assert (cut.prompt_bytes, cut.prompt_tokens) == (len(joined(cut)), 400 if ids else 0)


def test_tools_count_of_a_truncated_chat() -> None:
    tools = [{"type": "function", "function": {"description": "x" * 20_000}}]
    whole, cut = chat(tools=tools), chat(tools=tools, truncate_prompt_tokens=4000)
    assert joined(cut) == joined(whole)
    assert cut.prompt_bytes == pytest.approx(4000 * whole.prompt_bytes / int(whole.prompt_bytes / 4.2), rel=0.01)


def test_each_prompt_of_a_list_is_truncated() -> None:
    prompts = [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert completion(prompt=prompts, truncate_prompt_tokens=3).prompt_tokens == 6
    assert completion(prompt=prompts, truncate_prompt_tokens=4) == completion(prompt=prompts)


def test_of_truncated_embeddings_only_what_is_kept_counts() -> None:
    def embed(**members: object) -> ParsedRequest:
        return parse_request("/v1/embeddings", json.dumps({"model": "m"} | members).encode())

    ids = list(range(1000))
    assert embed(input=ids, truncate_prompt_tokens=40).prompt_tokens == 40
    assert embed(input=[ids, ids], truncate_prompt_tokens=40).prompt_tokens == 80
    assert embed(input=ids, truncate_prompt_tokens=-1) == embed(input=ids)
    text = "words of some letters " * 400
    last = embed(input=text, truncate_prompt_tokens=40)
    first = embed(input=text, truncate_prompt_tokens=40, truncation_side="right")
    assert last.prompt_bytes == first.prompt_bytes <= 40 * 7
    assert first.root == embed(input=text).root != last.root
    said = embed(messages=[{"role": "user", "content": text}], truncate_prompt_tokens=40)
    assert said.prompt_bytes <= 40 * 7


@pytest.mark.parametrize(
    ("path", "query", "documents"), [("/rerank", "query", "documents"), ("/score", "text_1", "text_2")]
)
def test_of_truncated_pairs_only_what_is_kept_counts(path: str, query: str, documents: str) -> None:
    def compared(**members: object) -> ParsedRequest:
        body = {"model": "m", query: "what?", documents: ["words of some letters " * 400] * 3} | members
        return parse_request(path, json.dumps(body).encode())

    cut = compared(truncate_prompt_tokens=40)
    assert cut.prompt_bytes == int(3 * 40 * 4.2) < compared().prompt_bytes
    assert (cut.root, cut.n, joined(cut)) == (compared().root, 3, joined(compared()))
    for limit in (-1, None, 100_000):
        assert compared(truncate_prompt_tokens=limit) == compared()


def test_of_a_prompt_that_tgi_truncates_only_the_end_counts() -> None:
    def generate(**parameters: object) -> ParsedRequest:
        body = {"inputs": "words of some letters " * 400, "parameters": parameters}
        return parse_request("/generate", json.dumps(body).encode())

    whole, cut = generate(), generate(truncate=40)
    assert cut.prompt_bytes <= 40 * 7 < whole.prompt_bytes
    assert joined(whole).endswith(joined(cut))
    assert generate(truncate=100_000) == generate(truncate=None) == whole


def test_a_truncated_chat_ends_with_its_messages() -> None:
    def said(count: int, **members: Any) -> ParsedRequest:
        turns = [{"role": "user", "content": "question " * 100}, {"role": "assistant", "content": "answer " * 100}]
        return chat(messages=turns * count, tools=[{"type": "function"}], **members)

    whole, cut = said(3), said(3, truncate_prompt_tokens=200)
    assert joined(whole).endswith(joined(cut))
    assert cut.prompt_bytes == len(joined(cut)) == 840
    assert len({whole.root, cut.root, said(4, truncate_prompt_tokens=200).root}) == 3
    assert said(3, truncate_prompt_tokens="2000") == whole
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0K" * 10_000}}
    shown = {"messages": [{"role": "user", "content": [picture]}]}
    assert chat(**shown, truncate_prompt_tokens=2000) == chat(**shown)


HEADER = "x-anthropic-billing-header: cc_version=2.1.77.a1b; cc_entrypoint=cli; cch=%05x;"


def billed(number: int, system: Any, separators: tuple[str, str] | None = None) -> ParsedRequest:
    said = json.dumps([{"role": "system", "content": system}, *MESSAGES[1:]], separators=separators)
    return parse_request(CHAT, b'{"messages":%b}' % said.replace("HEADER", HEADER % number).encode())


@pytest.mark.parametrize("separators", [None, (",", ":")])
@pytest.mark.parametrize(
    "system",
    [
        "HEADER\nBe kind.",
        "HEADER\n\nBe kind.",
        [{"type": "text", "text": t} for t in ("HEADER", "Be kind.")],
        ["HEADER"],
    ],
)
def test_the_header_of_claude_code_is_no_part_of_the_prompt(system: Any, separators: tuple[str, str] | None) -> None:
    first, second = billed(1, system, separators), billed(2, system, separators)
    assert joined(first) == joined(second)
    assert first.prompt_bytes == len(joined(first))
    assert len(json.loads(joined(first) + b"]")) == 2
    if isinstance(system, str):
        plain = billed(1, system.partition("\n")[2], separators)
        assert (joined(first), first.prompt_bytes) == (joined(plain), plain.prompt_bytes)


@pytest.mark.parametrize("system", ["Be kind. HEADER\n", '"HEADER', ' "HEADER', "HEADE", "X-HEADER", ""])
def test_other_texts_stay_whole(system: str) -> None:
    said = {"role": "system", "content": system.replace("HEADER", HEADER % 1)}
    assert json.loads(joined(chat(messages=[said])) + b"]") == [said]


def test_root_parts_do_not_run_together() -> None:
    roots = {
        chat(model="a", cache_salt="b").root,
        chat(model='a salt 3:"b"').root,
        chat(model="a", tools="b").root,
        chat(model="a", documents="b").root,
        chat(model="ab").root,
        completion(model="ab").root,
        completion(model="a", cache_salt="b").root,
    }
    assert len(roots) == 7


def test_sampling_does_not_scope_the_prefix() -> None:
    assert chat(temperature=0.3, seed=1, stream=True, tool_choice="auto", user="x").root == chat().root


def test_tools_are_part_of_the_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "f" * 100}}]
    assert chat(tools=tools).prompt_bytes == chat().prompt_bytes + len(json.dumps(tools))


def test_inline_media_are_not_measured_by_their_length() -> None:
    def picture(size: int) -> ParsedRequest:
        url = "data:image/png;base64," + "iVBORw0K" * (size // 8)
        part = {"type": "image_url", "image_url": {"url": url}}
        return chat(messages=[{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}])

    small, large = picture(100_000), picture(400_000)
    assert small.prompt_bytes == large.prompt_bytes
    assert MEDIA_BYTES < large.prompt_bytes < MEDIA_BYTES + 500
    assert len(joined(large)) > 400_000


def test_talking_of_media_is_text() -> None:
    text = "a data URL has ;base64, in it " * 2000
    parsed = chat(messages=[{"role": "user", "content": text}])
    assert parsed.prompt_bytes == len(joined(parsed)) > len(text)


def test_media_outside_of_the_messages_do_not_count() -> None:
    parsed = chat(messages=[{"role": "user", "content": "x"}], extra=[";base64," + "A" * 9000] * 20)
    assert parsed.prompt_bytes == len(joined(parsed))
    assert parsed.media == 0


def test_what_the_engine_answers_itself_passes() -> None:
    assert completion(prompt="").prompt_bytes == 0
    assert parse_request(COMPLETIONS, b'{"prompt":"hi"}').model == ""
    assert parse_request(COMPLETIONS, b'{"prompt":"hi","model":null}').model == ""
    assert completion(unknown={"a": [1]}, temperature=-5).model == "m"
    assert completion(stream_options={"other": [1]}).include_usage is False
    assert completion(stream_options=None).include_usage is False
    assert completion(n=0).n == 1
    assert completion(n=10**9).n == 16384
    assert completion(user=17).user == ""
    assert completion(user="x" * (MAX_USER_CHARS + 1)).user == ""
    assert completion(prompt=None, prompt_embeds="AAAA").prompt_bytes == 0
    assert joined(completion(prompt=None, prompt_embeds=["AAAA"])) == b'["AAAA"'


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, b"", None),
        (COMPLETIONS, b"", None),
        (CHAT, b" ", None),
        (CHAT, b"{}", "messages"),
        (CHAT, b'{"messages":null}', "messages"),
        (CHAT, b'{"messages":{}}', "messages"),
        (CHAT, b'{"messages":"hi"}', "messages"),
        (CHAT, b'{"messages":[]}', "messages"),
        (CHAT, b'{"messages":[ \n\t ]}', "messages"),
        (CHAT, b'{"messages":[1],"max_tokens":{}}', "max_tokens"),
        (CHAT, b'{"messages":[1],"max_tokens":1.5}', "max_tokens"),
        (CHAT, b'{"messages":[1],"stream":"perhaps"}', "stream"),
        (CHAT, b'{"messages":[1],"n":"x"}', "n"),
        (CHAT, b'{"messages":[1],"stream_options":"x"}', "stream_options"),
        (CHAT, b'{"messages":[1],"stream_options":{"include_usage":[]}}', "stream_options"),
        (CHAT, b'{"messages":[1],"stream_options":{"include_usage":7}}', "stream_options"),
        (CHAT, b'{"messages":[1],"model":7}', "model"),
        (CHAT, b'{"messages":[1],"model":"\\ud800"}', "model"),
        (CHAT, b'{"messages":[1],"model":"' + b"x" * (MAX_MODEL_CHARS + 1) + b'"}', "model"),
        (COMPLETIONS, b"{}", "prompt"),
        (COMPLETIONS, b'{"prompt":null}', "prompt"),
        (COMPLETIONS, b'{"prompt":null,"prompt_embeds":null}', "prompt"),
        (COMPLETIONS, b'{"prompt":5}', "prompt"),
        (COMPLETIONS, b'{"prompt":"","truncate_prompt_tokens":"x"}', "truncate_prompt_tokens"),
        (CHAT, b'{"messages":[1],"truncate_prompt_tokens":1.5}', "truncate_prompt_tokens"),
        (COMPLETIONS, b'{"prompt":NaN}', "prompt"),
        (COMPLETIONS, b'{"prompt":true}', "prompt"),
        (COMPLETIONS, b'{"prompt":{}}', "prompt"),
    ],
)
def test_refusals_name_the_parameter(path: str, body: bytes, param: str | None) -> None:
    with pytest.raises(ClientError) as error:
        parse_request(path, body)
    assert (error.value.status, error.value.param) == (400, param)
    assert error.value.message.endswith(".")


def test_a_wrong_content_type_is_only_mentioned() -> None:
    assert parse_request(COMPLETIONS, b'{"prompt":"hi"}', "text/plain").api == "completions"
    with pytest.raises(ClientError, match="multipart/form-data"):
        parse_request(COMPLETIONS, b"--x", "multipart/form-data; boundary=x")
    with pytest.raises(ClientError) as error:
        parse_request(COMPLETIONS, b"--x", "Application/JSON")
    assert "content type" not in error.value.message


def test_what_is_not_read() -> None:
    assert parse_request("/v1/other", b"\xff{{{") == ParsedRequest(unread="path")
    assert parse_request("/v1/models", b"\xff{{{") == ParsedRequest("models", unread="path")
    packed = parse_request(CHAT, b"\x1f\x8b...", content_encoding="GZIP")
    assert packed == ParsedRequest("chat", stream=True, prompt_bytes=5, unread="content-encoding")
    assert parse_request(COMPLETIONS, b'{"prompt":"x"}', content_encoding=" identity").unread == ""
    large = b'{"x":NaN,"prompt":"' + b"x" * SALVAGE_LIMIT + b'"}'
    unread = ParsedRequest("completions", stream=True, prompt_bytes=len(large), unread="too-large")
    assert parse_request(COMPLETIONS, large) == unread


def test_a_prompt_is_a_view_of_the_body() -> None:
    body = json.dumps({"prompt": "hello " * 100}).encode()
    (view,) = parse_request(COMPLETIONS, body).prompt
    assert isinstance(view, memoryview)
    assert bytes(view) in body
