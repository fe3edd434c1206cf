"""The shape of a deployment file's `fleet`, and what it becomes."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from prfaas.core.deployment.fleet import FleetConfig
from prfaas.core.deployment.source import YamlSource


def _etcd_url(url: str) -> str:
    if not re.fullmatch(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253}):[0-9]{1,5}/?", url):
        raise ValueError(
            f'{url!r} is no address of etcd; write "https://HOST:2379", or http:// on a safe network'
        )
    return url.rstrip("/")


def _not_empty(value: object) -> object:
    if value is None:
        raise ValueError("must not be empty")
    return value


_GIVEN = BeforeValidator(_not_empty)
_Url = Annotated[str, AfterValidator(_etcd_url)]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
_File = Annotated[str, Field(min_length=1)]


class FleetSection(BaseModel):
    """The etcd through which several gateways share what they know. Files are relative to the deployment's folder."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    etcd: Annotated[list[_Url], Field(min_length=1)]
    name: Annotated[_Name | None, _GIVEN] = None
    lease_s: Annotated[int, Field(ge=2, le=60)] = 3
    period_s: Annotated[float, Field(ge=0.05, le=1)] = 0.1
    ca_file: Annotated[_File | None, _GIVEN] = None
    certificate_file: Annotated[_File | None, _GIVEN] = None


def fleet_of(source: YamlSource, fleet: FleetSection | None, home: Path) -> FleetConfig | None:
    """The fleet of a file; `home` is the deployment's folder in the state directory.

    Raises:
        DeploymentError: it has certificates for an etcd without TLS.
    """
    if fleet is None:
        return None
    if any(url.startswith("http://") for url in fleet.etcd):
        for field in ("ca_file", "certificate_file"):
            if getattr(fleet, field) is not None:
                raise source.error(
                    ("fleet", field), "is for TLS; write https:// before every address in etcd"
                )
    ca, own = (
        None if each is None else home / Path(each).expanduser()
        for each in (fleet.ca_file, fleet.certificate_file)
    )
    return FleetConfig(tuple(fleet.etcd), fleet.name, fleet.lease_s, fleet.period_s, ca, own)
