"""The ports of a demo: which they are, and whether they are free before anything is started."""

from fairlead.demo.plan import HOST, Plan
from fairlead.io.ports import obstacle
from fairlead.model.errors import FairleadError


def check_ports(plan: Plan) -> None:
    """Raises `FairleadError` for the first port that cannot be listened on; says what to change."""
    for port in (*plan.own_ports, *plan.replica_ports):
        error = obstacle(HOST, port)
        if error is not None:
            raise FairleadError(_taken(plan, port, error))


def _taken(plan: Plan, port: int, error: OSError) -> str:
    own, replicas = plan.own_ports, plan.replica_ports
    return (
        f"cannot listen on {HOST}:{port}: {error.strerror or error}. "
        f"The demo needs {own[0]} to {own[-1]} and {replicas[0]} to {replicas[-1]}; choose others with --port"
    )
