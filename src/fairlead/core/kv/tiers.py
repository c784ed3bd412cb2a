"""The storage tiers of blocks, and what a cached block is worth in each."""

from enum import IntEnum

from msgspec import Struct


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


class TierCosts(Struct, frozen=True):
    """Milliseconds to bring one token's KV from a tier to the GPU, and to compute it again (`recompute_ms`).

    The defaults are for a GPU at 10,000 prompt tokens/s, PCIe for the host's memory, and a fast disk.
    """

    recompute_ms: float = 0.1
    host_ms: float = 0.005
    disk_ms: float = 0.06

    def transfer_ms(self, tier: Tier) -> float:
        return {Tier.GPU: 0.0, Tier.HOST: self.host_ms}.get(tier, self.disk_ms)

    def saved_ms(self, tier: Tier) -> float:
        """Return the milliseconds that a token in a tier saves. At least 0, since slow tiers are not used."""
        return max(0.0, self.recompute_ms - self.transfer_ms(tier))


#: Worth of a block by tier if no costs are known.
CREDITS = (1.0, 0.75, 0.25, 0.25)
