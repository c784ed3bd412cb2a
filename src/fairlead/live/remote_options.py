"""The settings of a scheduler in another process, in the client's terms."""

from fairlead.config.choosers import SchedulerSettings
from fairlead.config.schema import Config
from fairlead.io.remote.address import ClientTls
from fairlead.io.remote.client import RemoteOptions


def remote_options(name: str, settings: SchedulerSettings, config: Config) -> RemoteOptions:
    """Raises `ConfigError` when TLS files cannot be used: that must stop the start."""
    tls = None
    if settings.tls is not None:
        named = settings.tls
        tls = ClientTls(
            ca_file=named.ca_file, verify=named.verify, server_name=named.server_name, cert_dir=named.cert_dir
        )
        tls.context()
    return RemoteOptions(
        name=name,
        address=settings.address,
        budget=settings.budget,
        pool=config.models.pool or config.kubernetes.pool or "default",
        tls=tls,
    )
