"""A model server on the continuous batching of transformers: prompts in chunks, a paged cache, shared prefixes.

For a GPU where vLLM is not installed. Its API, its usage and its metrics page are what Fairlead needs of vLLM's. Run by
an interpreter with torch, transformers 5.17 or newer, tokenizers and aiohttp. FOLDER has `config.json`,
`tokenizer.json`, and the weights; without them the server makes random ones.
"""

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

BLOCK, IDLE_S = 32, 20.0
_TEMPLATE = "<|im_start|>{role}\n{content}<|im_end|>\n"


@dataclass
class Counts:
    prompt_tokens: int = 0
    generation_tokens: int = 0
    queries: int = 0
    hits: int = 0


class Engine:
    """The model and its scheduler, which has a thread of its own."""

    def __init__(self, folder: Path, cache_tokens: int, batch_tokens: int, sequences: int) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        if any(folder.glob("*.safetensors")):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
        else:
            with torch.device(device):
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
        model.set_attn_implementation("paged|sdpa")
        self._manager = model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1),
            ContinuousBatchingConfig(
                block_size=BLOCK,
                num_blocks=cache_tokens // BLOCK,
                max_batch_tokens=batch_tokens,
                max_requests_per_batch=sequences,
                use_cuda_graph=False,
                use_async_batching=False,
            ),
        )
        self._manager.start()
        while self._manager.batch_processor is None:
            if not self._manager.is_running():
                raise SystemExit("the generation loop has ended")
            time.sleep(0.05)
        processor = self._manager.batch_processor
        self._scheduler, self._cache = processor.scheduler, processor.cache
        self.blocks = self._cache.num_blocks
        self.counts = Counts()
        #: Tokens of a request's prompt that were in the cache. The answers of transformers do not say so.
        self._cached: dict[str, int] = {}
        search = self._cache.search_prefix_match

        def noted(request_id: str, tokens: list[int]) -> int:
            found = int(search(request_id, tokens))
            if request_id not in self._cached:  # one that waits is looked up again
                self._cached[request_id] = 0
                self.counts.queries += len(tokens)
            hits = min(found, len(tokens) - 1)
            self.counts.hits += hits - self._cached[request_id]
            self._cached[request_id] = hits
            return found

        self._cache.search_prefix_match = noted

    async def generate(self, request_id: str, prompt: list[int], most: int) -> AsyncIterator[list[int]]:
        """All tokens so far, whenever there are more. Raises `RuntimeError`."""
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._manager.register_result_handler(request_id, outputs.put_nowait)
        self._manager.add_request(prompt, request_id, max_new_tokens=most, streaming=True)
        self.counts.prompt_tokens += len(prompt)
        done = False
        try:
            while not done:
                output = await outputs.get()
                if output.error is not None:
                    raise RuntimeError(output.error)
                done = output.is_finished()
                yield output.generated_tokens
            self.counts.generation_tokens += most
        finally:
            if not done:
                self._manager.cancel_request(request_id)
                self.cached(request_id)

    def cached(self, request_id: str) -> int:
        return self._cached.pop(request_id, 0)

    async def forget(self) -> bool:
        """Empty the prefix cache, once there are no requests. False = there still are some."""
        until = time.monotonic() + IDLE_S
        while (free := self._cache.get_num_free_blocks()) < self.blocks:
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.05)
        # It has no method for this; asking for all blocks takes them from the prefixes.
        return bool(self._cache._block_manager.has_enough_free_blocks(free))

    def stop(self) -> None:
        self._manager.stop(hard_stop=True, timeout=5.0)

    def page(self) -> str:
        counts, usage = self.counts, 1 - self._cache.get_num_free_blocks() / self.blocks
        waiting = len(self._scheduler.waiting_requests) + self._manager.input_queue.qsize()
        lines = [
            f'vllm:cache_config_info{{block_size="{BLOCK}",num_gpu_blocks="{self.blocks}"}} 1',
            f"vllm:num_requests_running {len(self._scheduler.active_requests)}",
            f"vllm:num_requests_waiting {waiting}",
            f"vllm:kv_cache_usage_perc {usage}",
            f"vllm:prompt_tokens_total {counts.prompt_tokens}",
            f"vllm:generation_tokens_total {counts.generation_tokens}",
            f"vllm:prefix_cache_queries_total {counts.queries}",
            f"vllm:prefix_cache_hits_total {counts.hits}",
        ]
        return "\n".join([*lines, ""])


