"""Which request headers the gateway takes away, and when.

Two moments. *At entry*, before routing and before the scheduler: headers that name a machine. Nobody but the scheduler
may set them; what it sets itself comes later and passes. *Toward the model server*: headers that only the scheduler
reads, and the destination, which this gateway takes from metadata.
"""

from fairlead.route.headers import CONTROL_HEADERS, DESTINATION, STEERING_HEADERS

AT_ENTRY: tuple[str, ...] = tuple(sorted(CONTROL_HEADERS))

TOWARD_UPSTREAM: tuple[str, ...] = (DESTINATION, *sorted(STEERING_HEADERS))
