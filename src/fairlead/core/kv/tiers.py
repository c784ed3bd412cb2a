"""The storage tiers of blocks, and what a cached block is worth in each."""

from enum import IntEnum


class Tier(IntEnum):
    """The tiers, fastest first. A block in several tiers counts in the fastest one."""

    GPU = 0
    HOST = 1
    DISK = 2
    #: An unknown medium. It is worth as much as the slowest known one.
    OTHER = 3


#: The engines' names of media, in lower case. An empty or absent name means GPU ("GPU" even on CPU builds of vLLM).
_MEDIA = {
    Tier.GPU: ("", "gpu", "device", "hbm"),
    Tier.HOST: ("cpu", "host", "dram", "cpu_pinned", "host_pinned"),
    Tier.DISK: ("disk", "ssd", "nvme", "fs", "storage", "shared_storage", "object_store"),
}
_TIERS = {name: tier for tier, names in _MEDIA.items() for name in names}


def tier_of(medium: str | None) -> Tier:
    return _TIERS.get(medium.strip().lower(), Tier.OTHER) if medium else Tier.GPU


#: Milliseconds to bring one token's KV from each tier to the GPU: from the host's memory over PCIe, from a fast disk.
TRANSFER_MS = (0.0, 0.005, 0.06, 0.06)
