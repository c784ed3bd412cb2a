"""How spans are sent to a collector, whatever it answers. Apart from `tracing`, because what it is made of is installed
only with the extra of that name."""

from contextlib import suppress
from io import BytesIO
from time import monotonic
from typing import Any

from requests import PreparedRequest, Response, Session
from urllib3.exceptions import HTTPError

#: The most bytes of an answer that is read.
_MOST = 1000


class ShortAnswers(Session):
    """Reads short answers only, within the timeout. requests reads answers whole, and its timeout is for each read: a
    collector whose answer drips would stop tracing."""

    def send(self, request: PreparedRequest, **options: Any) -> Response:
        until = monotonic() + options["timeout"]
        answer = super().send(request, **{**options, "stream": True})
        raw, beginning = answer.raw, bytearray()
        with suppress(HTTPError):  # the status says whether the spans were taken
            while len(beginning) + (raw.length_remaining or 0) <= _MOST and monotonic() < until:
                if not (byte := raw.read(1)):
                    break
                beginning += byte
        raw.close()  # after the whole answer the connection is kept
        answer.raw = BytesIO(beginning)
        return answer
