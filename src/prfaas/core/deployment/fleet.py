"""How several gateways of one deployment find each other: through etcd."""

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from prfaas.core.deployment.addresses import is_loopback
from prfaas.core.deployment.field_types import GIVEN, HomeFile, Name
from prfaas.core.deployment.section import GATEWAY_AGAIN, Section


def _etcd_url(url: str) -> str:
    if not re.fullmatch(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253}):[0-9]{1,5}/?", url):
        raise ValueError(
            f'{url!r} is no address of etcd; write "https://HOST:2379", or http:// on a safe network'
        )
    return url.rstrip("/")


_Url = Annotated[str, Field(strict=True), AfterValidator(_etcd_url)]


@dataclass(frozen=True, slots=True)
class FleetConfig(Section):
    """The etcd that the gateways of a deployment share; without it there is one gateway alone."""

    on_change: ClassVar = GATEWAY_AGAIN

    etcd: Annotated[tuple[_Url, ...], Field(min_length=1)]
    """Addresses of etcd's members, `https://HOST:2379`. The first that answers is asked."""
    name: Annotated[Name | None, GIVEN] = None
    """This gateway's name, unlike any other's; left out: its machine's name and its port."""
    lease_s: Annotated[int, Field(strict=True, ge=2, le=60)] = 3
    """A gateway that etcd has not heard of for so many seconds is no member any more."""
    period_s: Annotated[float, Field(strict=True, ge=0.05, le=1)] = 0.1
    """What a gateway has open is told to the others so often, if it has changed."""
    ca_file: Annotated[HomeFile | None, GIVEN] = None
    """Of the CA that etcd's certificate must be from; left out: those of the system."""
    certificate_file: Annotated[HomeFile | None, GIVEN] = None
    """Certificate and private key that etcd is shown, in one file."""

    @property
    def is_plain(self) -> bool:
        """Whether anything goes to etcd without TLS."""
        return any(url.startswith("http://") for url in self.etcd)

    @property
    def is_local(self) -> bool:
        """Whether all of etcd is on this machine."""
        return all(is_loopback(urlsplit(url).hostname or "") for url in self.etcd)
