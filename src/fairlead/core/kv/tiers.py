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
MEDIA = {
    "": Tier.GPU,
    "gpu": Tier.GPU,
    "device": Tier.GPU,
    "hbm": Tier.GPU,
    "cpu": Tier.HOST,
    "host": Tier.HOST,
    "dram": Tier.HOST,
    "cpu_pinned": Tier.HOST,
    "host_pinned": Tier.HOST,
    "disk": Tier.DISK,
    "ssd": Tier.DISK,
    "nvme": Tier.DISK,
    "fs": Tier.DISK,
    "storage": Tier.DISK,
    "shared_storage": Tier.DISK,
    "object_store": Tier.DISK,
}


def tier_of(medium: str | None) -> Tier:
    return MEDIA.get(medium.strip().lower(), Tier.OTHER) if medium else Tier.GPU


#: Milliseconds to bring one token's KV from each tier to the GPU: from the host's memory over PCIe, from a fast disk.
TRANSFER_MS = (0.0, 0.005, 0.06, 0.06)
