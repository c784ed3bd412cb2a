"""A changed configuration file: take over what can be, between two decisions."""

import asyncio
from collections.abc import Callable
from random import Random

from fairlead.config.choosers import CHOOSERS
from fairlead.config.flow import able_by
from fairlead.config.registry import build_policy
from fairlead.config.reload import plan_reload
from fairlead.config.schema import Config
from fairlead.live.core import Core
from fairlead.live.sampling import sampler
from fairlead.model.errors import ConfigError, PluginError
from fairlead.observe.log import get
from fairlead.observe.log import setup as setup_log
from fairlead.wire.endpoint_list import Listing

log = get("serve")

#: Problems of a changed configuration that are logged; `fairlead validate` prints all.
_SHOWN = 5
#: Sections of which other policies decide.
_CHOOSING = tuple(f"$.{key}" for key in CHOOSERS)


def take_over(core: Core, old: Config, new: Config, listed: Callable[[Listing], object] | None) -> Config:
    """Returns what is in force now: `new` without what only a restart can change, or `old` where `new` is unusable.

    `listed` takes the endpoints that the file itself lists.
    """
    changes, refused = plan_reload(old, new)
    config = changes.config
    for problem in refused:
        log.warning("a change of the configuration is refused", file=new.source, problem=str(problem))
    if not changes.paths:
        return old
    pipeline = core.pipeline
    try:
        choosing = changes.policy or any(path.startswith(_CHOOSING) for path in changes.paths)
        policy = build_policy(config, core.watch.on_plugin_error) if choosing else pipeline.policy
        decides = core.choosers.policy(config, policy) if choosing else policy
        if choosing:
            core.shadows.follow(config)
    except (PluginError, ConfigError) as error:
        unusable([str(error)])
        return old
    pipeline.policy = decides
    core.choosers.start()
    if changes.policy and pipeline.desk is not None:
        pipeline.desk.follow(policy.name, able_by(config, policy))
    core.fleet.ledger.ttl = config.ledger.lease_ttl
    core.watch.make_policy = lambda: build_policy(config)
    if core.journal is not None:
        core.journal.changed(config)
    core.host.max_body = config.parsing.max_body_bytes
    if any(path.startswith("$.inspect") for path in changes.paths):
        core.host.inspect = sampler(config.inspect.usage_sampling, Random(), asyncio.get_running_loop().time)
        if core.kv is not None:
            core.host.inspect = core.kv.inspecting(core.host.inspect)
    if any(path.startswith("$.log") for path in changes.paths):
        setup_log(config.log.level, config.log.format)
    if changes.endpoints and listed is not None:
        listed(Listing(config.endpoints.static))
    log.info("the configuration changed", file=config.source, applied=" ".join(changes.paths))
    return config


def unusable(problems: list[str]) -> None:
    for problem in problems[:_SHOWN]:
        log.error("the changed configuration cannot be used; the old one stays", problem=problem)
