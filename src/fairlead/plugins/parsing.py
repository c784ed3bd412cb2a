"""Parser plugins before the built-in parser; no plugin can break a request."""

from collections.abc import Callable, Sequence

from fairlead.model.errors import ClientError, PluginError
from fairlead.parse.api import OTHER
from fairlead.parse.request import ParsedRequest, parse_request, unread
from fairlead.plugins.contracts import Parser


class Parsing:
    """Called as `parse_request` is. A plugin that raises anything but `ClientError` is reported, and its request
    scheduled unread."""

    def __init__(self, parsers: Sequence[Parser], report: Callable[[PluginError], None] | None = None) -> None:
        #: (end of the path, parser), the longest end first; of equal ones the first parser configured.
        self._ends = sorted(
            ((end, parser) for parser in parsers for end in parser.paths), key=lambda entry: -len(entry[0])
        )
        self._report = report

    def __call__(self, path: str, body: bytes, content_type: str = "", *, content_encoding: str = "") -> ParsedRequest:
        plain = path.partition("?")[0].removesuffix("/")
        for end, parser in self._ends:
            if plain.endswith(end):
                return self._ask(parser, path, body, content_encoding)
        return parse_request(path, body, content_type, content_encoding=content_encoding)

    def _ask(self, parser: Parser, path: str, body: bytes, content_encoding: str) -> ParsedRequest:
        if content_encoding not in ("", "identity"):
            return unread(OTHER, "content-encoding", len(body))
        try:
            parsed = parser.parse(path, body)
            if not isinstance(parsed, ParsedRequest):
                raise TypeError(f"gave a {type(parsed).__name__}, expected a ParsedRequest")
            return parsed
        except ClientError:
            raise
        except Exception as error:
            if self._report is not None:
                self._report(PluginError(parser.name, f"{type(error).__name__}: {error}"))
            return unread(OTHER, "path", len(body))
