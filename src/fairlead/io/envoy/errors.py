"""What can be wrong with the gateway itself."""

from fairlead.model.errors import FairleadError


class GatewayError(FairleadError):
    """Envoy is missing, refuses its configuration, or does not come up. The message says what to do."""
