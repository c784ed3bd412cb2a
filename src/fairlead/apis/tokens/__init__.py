"""Prompts → the engine's own token ids.

The whole API, for callers:

    tokeniser: PromptTokeniser                   # made by fairlead.pool.model_files.load_tokeniser(config.tokens)
    tokeniser.tokens_of(parsed, body, model)     # -> PromptTokens
    tokeniser.state                              # text: "fastokens", "none (…)"; of each model where there are several
    tokeniser.knows(model)                       # False: only ids that the client sent itself can be given
    tokeniser.in_thread(parsed, model)           # True: too long for the event loop, asyncio.to_thread(tokens_of, …)

`parsed` is what `parse_request` made of `body`, `model` the target model (after rewrites; an adapter's name takes the
default entry unless it has one of its own). `tokens_of` never raises and is safe to call from several threads.

    found = tokeniser.tokens_of(parsed, body, model)
    if not found.reason:
        keys = prompt_keys(space.root(model, lora), found.ids, block_size, found.extras(block_size))
        prompt_tokens = found.total

Without a tokeniser, requests that carry token ids have them; all others have a `reason`, and the learned index (blocks
of raw bytes) is all there is. Models whose `render` is `engine` are asked of the engine: `fairlead.pool.render`.
"""

from fairlead.apis.tokens.pieces import MediaItem, PromptTokens
from fairlead.apis.tokens.prompt_tokeniser import PromptTokeniser

__all__ = ["MediaItem", "PromptTokeniser", "PromptTokens"]
