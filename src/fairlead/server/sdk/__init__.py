"""For schedulers in a process of their own, written in Python; docs/replacement-scheduler.md.

class LeastQueue:
    def pick(self, request, endpoints):
        return min(endpoints, key=lambda one: one.queue).id

$ fairlead scheduler serve my_module:LeastQueue --listen unix:/run/scheduler.sock
"""

from fairlead.server.sdk.simple import EndpointView, RefusedRequest, Scheduler

__all__ = ["EndpointView", "RefusedRequest", "Scheduler"]