class Api:
    def __init__(self, engine: Engine, tokenizer: Tokenizer, model: str, longest: int) -> None:
        self._engine, self._tokenizer, self._model, self._longest = engine, tokenizer, model, longest
        self._number = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/v1/chat/completions", self.complete)
        app.router.add_post("/reset_prefix_cache", self.reset)
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self._engine.page())

    async def models(self, request: web.Request) -> web.Response:
        one = {"id": self._model, "object": "model", "owned_by": "bench", "max_model_len": self._longest}
        return web.json_response({"object": "list", "data": [one]})

    async def reset(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if await self._engine.forget() else 409)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        chat = "messages" in body
        prompt = await asyncio.to_thread(self._tokens, body)
        most = int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)
        if body.get("model") != self._model or not 0 < len(prompt) <= self._longest - most:
            words = f"the model is {self._model}, and prompt and answer have at most {self._longest} tokens"
            return web.json_response({"error": {"message": words, "type": "BadRequestError", "code": 400}}, status=400)
        self._number += 1
        request_id = f"{'chatcmpl' if chat else 'cmpl'}-{self._number}"
        kind = "chat.completion" if chat else "text_completion"
        head = {"id": request_id, "created": int(time.time()), "model": self._model}
        if body.get("stream"):
            head["object"] = "chat.completion.chunk" if chat else kind
            return await self._stream(request, request_id, prompt, most, body, head)
        tokens: list[int] = []
        async for more in self._engine.generate(request_id, prompt, most):
            tokens = more
        text = self._tokenizer.decode(tokens)
        said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        usage = self._usage(request_id, prompt, tokens)
        choice = {"index": 0, **said, "finish_reason": "length"}
        return web.json_response({**head, "object": kind, "choices": [choice], "usage": usage})

    async def _stream(
        self,
        request: web.Request,
        request_id: str,
        prompt: list[int],
        most: int,
        body: dict[str, Any],
        head: dict[str, Any],
    ) -> web.StreamResponse:
        chat, said = "messages" in body, 0
        answer = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await answer.prepare(request)
        tokens: list[int] = []
        async for tokens in self._engine.generate(request_id, prompt, most):
            text = self._tokenizer.decode(tokens[said:])
            said = len(tokens)
            piece = {"delta": {"content": text}} if chat else {"text": text}
            reason = "length" if said >= most else None
            await answer.write(_event({**head, "choices": [{"index": 0, **piece, "finish_reason": reason}]}))
        usage = self._usage(request_id, prompt, tokens)
        if (body.get("stream_options") or {}).get("include_usage"):
            await answer.write(_event({**head, "choices": [], "usage": usage}))
        await answer.write(b"data: [DONE]\n\n")
        return answer

    def _tokens(self, body: dict[str, Any]) -> list[int]:
        prompt = body.get("prompt", "")
        if "messages" in body:
            told = ((message["role"], _text(message.get("content"))) for message in body["messages"])
            prompt = "".join(_TEMPLATE.format(role=role, content=content) for role, content in told)
            prompt += "<|im_start|>assistant\n"
        return self._tokenizer.encode(prompt).ids if isinstance(prompt, str) else list(prompt)

    def _usage(self, request_id: str, prompt: list[int], tokens: list[int]) -> dict[str, Any]:
        return {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(tokens),
            "total_tokens": len(prompt) + len(tokens),
            "prompt_tokens_details": {"cached_tokens": self._engine.cached(request_id)},
        }


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", required=True, help="the name to serve it under")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--longest", type=int, default=8192, help="tokens of a prompt and its answer")
    parser.add_argument("--cache-tokens", type=int, required=True)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--sequences", type=int, default=64)
    options = parser.parse_args()
    engine = Engine(options.folder, options.cache_tokens, options.batch_tokens, options.sequences)
    tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
    app = Api(engine, tokenizer, options.model, options.longest).app()
    try:
        web.run_app(app, host="127.0.0.1", port=options.port, handler_cancellation=True, access_log=None, print=None)
    finally:
        engine.stop()


if __name__ == "__main__":
    main()
