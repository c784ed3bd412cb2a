"""One generation request: from its plan to engine requests, and from their tokens to an answer, whole or streamed.

Rules
* The replica calls `progress` and `finished` after engine steps; the connection calls `lost` and `writable`.
* A generation ends once: by `lost`, by `fail` or by the last byte of the answer. Its engine requests that still run are
  then aborted, and all later calls have no effect.
"""

import json
from typing import Protocol

from msgspec import Struct

from fairlead.lab.engine import tokens as tk
from fairlead.lab.engine.engine import Engine
from fairlead.lab.engine.request import EngineRequest, Phase
from fairlead.lab.stub.connection import Connection
from fairlead.lab.stub.fields import ApiError, encoded
from fairlead.lab.stub.plans import Plan
from fairlead.lab.stub.sampling import Stop, chat_logprobs, completion_logprobs
from fairlead.lab.stub.shapes import Counts, Parts, Shape

REQUEST_HEADER = "endpoint-load-metrics-format"


def orca_line(wanted: str, waiting: float, kv_usage: float) -> bytes:
    """The response header with the load report (ORCA), as vLLM 0.32 sends it. `wanted`: `TEXT` or `JSON`, in any case;
    anything else gives an empty line."""
    metrics = {"num_requests_waiting": float(waiting), "kv_cache_usage_perc": float(kv_usage)}
    match wanted.upper():
        case "TEXT":
            value = "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
        case "JSON":
            value = "JSON " + json.dumps({"named_metrics": metrics})
        case _:
            return b""
    return f"endpoint-load-metrics: {value}\r\n".encode()


class Host(Protocol):
    """What a generation needs from its replica."""

    block_size: int
    #: `--enable-prompt-tokens-details`.
    details: bool

    engine: Engine

    def forget(self, generation: "Generation") -> None:
        """The generation is over; abort the rest of its engine requests."""


