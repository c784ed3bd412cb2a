"""A generation request answered as server-sent events.

Rules (beside those of `generation`)
* The head goes out before the engine has looked at the request; the first event comes with the first token.
* While the connection is paused nothing is written, and nothing is stored either: the text of all tokens since the last
  event can be made at any time, so a slow client gets fewer and longer events.
"""

from fairlead.engine.request import EngineRequest, Phase
from fairlead.stub.api_errors import ApiError
from fairlead.stub.connection import Connection
from fairlead.stub.generation import Choice, Generation, Host
from fairlead.stub.plans import Plan
from fairlead.stub.shapes import DONE, KEEP_ALIVE, Counts
from fairlead.stub.stops import Stop

_NEVER = 1 << 62


class StreamGeneration(Generation):
    """Each choice is a series of events; all share one connection."""

    def __init__(
        self, host: Host, connection: Connection, plan: Plan, answer_id: str, created: int, fingerprint: str
    ) -> None:
        super().__init__(host, connection, plan, answer_id, created, fingerprint)
        #: Token events differ in nothing but their text.
        self.plain = not (
            plan.continuous_usage
            or plan.return_token_ids
            or plan.echo
            or plan.stop_strings is not None
            or plan.logprobs is not None
        )
        #: Bytes of text that may be the beginning of a stop string.
        self.hold = plan.stop_strings.hold if plan.stop_strings is not None else 0
        #: Tokens after which the connection is cut, by fault injection.
        self.cut_after = _NEVER
        self.started = False

    def add_choice(self, prompt: int, request: EngineRequest, stop: Stop | None) -> Choice:
        choice = super().add_choice(prompt, request, stop)
        choice.head = self.shape.event_head(choice.index)
        choice.tail = self.shape.event_tail()
        return choice

    # ---------------------------------------------------------------- replica's side

    def begin(self) -> None:
        self.connection.begin_stream()
        if self.host.keepalive_s > 0:
            self.host.later(self.host.keepalive_s, self)

    def keep_alive(self) -> None:
        """Show a client that waits for its first token that somebody is there."""
        if self.over or self.started:
            return
        if not self.connection.paused:
            self.connection.write(self.connection.event(KEEP_ALIVE))
        self.host.later(self.host.keepalive_s, self)

    def progress(self, choice: Choice, output: int) -> None:
        """A choice that goes on has `output` tokens, more than were emitted."""
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
            data += event(self.shape.usage_event(self.counts(), self.host.details))
        self.end()
        self.connection.end_stream(data + event(DONE))

    def fail(self, error: ApiError) -> None:
        """Inside the 200 that has already gone out."""
        if not self.over:
            self.end()
            event = self.connection.event
            self.connection.end_stream(event(error.event()) + event(DONE))

    # ---------------------------------------------------------------- connection's side

    def writable(self) -> None:
        for choice in self.choices:
            if choice.request.phase is Phase.DONE:
                self.finished(choice)
            elif (output := self.host.output_tokens(choice.request)) > choice.emitted:
                self.progress(choice, output)

    # ---------------------------------------------------------------- events

    def _roles(self) -> bytes:
        """What comes before the first token of all."""
        if self.started:
            return b""
        self.started = True
        events = [self.shape.role_event(c.index, self._usage(0), self.prompt_ids(c)) for c in self.choices]
        return b"".join(self.connection.event(data) for data in events if data)

    def _token_event(self, choice: Choice, output: int, last: bool = False) -> bytes:
        """The event with the tokens up to `output`; they count as emitted."""
        first = choice.emitted == 0
        parts = self.parts(choice, output)
        text = choice.text(output, 0 if parts.reason else self.hold)
        choice.emitted = output
        tail = self.shape.event_tail(parts, self._usage(sum(other.emitted for other in self.choices)), last)
        return b"%b%b%b%b" % (choice.head, self.echo(choice) if first else b"", text, tail)

    def _usage(self, completion: int) -> bytes:
        if not self.plan.continuous_usage:
            return b""
        firsts = self.choices[:: self.plan.n]
        return Counts(sum(c.request.prompt_tokens for c in firsts), completion, 0, None).bare()
