"""Token counts estimated from bytes, and corrected by the counts that model servers report.

Theory. Without the model's tokenizer the best cheap estimate is bytes / (bytes per token). That ratio depends on the
model's vocabulary and on the language and format of its clients. Both change slowly, so the ratio is that of two
decaying sums. (In a mean of ratios, a 20-byte prompt would weigh as much as a 20-kB one.)

The default of 4.2: English text has about 4.5 bytes per token in the usual vocabularies of 100,000 to 150,000 tokens,
code about 3.5 and CJK text about 3 to 4. But the bytes counted here are JSON: role names, quotes and escapes add some
30 bytes to a message, for the 4 or 5 tokens that a chat template adds.
"""

from collections import OrderedDict

from msgspec import Struct

from fairlead.core.apis import RESPONSES_STORED, WITHOUT_OUTPUT
from fairlead.core.learned import ModelLearned
from fairlead.core.request import Request

DEFAULT_BYTES_PER_TOKEN = 4.2
DEFAULT_OUTPUT_TOKENS = 256.0
#: Reported ratios are clipped to these: beyond, bytes and tokens are not of the same text (media, embeddings).
MIN_BYTES_PER_TOKEN = 1.0
MAX_BYTES_PER_TOKEN = 12.0
#: One report counts at most as this many bytes, so that a single long prompt cannot set the ratio.
MAX_WEIGHT = 65536
#: Weight of the default, in bytes: a few ordinary prompts outweigh it.
PRIOR_WEIGHT = 4096.0
#: The sums lose this share with every report, half of their value after 34 reports. With one of fewer than `FULL` bytes
#: they lose less in proportion: short prompts are mostly the chat template, and many of them must not outweigh the text
#: of others.
DECAY, FULL = 0.02, 2048
#: Weight of the newest completion length.
OUTPUT_ALPHA = 0.05
MAX_TOKENS = 2**31 - 1
#: Prior of the bytes that one more token adds to an answer that is not streamed, and its weight, in tokens squared.
ANSWER_BYTES_PER_TOKEN, ANSWER_PRIOR = 4.5, 1000.0


def report_weight(prompt_bytes: int) -> float:
    """Return how much a report about a prompt of so many bytes counts, 0 to 1; see `FULL`."""
    return min(prompt_bytes, FULL) / FULL


class _Learned(Struct):
    bytes_seen: float = PRIOR_WEIGHT
    tokens_seen: float = PRIOR_WEIGHT / DEFAULT_BYTES_PER_TOKEN
    #: Mean tokens of a completion, at least 1.
    output: float = DEFAULT_OUTPUT_TOKENS
    #: Answers that are not streamed, with decaying weight: the weight, means, and sums of squares and products of
    #: deviations from them. The JSON around a text is 250 to 1,100 bytes long, depending on engine and API.
    answers: float = 0.0
    mean_bytes: float = 0.0
    mean_tokens: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def add_answer(self, size: float, tokens: float) -> None:
        keep, off = 1.0 - DECAY, tokens - self.mean_tokens
        self.answers = self.answers * keep + 1.0
        self.mean_tokens += off / self.answers
        self.mean_bytes += (size - self.mean_bytes) / self.answers
        self.squares = self.squares * keep + off * (tokens - self.mean_tokens)
        self.products = self.products * keep + off * (size - self.mean_bytes)

    def tokens_of(self, size: float) -> float:
        """Return the tokens of an answer of that size: linear regression."""
        slope = (self.products + ANSWER_PRIOR * ANSWER_BYTES_PER_TOKEN) / (self.squares + ANSWER_PRIOR)
        return self.mean_tokens + (size - self.mean_bytes) / max(slope, MIN_BYTES_PER_TOKEN)


_UNKNOWN = _Learned()


