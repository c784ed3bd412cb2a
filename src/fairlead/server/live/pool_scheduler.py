"""The scheduler of one pool: the parts from `wiring`, fed with endpoints, model definitions and changed
configurations."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from fairlead.apis.engine_metrics import unknown_engine
from fairlead.config.checks import with_page
from fairlead.config.endpoint_list import PORT_LABEL, port_number
from fairlead.config.problems import Problem
from fairlead.config.reload import Changes
from fairlead.config.schema import Config
from fairlead.core.endpoint import MODEL_LABEL, Endpoint
from fairlead.core.errors import ConfigError
from fairlead.core.events import EndpointDown, EndpointUp, ModelsChanged, Reconfigured, StopAsked
from fairlead.core.instructions import AdoptConfiguration, RefuseConfiguration
from fairlead.core.models import Catalogue, ModelSet
from fairlead.core.scheduling import Scheduling
from fairlead.pool.models_file import follow_models, listed_models, rules_of
from fairlead.pool.scrape import Pace
from fairlead.server.admin import AdminSources
from fairlead.server.journal.writer import segments
from fairlead.server.live.choosers import check_schedulers
from fairlead.server.live.kv import KvListening
from fairlead.server.live.wiring import Core, TimeOfDay, pool_label
from fairlead.server.observe.component_metrics import SPEED
from fairlead.server.observe.log import get
from fairlead.server.observe.snapshot import SnapshotMaker
from fairlead.server.observe.tracing import Tracing
from fairlead.server.running_gateway import NONE_RUNS, RunningGateway
from fairlead.server.state import StateFile

log = get("serve")

#: At most this many problems of a changed configuration are logged; `fairlead validate` prints all.
_SHOWN = 5
#: Seconds in which waiting requests are refused where nothing else is waited for, at most: some thousands.
REFUSE_S = 1.0


def log_unusable(problems: Sequence[str]) -> str:
    """Log why a changed configuration cannot be used. Returns a summary with the first problem and the number of
    others."""
    text = "the changed configuration cannot be used; the old one stays"
    for problem in problems[:_SHOWN]:
        log.error(text, problem=problem)
    return ": ".join((text, *problems[:1])) + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")


def _on_models_problem(file: str, problem: Problem) -> None:
    log.warning("problem in a model definition", file=file, problem=str(problem))


class PoolScheduler:
    """Call `await start(stack)`, then `await settle(stack)` once the first endpoints may be known. `one_of`: the pace
    that all pools of this process share; `None` = this is the only pool. `unready`: returns the reasons why requests
    cannot be served. `gateway`: the embedded gateway that runs next to this process. `begun`: the configuration that
    the other schedulers of this pool began with, for what a reload cannot change; `None` = `config`."""

    def __init__(
        self,
        config: Config,
        tracing: Tracing | None,
        *,
        one_of: Pace | None = None,
        unready: Callable[[], Sequence[str]] = list,
        gateway: RunningGateway = NONE_RUNS,
        begun: Config | None = None,
    ) -> None:
        """Raises `ConfigError` or `PluginError`."""
        loop = asyncio.get_running_loop()
        self.config = config
        self._unready = unready
        #: Why the latest configuration cannot be used; empty = it can.
        self.unusable = ""
        #: As in `LivePools`: the process itself knows those of its only pool.
        self.refused: list[str] = []
        self._definitions: dict[str, ModelSet] = {}
        #: Served models that are not defined, (name, target) that no server has, and the definitions and lists that say
        #: so.
        self._undefined, self._unserved, self._looked = set[str](), set[tuple[str, str]](), (Catalogue(), 0, False)
        self.core = core = Core(config, loop, tracing, self._adopt, self._refuse, one_of, gateway, begun)
        self.fleet, self.watch, self.pipeline = core.fleet, core.watch, core.pipeline
        self.driver, self.host, self.scraper = core.driver, core.host, core.scraper
        self.label = pool_label(config, one_of is not None)
        self.registry, self.troubles, self.kube = self.watch.metrics.registry, self.watch.troubles, self.watch.kube
        #: Makes the dashboard's pages of endpoints and decisions.
        self.maker = SnapshotMaker(
            self.watch,
            loop.time,
            TimeOfDay(loop.time),
            pool=self.label,
            policy=lambda: self.pipeline.policy.name,
            reasons=unready,
            replicas=self._replicas,
            schedulers=lambda: 1 if core.replicas is None else core.replicas.count,
        )

    async def start(self, stack: AsyncExitStack) -> None:
        """Start all parts; they run until `stack` is closed."""
        config, core = self.config, self.core
        self._watch_troubles()
        if core.journal is not None:
            core.journal.begin()
            stack.callback(core.journal.close)
        self.driver.start()
        stack.callback(self.driver.close)
        if core.state is not None:
            stack.push_async_callback(core.state.close)
            await core.state.start()
        stack.push_async_callback(core.connections.close)
        stack.push_async_callback(core.shadows.close)
        stack.callback(self.watch.look, True)
        if core.warming is not None:
            stack.push_async_callback(core.warming.close)
        self._follow(config, core.builder.scheduling)
        stack.push_async_callback(self.scraper.close)
        stack.push_async_callback(core.served.close)
        if core.kv is not None:
            await core.kv.start(stack)
        if config.models.list:
            self.defined("configuration", listed_models(config.models))
        files = await follow_models(stack, config.models, partial(self.defined, "files"), _on_models_problem)
        if files is not None:
            self.troubles.watch("models", lambda: files.problem)

    async def settle(self, stack: AsyncExitStack) -> None:
        """Wait until the saved state of the first endpoints is restored, then connect to other replicas."""
        if self.core.state is not None:
            await self.core.state.settled()
        if self.core.replicas is not None:
            stack.push_async_callback(self.core.replicas.close)
            await self.core.replicas.start()

    @property
    def states(self) -> dict[str, StateFile]:
        """The state file, if there is one, as those of `LivePools`."""
        return {} if self.core.state is None else {"": self.core.state}

    @property
    def leases(self) -> int:
        """The number of running requests that this scheduler answers; those of peers have negative ids."""
        return len({lease.request.id for lease in self.fleet.ledger if lease.request.id >= 0})

    @property
    def waiting(self) -> int:
        """The number of queued requests."""
        flow = self.pipeline.flow_controller
        return len(flow) if flow is not None else 0

    @property
    def endpoints(self) -> int:
        return self.fleet.table.count

    @property
    def holds(self) -> bool:
        """Whether requests wait in the queue for the pool's first endpoint."""
        flow = self.config.flow_control
        return flow is not None and flow.settings.enabled and flow.settings.no_endpoint_ttl > 0

    @property
    def may_be_empty(self) -> bool:
        """Whether the scheduler is ready without any endpoint: requests wait in the queue, or the endpoints are pods.
        Rollouts must not wait for model servers, which take minutes to load."""
        return self.holds or self.config.kubernetes.on

    def empty_queue(self) -> None:
        """End the wait of every queued request, because the process or the pool is stopping."""
        self.driver.feed(StopAsked())

    def turned(self, late_s: float) -> None:
        """Do the work of a timer of the event loop, which fired `late_s` seconds late."""
        self.watch.metrics.families.loop_lag.child().observe(late_s)
        self.watch.tempo.turned(late_s)
        self.host.pulse.beat()
        self.watch.look()
        self.troubles.look()
        self._compare_names()
        self.maker.history.look(asyncio.get_running_loop().time())

    def _watch_troubles(self) -> None:
        troubles = self.troubles
        troubles.watch(SPEED, self.watch.tempo.trouble)
        troubles.watch("configuration", lambda: self.unusable)
        state = self.core.state
        if state is not None:
            troubles.watch("state", lambda: state.problem)
        kv = self.core.kv
        if kv is not None:
            troubles.watch("tokens", kv.trouble)
        if isinstance(kv, KvListening):
            troubles.watch("kv-snapshot", kv.unsaved)
            troubles.watch("kv-events", kv.unheard)
        if self.core.replicas is not None:
            troubles.watch("replicas", self.core.replicas.trouble)
        if self.core.journal is not None:
            counts = self.core.journal.recorder.counts
            failing = "records of the journal are lost: its disk fails or is full, a segment was removed, or another"
            failing += " scheduler writes there; the log says which"
            troubles.lately("journal", lambda: counts.errors + counts.unwritten, failing)
            troubles.watch("disk", self.core.journal.hung)
            strange = "records of the journal are lost: they cannot be encoded; the log says which"
            troubles.lately("journal-encoding", lambda: counts.unencoded, strange)
            troubles.lately("journal-speed", lambda: counts.dropped, "the journal does not keep up; records are lost")

    # ---- a changed configuration ----

    def reconfigure(self, changes: Changes) -> bool:
        """Apply the changes through the pipeline. False = there are none, or they cannot be used; then the log says
        why."""
        self.unusable = ""
        if not changes.paths:
            return False
        config = changes.config
        try:
            check_schedulers(config)
        except ConfigError as error:
            self.refuse([str(error)])
            return False
        self.driver.feed(Reconfigured(config))
        if self.config is not config:
            return False
        if any(path.startswith("$.models") for path in changes.paths):
            self.defined("configuration", listed_models(config.models))
        return True

    def _adopt(self, instruction: AdoptConfiguration) -> None:
        self.config = config = instruction.document
        self._follow(config, instruction.scheduling)
        self.watch.watch_queue(self.pipeline.flow_controller)
        self.host.keep_bodies_up_to(config.parsing.max_body_bytes)
        self.core.inspection.follow(config.inspect.usage_sampling)

    def _refuse(self, instruction: RefuseConfiguration) -> None:
        self.refuse([instruction.problem])

    def refuse(self, problems: Sequence[str]) -> None:
        """Note and log that the configuration cannot be used."""
        self.unusable = log_unusable(problems)

    def _follow(self, config: Config, scheduling: Scheduling) -> None:
        """Connect to the remote schedulers that the configuration names, and start the shadow policies."""
        self.core.connections.follow(config)
        self.core.host.understanding.canary(config.canary.percent > 0)
        self.core.shadows.follow(config, scheduling.on_trial)
        self.watch.set_listeners([*self.core.connections.listeners(), *self.core.shadows.listeners()])
        self.watch.choosers.follow(scheduling.remotes, scheduling.policy)
        plugin = config.policy.plugin if config.policy.splits else None
        self.watch.watch_prompts(None if plugin is None else plugin.parameters.may_split)
        self.watch.watch_roles(config.policy.any_role)

    # ---- endpoints and models ----

    def endpoint(self, event: EndpointUp | EndpointDown) -> None:
        """Report an endpoint that appeared, changed or was removed to every part that follows endpoints."""
        if isinstance(event, EndpointUp):
            event = EndpointUp(with_page(event.endpoint, self.config.metrics), self.core.served.period_s > 0.0)
            self.watch.on_endpoint(event.endpoint)
            if waited := self.watch.queue.on_endpoint():
                log.info(
                    "a pool that had no endpoints has one again", endpoint=event.endpoint.id, waited_s=round(waited, 2)
                )
        self.driver.feed(event)
        if self.core.kv is not None:
            self.core.kv.endpoint(event)
        if isinstance(event, EndpointUp):
            if self.core.state is not None:
                self.core.state.joined(event.endpoint)
            self.scraper.up(event.endpoint)
            self.core.served.up(event.endpoint)
            self._log_labels(event.endpoint)
            log.info("endpoint up", endpoint=event.endpoint.id, address=event.endpoint.address)
        else:
            self.scraper.down(event.endpoint_id)
            self.core.served.down(event.endpoint_id)
            self.watch.on_endpoint_gone(event.endpoint_id)
            log.info("endpoint down", endpoint=event.endpoint_id)

    def _log_labels(self, endpoint: Endpoint) -> None:
        """Log labels that cannot be used."""
        labels = endpoint.labels
        engine, port = unknown_engine(labels, self.scraper.specs), labels.get(PORT_LABEL, "")
        if engine:
            read_as = self.config.metrics.default_engine
            text = "unknown engine type; its metrics are read as those of another"
            log.warning(text, endpoint=endpoint.id, engine=engine, read_as=read_as)
        if port and not port_number(port):
            text = f"the label {PORT_LABEL} is not a port; metrics are read as without it"
            log.warning(text, endpoint=endpoint.id, label=port, read_at=endpoint.scrape_url)

    def defined(self, where: str, models: ModelSet) -> None:
        """Replace the model definitions of the source `where` (configuration, files, kubernetes) by `models`."""
        self._definitions[where] = models
        models = sum(self._definitions.values(), ModelSet())
        self.driver.feed(ModelsChanged(models, rules_of(self.config.models)))
        catalogue = self.pipeline.models
        self.core.host.understanding.define(catalogue)
        overruled = ((loser, used) for loser, older in catalogue.overruled.items() for used in {*older.values()})
        self.watch.on_models(catalogue.known, [*catalogue.conflicts, *overruled])
        for name, rewrite in catalogue.rewritten.items():
            log.warning("a rewrite decides in place of the targets of a name", model=name, rewrite=rewrite)
        counts = {"models": len(models.models), "objectives": len(models.objectives), "rewrites": len(models.rewrites)}
        log.info("loaded the model definitions", **counts)

    def _compare_names(self) -> None:
        """Compare the defined names with the lists of the servers, when one of them has changed."""
        catalogue, served = self.pipeline.models, self.core.served
        looked = catalogue, served.reported, served.settled()
        if self._looked != looked:
            self._looked = looked
            self._look_for_undefined(catalogue)
            self._look_for_unserved(catalogue)

    def _look_for_undefined(self, catalogue: Catalogue) -> None:
        """Log which served models no request may name: the first name that is defined refuses all others."""
        lists = self.core.served.lists() if catalogue.strict else ()
        undefined = {name for each in lists for name in catalogue.undefined(each.base.names, each.adapters or ())}
        if new := sorted(undefined - self._undefined):
            keep = "define these too, or set models.unmatched: pass"
            models = ", ".join(new[:_SHOWN]) + (f" and {len(new) - _SHOWN} more" if len(new) > _SHOWN else "")
            log.warning("requests for served models get 404, because only defined ones pass", models=models, keep=keep)
        self._undefined = undefined

    def _look_for_unserved(self, catalogue: Catalogue) -> None:
        """Log which targets no server lists and no label names. Their requests go to any server that might know them,
        because some load models on demand, or ignore the name."""
        listed = {*self.core.served.names()}
        if not listed or not self.core.served.settled():
            return
        labelled = {name for _, endpoint in self.fleet.table.slots() for name in endpoint.labelled_models}
        unserved = {*catalogue.unserved(listed | labelled)}
        for name, target in sorted(unserved - self._unserved)[:_SHOWN]:
            mend = f"correct the target, or label the endpoint that has it {MODEL_LABEL}: {target}"
            log.warning("no server lists a target; its requests may get 404", model=name, target=target, mend=mend)
        self._unserved = unserved

    # ---- admin pages ----

    def notes(self) -> list[str]:
        """Lines for `/readyz`: present troubles, and notes on endpoints, on the state file and on replicas."""
        state, replicas = self.core.state, self.core.replicas
        notes = [state.note] if state is not None and state.note else []
        if replicas is not None and not replicas.problem:
            notes.append(f"replicas: {replicas.note()}")
        if self.may_be_empty and not self.endpoints:
            notes.append("no endpoints" + ": requests wait for the first one" * self.holds)
        return [*self.troubles.look().values(), *self.maker.history.notes(), *notes]

    def sources(self, **more: Any) -> AdminSources:
        """`more`: further fields of `AdminSources`."""
        core, watch = self.core, self.watch
        return AdminSources(
            metrics=watch.exposition,
            openmetrics=lambda: watch.exposition(openmetrics=True),
            unready=self._unready,
            notes=self.notes,
            endpoints=watch.endpoints,
            decisions=watch.each_decision,
            decision=lambda name: watch.decision(name, core.builder.fresh),
            knowledge=core.kv.page if core.kv is not None else lambda: None,
            journal=lambda: segments(self.config.journal.path),
            replicas=core.replicas.page if core.replicas is not None else lambda: None,
            dashboard=self.maker,
            **more,
        )

    def _replicas(self) -> str:
        replicas = self.core.replicas
        return "" if replicas is None else replicas.trouble() or replicas.note()
