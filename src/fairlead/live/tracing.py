"""Tracing of a running scheduler: wired where the configuration asks for it, and ended with the last span."""

import asyncio
import time
from contextlib import AsyncExitStack, suppress
from random import Random

from fairlead.config.schema import Config
from fairlead.live.core import Core
from fairlead.model.errors import ConfigError
from fairlead.observe.log import get
from fairlead.observe.tracing import Sampling, Tracing
from fairlead.observe.tracing_export import make_provider

log = get("tracing")

#: Seconds beyond the timeout that sending the last spans may take at the end.
_GRACE = 1.0


def start_tracing(stack: AsyncExitStack, config: Config, core: Core, loop: asyncio.AbstractEventLoop) -> None:
    """Raises `ConfigError` when tracing is asked for and OpenTelemetry is not there."""
    settings = config.tracing
    if not settings.endpoint:
        return
    try:
        provider = make_provider(settings.endpoint, settings.service_name, settings.timeout)
    except ImportError as error:
        why = f"tracing needs OpenTelemetry ({error}): pip install 'fairlead[tracing]'"
        raise ConfigError(why, "$.tracing.endpoint") from None
    sampling = Sampling(settings.sample, settings.follow_parent, settings.max_rate)
    epoch = time.time() - loop.time()
    tracing = Tracing(provider.get_tracer("fairlead"), sampling, Random(), loop.time, epoch)
    core.host.understanding.on_request = tracing.arrived
    core.host.answers.traceparent = tracing.traceparent
    core.watch.tracing = tracing
    core.watch.trace_id = tracing.trace_id

    async def close() -> None:
        tracing.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(provider.shutdown), settings.timeout + _GRACE)

    stack.push_async_callback(close)
    log.info("requests are traced", endpoint=settings.endpoint, sample=settings.sample)