class TokenEstimator:
    """Learns per (model, API). Only reports create entries, so names that clients invent take no memory. Beyond
    `max_models` entries, the least recently reported one is dropped. Estimates are O(1)."""

    def __init__(self, max_models: int = 512) -> None:
        self._learned: OrderedDict[tuple[str, str], _Learned] = OrderedDict()
        self._max_models = max_models

    def __len__(self) -> int:
        return len(self._learned)

    def estimate(self, model: str, prompt_bytes: int, api: str = "chat") -> int:
        """Return the estimated tokens of a prompt; at least 1, or 0 if it has no bytes."""
        if prompt_bytes <= 0:
            return 0
        known = self._learned.get((model, api), _UNKNOWN)
        if prompt_bytes > MAX_TOKENS:  # an arbitrarily large integer does not fit a float
            prompt_bytes = min(prompt_bytes, MAX_TOKENS * 16)
            return min(round(prompt_bytes * known.tokens_seen / known.bytes_seen), MAX_TOKENS)
        return round(prompt_bytes * known.tokens_seen / known.bytes_seen) or 1

    def bytes_per_token(self, model: str, api: str = "chat") -> float:
        known = self._learned.get((model, api), _UNKNOWN)
        return known.bytes_seen / known.tokens_seen

    def learn(self, model: str, prompt_bytes: int, prompt_tokens: int, api: str = "chat") -> float:
        """Learn from a reported prompt length, and return the bytes per token. A report without bytes or tokens is
        ignored."""
        if prompt_bytes <= 0 or prompt_tokens <= 0:
            return self.bytes_per_token(model, api)
        # Clipped as integers first, because an arbitrarily large integer does not fit a float.
        weight = float(min(prompt_bytes, MAX_WEIGHT))
        ratio = min(prompt_bytes, MAX_TOKENS) / min(prompt_tokens, MAX_TOKENS)
        ratio = min(max(ratio, MIN_BYTES_PER_TOKEN), MAX_BYTES_PER_TOKEN)
        known = self._entry(model, api)
        decay = DECAY * report_weight(prompt_bytes)
        known.bytes_seen += weight - known.bytes_seen * decay
        known.tokens_seen += weight / ratio - known.tokens_seen * decay
        return known.bytes_seen / known.tokens_seen

    def estimate_output(self, model: str, max_tokens: int = 0, api: str = "chat") -> int:
        """Return the expected completion tokens, 1 to `max_tokens` (0 = no limit); 1 for APIs that generate none."""
        if api in WITHOUT_OUTPUT:
            return 1
        expected = round(self._learned.get((model, api), _UNKNOWN).output)
        return min(expected, max_tokens) if max_tokens > 0 else expected

    def learn_output(self, model: str, completion_tokens: int, max_tokens: int = 0, api: str = "chat") -> None:
        """Learn from the length of a completion. If cut by `max_tokens`, it never lowers the mean."""
        if completion_tokens <= 0:
            return
        known = self._entry(model, api)
        length = float(min(completion_tokens, MAX_TOKENS))
        if 0 < max_tokens <= completion_tokens and length < known.output:
            return
        known.output += OUTPUT_ALPHA * (length - known.output)

    def answer_tokens(self, request: Request, response_bytes: int) -> int:
        """Return the estimated completion tokens of an answer that was not streamed; -1 = unknown, as for a response
        that may run in the background: it is answered before it has any."""
        known = self._learned.get((request.target_model, request.api), _UNKNOWN)
        unknown = request.stream or request.api == RESPONSES_STORED
        if unknown or response_bytes <= 0 or not known.answers:
            return -1
        return min(max(round(known.tokens_of(min(response_bytes, MAX_TOKENS))), 1), MAX_TOKENS)

    def learn_answer(self, request: Request, response_bytes: int, completion_tokens: int) -> None:
        """Learn how the size of an answer depends on its tokens. Streamed answers are ignored, because each of their
        chunks has JSON around it."""
        if completion_tokens > 0 < response_bytes and not request.stream:
            known = self._entry(request.target_model, request.api)
            known.add_answer(min(response_bytes, MAX_TOKENS), min(completion_tokens, MAX_TOKENS))

    def learned(self) -> tuple[ModelLearned, ...]:
        """Return what was learned of each (model, API), the last reported one at the end; without names that are not
        valid Unicode."""
        return tuple(
            ModelLearned(model, api, known.bytes_seen, known.tokens_seen, known.output)
            for (model, api), known in self._learned.items()
            if model == model.encode(errors="replace").decode()
        )

    def restore(self, models: tuple[ModelLearned, ...]) -> None:
        """Restore what was learned. Existing entries stay; implausible ones are ignored."""
        for each in models[-self._max_models :]:
            tokens = each.tokens_seen
            likely = tokens >= 1.0 and MIN_BYTES_PER_TOKEN <= each.bytes_seen / tokens <= MAX_BYTES_PER_TOKEN
            if not likely or (each.model, each.api) in self._learned:
                continue
            known = self._entry(each.model, each.api)
            known.bytes_seen, known.tokens_seen, known.output = each.bytes_seen, tokens, max(1.0, each.output)

    def _entry(self, model: str, api: str) -> _Learned:
        key = (model, api)
        known = self._learned.get(key)
        if known is None:
            known = self._learned[key] = _Learned()
            if len(self._learned) > self._max_models:
                self._learned.popitem(last=False)
        else:
            self._learned.move_to_end(key)
        return known
