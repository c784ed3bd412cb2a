"""Why an endpoint's load cannot be read, on the debug page."""

from fairlead.core.endpoint import Endpoint
from fairlead.core.fleet import Fleet
from fairlead.server.observe.watch import Watch


def errors(watch: Watch) -> dict[str, str]:
    return {one.id: one.last_error for one in watch.endpoints()}


def test_the_last_reason_is_shown_until_it_is_over() -> None:
    fleet = Fleet()
    watch = Watch(fleet, lambda: 0.0)
    for name in ("a", "b"):
        fleet.up(Endpoint(name, f"{name}:1"))
    watch.on_silence("a", "status 404")
    watch.on_silence("a", "no answer within 1 s")
    assert errors(watch) == {"a": "no answer within 1 s", "b": ""}
    watch.on_silence("a", "")
    watch.on_silence("b", "")
    assert errors(watch) == {"a": "", "b": ""}
    watch.on_silence("a", "status 404")
    watch.on_endpoint_gone("a")
    assert errors(watch) == {"a": "", "b": ""}
