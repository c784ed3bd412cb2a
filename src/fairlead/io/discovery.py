"""Where endpoints come from: the list in the configuration, or a file that is followed."""

from contextlib import AsyncExitStack

from fairlead.config.schema import EndpointSource
from fairlead.io.endpoint_set import EndpointSet, Feed, Report
from fairlead.io.endpoints_file import EndpointsFile
from fairlead.model.errors import ConfigError
from fairlead.wire.endpoint_list import Listing


async def follow_endpoints(
    stack: AsyncExitStack, source: EndpointSource, feed: Feed, report: Report
) -> EndpointSet | None:
    """Feed what is there now, and changes for as long as `stack` is open.

    Returns the set of a list in the configuration, which may be given another one; `None` for a file.
    Raises `ConfigError` when the file cannot be read or understood at the start.
    """
    if not source.file:
        listed = EndpointSet(feed, report)
        stack.push_async_callback(listed.close)
        listed.apply(Listing(source.static))
        await listed.start()
        return listed
    files = EndpointsFile(source.file, feed, report, watch=source.watch)
    stack.push_async_callback(files.close)
    problems = await files.start()
    if not files.loaded:
        raise ConfigError("; ".join(str(problem) for problem in problems), "$.endpoints.file", source.file)
    return None
