"""One generation request, from its plan to engine requests and from tokens back to an answer in one piece.

Rules (for streams too, see `streaming`)
* The replica calls `progress` and `finished` after engine steps; the connection calls `lost` and `writable`.
* `lost`, `fail` and the last byte of the answer each end it, once: what still runs in the engine is aborted, and
  everything that comes later does nothing.
"""

import json
from typing import Protocol

from fairlead.engine import tokens as tk
from fairlead.engine.request import EngineRequest, Phase
from fairlead.stub.api_errors import ApiError
from fairlead.stub.connection import Connection
from fairlead.stub.logprobs import chat_logprobs, completion_logprobs
from fairlead.stub.orca import orca_line
from fairlead.stub.plans import Plan
from fairlead.stub.shapes import ChatShape, CompletionShape, Counts, Parts, Shape, id_list, quoted
from fairlead.stub.stops import Stop


class Host(Protocol):
    """What a generation needs of its replica."""

    block_size: int
    #: `--enable-prompt-tokens-details`.
    details: bool
    #: `--enable-per-request-metrics`.
    timed: bool
    #: Seconds between comments in a stream that waits; 0 = none.
    keepalive_s: float

    def output_tokens(self, request: EngineRequest) -> int: ...
    def forget(self, generation: "Generation") -> None:
        """It is over; abort what still runs of it."""

    def later(self, seconds: float, generation: "Generation") -> None:
        """Call `generation.keep_alive()` after so many seconds."""

    def load(self) -> tuple[float, float]:
        """The gauges: requests waiting, share of KV cache in use."""
        ...