class Choice(Struct, eq=False):
    """One of the answers to a request. `emitted` of its tokens and `shown` bytes of its text have been written."""

    generation: "Generation"
    index: int
    prompt: int
    request: EngineRequest
    #: The stop string that will end the output; `None` = no stop string will.
    stop: Stop | None
    emitted: int = 0
    shown: int = 0
    #: Whether the last event was written or, in a non-streamed answer, the output is complete.
    ended: bool = False
    #: The parts of a token event before and after its text.
    head: bytes = b""
    tail: bytes = b""

    def text(self, output: int, hold: int) -> bytes:
        """The text of the first `output` tokens without its last `hold` bytes, as far as it has not been shown. It then
        counts as shown."""
        end = tk.TOKEN_BYTES * output - hold
        if self.stop is not None:
            end = min(end, self.stop.length)
        start, width = self.shown, tk.TOKEN_BYTES
        if end <= start:
            return b""
        self.shown = end
        first = start // width
        return tk.output(self.request.seed, first, -(-end // width))[start - first * width : end - first * width]

    def full_text(self) -> bytes:
        """The text from its beginning."""
        self.shown = 0
        return self.text(self.request.output, 0)


class Generation:
    """A generation request with all its choices, answered in one piece."""

    def __init__(self, host: Host, connection: Connection, plan: Plan, shape: Shape, orca: str) -> None:
        """`orca`: the client's `endpoint-load-metrics-format`; empty = none."""
        self.host = host
        self.connection = connection
        self.plan = plan
        self.shape = shape
        self.orca = orca
        self.choices: list[Choice] = []
        #: Choices that have not ended.
        self.left = 0
        self.over = False

    def add_choice(self, prompt: int, request: EngineRequest, stop: Stop | None) -> Choice:
        choice = Choice(self, len(self.choices), prompt, request, stop)
        self.choices.append(choice)
        self.left += 1
        return choice

    # ---------------------------------------------------------------- called by the replica

    def begin(self) -> None:
        """Called before the engine receives the requests."""

    def progress(self, choice: Choice, output: int) -> None:
        """A choice that has not ended has `output` tokens now."""

    def finished(self, choice: Choice) -> None:
        """The engine has finished a choice."""
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

    # ---------------------------------------------------------------- called by the connection

    def lost(self) -> None:
        if not self.over:
            self.end()

    def writable(self) -> None:
        """Nothing to do: the answer is written in one call."""

    # ---------------------------------------------------------------- the answer

    def _reply(self) -> None:
        choices = []
        for choice in self.choices:
            output = choice.request.output
            text = self.echo(choice) + choice.text(output, 0)
            choices.append(self.shape.choice(choice.index, text, self.parts(choice, output)))
        prompt_ids = self.prompt_ids(self.choices[0])
        body = self.shape.body(choices, self.counts(), self.host.details, prompt_ids)
        self.end()
        gauges = self.host.engine.stats.gauges
        self.connection.reply(200, body, before=orca_line(self.orca, gauges.waiting, gauges.kv_usage))

    def echo(self, choice: Choice) -> bytes:
        """The prompt as the inside of a JSON string if the client asked for it (`echo`), otherwise empty."""
        return encoded(tk.text(self.plan.prompts[choice.prompt]))[1:-1] if self.plan.echo else b""

    def parts(self, choice: Choice, output: int) -> Parts:
        """The fields beside the text, for the tokens after the emitted ones up to token `output`."""
        request, start = choice.request, choice.emitted
        done = request.phase is Phase.DONE
        return Parts(
            reason=request.finish_reason if done else "",
            stop_reason=encoded(choice.stop.string) if done and choice.stop is not None else b"null",
            logprobs=self._logprobs(choice, output),
            ids=encoded(tk.ids(tk.output(request.seed, start, output))) if self.plan.return_token_ids else b"null",
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

    def prompt_ids(self, choice: Choice) -> bytes:
        return encoded(tk.ids(self.plan.prompts[choice.prompt])) if self.plan.return_token_ids else b"null"

    def counts(self) -> Counts:
        """Token counts over all choices. A prompt counts once, however many choices it has."""
        firsts = [choice.request for choice in self.choices[:: self.plan.n]]
        cached = sum(max(0, request.cached_tokens) for request in firsts)
        size = self.host.block_size
        cacheable = sum(request.prompt_tokens // size * size for request in firsts)
        return Counts(
            prompt=sum(request.prompt_tokens for request in firsts),
            completion=sum(choice.request.output for choice in self.choices),
            cached=cached,
            created=max(0, cacheable - cached) if self.plan.chat else None,
        )


# A generation request answered as server-sent events.
#
# Rules (in addition to the rules above)
# * The head is sent before the engine has looked at the request; the first event is sent with the first token.
# * While the connection is paused, nothing is written or stored. The text of all tokens since the last event can be
#   made at any time, so a slow client gets fewer and longer events.


_NEVER = 1 << 62


class StreamGeneration(Generation):
    """A generation in which each choice is a series of events, all on one connection."""

    def __init__(self, host: Host, connection: Connection, plan: Plan, shape: Shape, orca: str) -> None:
        super().__init__(host, connection, plan, shape, orca)
        #: Whether token events differ only in their text.
        self.plain = not (
            self.shape.numbered
            or plan.continuous_usage
            or plan.return_token_ids
            or plan.echo
            or plan.stop_strings is not None
            or plan.logprobs is not None
        )
        #: Bytes of text that are held back because they may be the beginning of a stop string.
        self.hold = plan.stop_strings.hold if plan.stop_strings is not None else 0
        #: Tokens after which fault injection cuts the connection.
        self.cut_after = _NEVER
        self.started = False

    def add_choice(self, prompt: int, request: EngineRequest, stop: Stop | None) -> Choice:
        choice = super().add_choice(prompt, request, stop)
        choice.head = self.shape.event_head(choice.index)
        choice.tail = self.shape.event_tail()
        return choice

    # ---------------------------------------------------------------- called by the replica

    def begin(self) -> None:
        self.connection.begin_stream()

    def progress(self, choice: Choice, output: int) -> None:
        """A choice that has not ended has `output` tokens now, more than were emitted."""
        connection = self.connection
        if connection.paused or self.over:
            return
        if self.started and self.plain and choice.emitted:
            data = b"%b%b%b" % (choice.head, choice.text(output, 0), choice.tail)
            choice.emitted = output
            connection.write(connection.event(data))
        else:
            connection.write(self._roles() + connection.event(self._token_event(choice, output)))
        if output >= self.cut_after:
            connection.cut()

    def finished(self, choice: Choice) -> None:
        if self.over or self.connection.paused or choice.ended:
            return
        choice.ended = True
        self.left -= 1
        last = self.left == 0
        request, event = choice.request, self.connection.event
        shows_fingerprint = last and not self.plan.include_usage
        data = self._roles() + event(self._token_event(choice, request.output, shows_fingerprint))
        if not last:
            self.connection.write(data)
            return
        if self.plan.include_usage:
            data += self._each(self.shape.usage_event(self.counts(), self.host.details, self.choices[0].full_text))
        self.end()
        self.connection.end_stream(data + self._done())

    def fail(self, error: ApiError) -> None:
        """Report the error inside the 200 that has already been sent."""
        if not self.over:
            self.end()
            self.connection.end_stream(self.connection.event(error.event()) + self._done())

    def _done(self) -> bytes:
        # An empty chunk would end the chunked answer.
        return self.connection.event(self.shape.done) if self.shape.done else b""

    # ---------------------------------------------------------------- called by the connection

    def writable(self) -> None:
        for choice in self.choices:
            if choice.request.phase is Phase.DONE:
                self.finished(choice)
            elif (output := self.host.engine.output_tokens(choice.request)) > choice.emitted:
                self.progress(choice, output)

    # ---------------------------------------------------------------- events

    def _roles(self) -> bytes:
        """The events that precede the first token; empty if they were sent."""
        if self.started:
            return b""
        self.started = True
        events = [self.shape.role_event(c.index, self._usage(0), self.prompt_ids(c)) for c in self.choices]
        return b"".join(map(self._each, events))

    def _each(self, events: bytes) -> bytes:
        """Several events, each in a chunk of its own."""
        return b"".join(self.connection.event(event + b"\n\n") for event in events.split(b"\n\n") if event)

    def _token_event(self, choice: Choice, output: int, last: bool = False) -> bytes:
        """The event with the tokens up to `output`, which then count as emitted."""
        first = choice.emitted == 0
        parts = self.parts(choice, output)
        text = choice.text(output, 0 if parts.reason else self.hold)
        choice.emitted = output
        tail = self.shape.event_tail(parts, self._usage(sum(each.emitted for each in self.choices)), last)
        return b"%b%b%b%b" % (choice.head, self.echo(choice) if first else b"", text, tail)

    def _usage(self, completion: int) -> bytes:
        if not self.plan.continuous_usage:
            return b""
        firsts = self.choices[:: self.plan.n]
        return Counts(sum(c.request.prompt_tokens for c in firsts), completion, 0, None).bare()
