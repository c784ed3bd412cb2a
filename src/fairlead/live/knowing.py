"""Which knowledge of prompts a configuration asks for."""

from fairlead.config.schema import Config
from fairlead.fleet.fleet import Fleet
from fairlead.live.asking import KvAsking
from fairlead.live.knowledge import Knowledge
from fairlead.live.kv import KvListening
from fairlead.observe.exposition import Registry


def knowledge(config: Config, fleet: Fleet, registry: Registry) -> Knowledge | None:
    """`None` = prompts are known by their bytes only. Raises `ConfigError`."""
    if config.kv_events.enabled:
        return (KvAsking if config.kv_events.indexer.url else KvListening)(config, fleet, registry)
    return Knowledge(config, fleet, registry) if config.tokens.models else None
