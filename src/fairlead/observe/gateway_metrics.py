"""What the embedded gateway counts by itself, on the metrics page."""

from fairlead.observe.exposition import Registry
from fairlead.observe.instruments import Readings


def show_unscheduled(registry: Registry) -> Readings:
    """Whose values whoever asks the gateway sets, `{(): count}`; without any nothing is shown."""
    past = Readings("counter")
    text = "Requests that the embedded gateway balanced by itself, by its own count: also while no scheduler ran."
    registry.show("fairlead_unscheduled_requests_total", text, past)
    return past
