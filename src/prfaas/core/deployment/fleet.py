"""How several gateways of one deployment find each other: through etcd."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from prfaas.core.deployment.addresses import is_loopback


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """The etcd that the gateways of a deployment share; without members there is one gateway alone."""

    etcd: tuple[str, ...]
    """Base URLs of etcd's members, without a trailing slash. The first that answers is asked."""
    name: str | None = None
    """This gateway's name among the others; None: its machine's name and its port."""
    lease_s: int = 3
    """A gateway that etcd has not heard of for so long is no member any more."""
    period_s: float = 0.1
    """What a gateway has open is told to the others so often, if it has changed."""
    ca_file: Path | None = None
    """Of the CA that etcd's certificate must be from; None: those of the system."""
    certificate_file: Path | None = None
    """Certificate and private key that etcd is shown, in one file; None: none."""

    @property
    def is_plain(self) -> bool:
        """Whether anything goes to etcd without TLS."""
        return any(url.startswith("http://") for url in self.etcd)

    @property
    def is_local(self) -> bool:
        """Whether all of etcd is on this machine."""
        return all(is_loopback(urlsplit(url).hostname or "") for url in self.etcd)
