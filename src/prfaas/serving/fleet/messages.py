"""Messages that the gateways of a fleet write into their store."""

import hashlib
from typing import Annotated, Literal

import msgspec

from prfaas.core.deployment import Deployment
from prfaas.core.scheduling.gateway_share import GatewayShare

_Name = Annotated[str, msgspec.Meta(max_length=256)]
_Tokens = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]


class Announcement(msgspec.Struct, frozen=True, omit_defaults=True):
    """A gateway's report on itself, under its lease."""

    file: _Name
    """`file_digest` of the deployment file that it runs."""
    share: GatewayShare
    """What it has open."""
    applied: int = 0
    """The newest revision of decisions and drain marks that it has carried out."""
    out: list[_Name] = []
    """The instances that get nothing from it."""


class RoleDecision(msgspec.Struct, frozen=True, omit_defaults=True):
    """The role of an instance of a pd cluster."""

    prefills: bool = False
    decodes: bool = False
    to_role: Literal["prefill", "decode"] | None = None
    """It drains for this role and gets nothing new; None: it does not."""


class Decisions(msgspec.Struct, frozen=True, omit_defaults=True):
    """The leader's decisions, which the others follow. They stay when all gateways have gone."""

    leader: _Name
    file: _Name
    """`file_digest` of the leader's deployment file."""
    thresholds: dict[_Name, _Tokens | None] = {}
    """Tokens by pd cluster; None: it never offloads."""
    roles: dict[_Name, RoleDecision] = {}
    """By instance of a pd cluster."""
    held: list[_Name] = []
    """The pd clusters whose threshold an operator has set: no search moves it."""


class Reloaded(msgspec.Struct, frozen=True):
    """A gateway has taken on another deployment file; the others look at theirs."""

    by: _Name
    file: _Name
    """`file_digest` of what it has taken on."""


def file_digest(deployment: Deployment) -> str:
    """A word for everything in a deployment file that all gateways of a fleet must agree on."""
    facts = (
        deployment.name,
        deployment.model.served_name,
        [(each.name, each.kind, each.hardware, each.instances) for each in deployment.clusters],
        deployment.links,
        deployment.routing.policy,
        deployment.routing.threshold_tokens,
        sorted(deployment.routing.params.items()),
        deployment.control,
        deployment.slo,
    )
    return hashlib.blake2b(repr(facts).encode(), digest_size=6).hexdigest()
