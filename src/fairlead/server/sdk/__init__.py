"""For writing schedulers in Python that run in a process of their own; see docs/replacement-scheduler.md.

class LeastQueue:
    def pick(self, request, endpoints):
        return min(endpoints, key=lambda endpoint: endpoint.queue).id

$ fairlead scheduler serve my_module:LeastQueue --listen unix:/run/scheduler.sock
"""

from fairlead.server.sdk.simple import EndpointView, RefusedRequest, Scheduler

__all__ = ["EndpointView", "RefusedRequest", "Scheduler"]
