"""Turn prompts into the token ids that the engine makes of them.

`fairlead.pool.model_files.load_tokeniser(config.tokens)` makes a `PromptTokeniser`. `parsed` is the result of
`parse_request(body)`, `model` the target model (after rewrites), of an adapter without an entry its base model.

    found = tokeniser.tokens_of(parsed, body, model)
    if not found.reason:
        keys = prompt_keys(space.root(model, lora), found.ids, block_size, found.extras(block_size))
        prompt_tokens = found.total

Without a tokeniser, only requests that carry token ids get ids. All others have a `reason`, and only the learned index
(blocks of raw bytes) is used. For models with `render: engine`, the engine makes the ids: see `fairlead.pool.render`.
"""

from fairlead.apis.tokens.pieces import MediaItem, PromptTokens
from fairlead.apis.tokens.prompt_tokeniser import PromptTokeniser

__all__ = ["MediaItem", "PromptTokeniser", "PromptTokens"]
