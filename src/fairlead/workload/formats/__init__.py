"""Published trace formats ↔ workloads. One module per format, each with `read` and `write`; this is their table.

A format holds what it holds: what `write` loses of a workload (block ids in a table of token counts, say) is gone.
What it does hold comes back as it was.
"""

from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct

from fairlead.workload.formats import azure, bailian, burstgpt, mooncake, native, vidur
from fairlead.workload.record import Record, Workload, arranged


class Format(Struct, frozen=True):
    """`read(name, data, source)` raises `TraceError`, which names source, line and field."""

    read: Callable[[str, bytes, str], Workload]
    write: Callable[[Workload], bytes]
    help: str


def _of_records(
    read: Callable[[bytes, str], list[Record]], write: Callable[[Iterable[Record]], bytes], text: str
) -> Format:
    return Format(
        lambda name, data, source: arranged(name, read(data, source)), lambda workload: write(workload.records), text
    )


FORMATS: Mapping[str, Format] = {
    "native": Format(
        lambda name, data, source: native.read(data, source, name), native.write, "Fairlead's own: everything"
    ),
    "mooncake": _of_records(mooncake.read, mooncake.write, "Mooncake: lengths, block ids of 512 tokens, sessions"),
    "bailian": _of_records(bailian.read, bailian.write, "Bailian (Qwen): lengths, block ids of 16 tokens, sessions"),
    "azure": _of_records(azure.read, azure.write, "Azure 2023: times and lengths"),
    "vidur": _of_records(vidur.read, vidur.write, "Vidur and Splitwise: times and lengths"),
    "burstgpt": _of_records(burstgpt.read, burstgpt.write, "BurstGPT: times, lengths, models, sessions"),
}


def guess(data: bytes) -> str:
    """The format's name by the first line; empty when it looks like none of them."""
    head = data.lstrip(b"\xef\xbb\xbf\r\n\t ").split(b"\n", 1)[0]
    if head.startswith(b"{"):
        signs = {
            "native": (native.MARK[1:-1], b'"in_tokens"'),
            "bailian": (b'"chat_id"',),
            "mooncake": (b'"input_length"',),
        }
        return next((name for name, marks in signs.items() if any(mark in head for mark in marks)), "")
    columns = {"azure": azure.FIELDS[0], "vidur": vidur.FIELDS[0], "burstgpt": "Request tokens"}
    return next((name for name, column in columns.items() if column.encode() in head), "")