class Choice:
    """One output. `emitted` tokens of it have been written, and `shown` bytes of their text."""

    __slots__ = ("emitted", "ended", "generation", "head", "index", "prompt", "request", "shown", "stop", "tail")

    def __init__(
        self, generation: "Generation", index: int, prompt: int, request: EngineRequest, stop: Stop | None
    ) -> None:
        self.generation = generation
        self.index = index
        self.prompt = prompt
        self.request = request
        #: The stop string that will end it.
        self.stop = stop
        self.emitted = 0
        self.shown = 0
        #: Its last event was written, or it is part of an answer in one piece that can be made.
        self.ended = False
        self.head = b""
        self.tail = b""

    def text(self, output: int, hold: int) -> bytes:
        """Text of the first `output` tokens that has not been shown yet, but for the last `hold` bytes; it counts as
        shown."""
        end = tk.TOKEN_BYTES * output - hold
        if self.stop is not None:
            end = min(end, self.stop.length)
        start, width = self.shown, tk.TOKEN_BYTES
        if end <= start:
            return b""
        self.shown = end
        first = start // width
        return tk.output(self.request.seed, first, -(-end // width))[start - first * width : end - first * width]


class Generation:
    """A request with all its choices, to be answered in one piece."""

    def __init__(
        self, host: Host, connection: Connection, plan: Plan, answer_id: str, created: int, fingerprint: str
    ) -> None:
        self.host = host
        self.connection = connection
        self.plan = plan
        make = ChatShape if plan.chat else CompletionShape
        self.shape: Shape = make(answer_id, created, plan.model, fingerprint)
        self.choices: list[Choice] = []
        #: Choices that have not ended.
        self.left = 0
        self.over = False
        #: The client's `endpoint-load-metrics-format`; empty = it wants none.
        self.orca = ""

    def add_choice(self, prompt: int, request: EngineRequest, stop: Stop | None) -> Choice:
        choice = Choice(self, len(self.choices), prompt, request, stop)
        self.choices.append(choice)
        self.left += 1
        return choice

    # ---------------------------------------------------------------- replica's side

    def begin(self) -> None:
        """The engine has the requests."""

    def keep_alive(self) -> None:
        """See `Host.later`."""

    def progress(self, choice: Choice, output: int) -> None:
        """A choice that goes on has `output` tokens."""

    def finished(self, choice: Choice) -> None:
        """The engine is done with a choice."""
        choice.ended = True
        self.left -= 1
        if self.left == 0 and not self.over:
            self._reply()

    def fail(self, error: ApiError) -> None:
        if not self.over:
            self.end()
            self.connection.reply(error.status, error.body())

    def end(self) -> None:
        self.over = True
        self.host.forget(self)

    # ---------------------------------------------------------------- connection's side

    def lost(self) -> None:
        if not self.over:
            self.end()

    def writable(self) -> None:
        """Nothing to do: the answer is written once."""

    # ---------------------------------------------------------------- the answer

    def _reply(self) -> None:
        choices = []
        for choice in self.choices:
            output = choice.request.output
            text = self.echo(choice) + choice.text(output, 0)
            choices.append(self.shape.choice(choice.index, text, self.parts(choice, output)))
        prompt_ids = self.prompt_ids(self.choices[0])
        metrics = self._timing() if self.host.timed else b"null"
        body = self.shape.body(choices, self.counts(), self.host.details, prompt_ids, metrics)
        self.end()
        self.connection.reply(200, body, before=orca_line(self.orca, *self.host.load()))

    def echo(self, choice: Choice) -> bytes:
        """The prompt as the inside of a JSON string, if the client wants to have it back."""
        return quoted(tk.text(self.plan.prompts[choice.prompt]))[1:-1] if self.plan.echo else b""

    def parts(self, choice: Choice, output: int) -> Parts:
        """What goes with the text of the tokens from those that were emitted up to `output`."""
        request, start = choice.request, choice.emitted
        done = request.phase is Phase.DONE
        return Parts(
            reason=request.finish_reason if done else "",
            stop_reason=quoted(choice.stop.string) if done and choice.stop is not None else b"null",
            logprobs=self._logprobs(choice, output),
            ids=id_list(tk.output(request.seed, start, output)) if self.plan.return_token_ids else b"null",
            prompt_ids=b"null" if start else self.prompt_ids(choice),
        )

    def _logprobs(self, choice: Choice, output: int) -> bytes:
        top, seed, start = self.plan.logprobs, choice.request.seed, choice.emitted
        if top is None:
            return b"null"
        if self.plan.chat:
            return chat_logprobs(seed, start, output, top)
        offset = len(tk.text(self.plan.prompts[choice.prompt])) if self.plan.echo else 0
        return completion_logprobs(seed, start, output, top, offset)

    def _timing(self) -> bytes:
        """Of the choice that ended last, in engine time."""
        request = max((choice.request for choice in self.choices), key=lambda request: request.finished_at)
        decoding = 1e3 * (request.finished_at - request.first_token_at)
        more = request.output - 1
        values = {
            "time_to_first_token_ms": 1e3 * (request.first_token_at - request.scheduled_at),
            "generation_time_ms": decoding,
            "queue_time_ms": 1e3 * (request.scheduled_at - request.arrived),
            "mean_itl_ms": decoding / more if more else None,
            "tokens_per_second": 1e3 * more / decoding if decoding > 0 else None,
            "speculative_decoding": None,
        }
        return json.dumps(values, separators=(",", ":")).encode()

    def prompt_ids(self, choice: Choice) -> bytes:
        return id_list(self.plan.prompts[choice.prompt]) if self.plan.return_token_ids else b"null"

    def counts(self) -> Counts:
        """Of all choices; a prompt counts once however many choices it has."""
        firsts = [choice.request for choice in self.choices[:: self.plan.n]]
        cached = sum(max(0, request.cached_tokens) for request in firsts)
        size = self.host.block_size
        whole = sum(request.prompt_tokens // size * size for request in firsts)
        return Counts(
            prompt=sum(request.prompt_tokens for request in firsts),
            completion=sum(choice.request.output for choice in self.choices),
            cached=cached,
            created=max(0, whole - cached) if self.plan.chat else None,
        )
