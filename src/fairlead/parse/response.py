"""Which scanner reads a response."""

from fairlead.parse.api import GRPC, GRPC_EMBED
from fairlead.parse.grpc_usage import GrpcUsageScanner
from fairlead.parse.usage import UsageScanner

Scanner = UsageScanner | GrpcUsageScanner


def scanner_for(content_type: str, content_encoding: str = "", api: str = "") -> Scanner | None:
    """A scanner for a response of that type; `None` if nothing in it tells token counts, or it is compressed.

    `api`: of the request, see `parse.api`.
    """
    if content_encoding and content_encoding.strip().lower() != "identity":
        return None
    kind = content_type.lower()
    if kind.startswith("text/event-stream"):
        return UsageScanner(stream=True)
    if kind.startswith("application/grpc"):
        return GrpcUsageScanner(embed=api == GRPC_EMBED)
    return UsageScanner(stream=False) if "json" in kind else None


def scanner_unseen(api: str, streaming: bool) -> Scanner:
    """A scanner for a response whose headers are not shown. `streaming`: the request asked for a stream."""
    if api in (GRPC, GRPC_EMBED):
        return GrpcUsageScanner(embed=api == GRPC_EMBED)
    return UsageScanner(stream=streaming)
