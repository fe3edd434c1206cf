"""How engines and the gateway know each other, and what of theirs is encrypted."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from prfaas.core.deployment.field_types import Flag, HomeFile, TenantHeader, Text, needs
from prfaas.core.deployment.section import ENGINES_AGAIN, EVERYTHING, LIVE, TOLD_ELSEWHERE, Section

EngineTls = Literal["elsewhere", "always", "never"]
"""Which engines the gateway speaks TLS with: of other clusters than its own, all, or none."""

GATEWAY = "gateway"
"""Whose certificate the gateway and its control plane show."""

CONTROL = "control"
"""The control plane's name at KV ports; it is part of the gateway."""

TOOLS = "tools"
"""Whose certificate `prfaas doctor` and other tools show, and their name at KV ports."""

CERTIFICATE_NAMES = {GATEWAY: (GATEWAY, CONTROL), TOOLS: (TOOLS,)}
"""The certificates beside those of instances, and the names on the wire that each stands for."""

OBSERVERS = frozenset(name for names in CERTIFICATE_NAMES.values() for name in names)
"""The names of all that ask at KV ports without sending KVCache."""


@dataclass(frozen=True, slots=True)
class Security(Section, on_change=EVERYTHING):
    """How engines know each other, and which requests may share."""

    key_file: Annotated[HomeFile, Field(validate_default=True)] = Path("key")
    """File of the key that authenticates engines and seals tickets; the key itself is never kept here."""
    tenant_header: Annotated[TenantHeader | None, LIVE] = None
    """Requests with different values of this header share no cached prefix; left out: all requests share."""
    tenant_weights: Annotated[
        Mapping[Text, Annotated[int, Field(strict=True, ge=1, le=1000)]],
        needs("tenant_header", "needs security.tenant_header, which says whose a request is"),
        LIVE,
    ] = field(default_factory=dict)
    """Parts of a link by the value of `tenant_header`, while tenants compete for it; 1 for all others."""
    certificates: Annotated[HomeFile, Field(validate_default=True)] = Path("certificates")
    """Folder of the CA's certificate and of every member's own, as `prfaas certs` writes them."""
    encrypt_inside: Annotated[Flag, ENGINES_AGAIN] = False
    """KVCache between instances of one cluster is encrypted, too."""
    # What comes of it is each instance's `tls`.
    engine_tls: Annotated[EngineTls, TOLD_ELSEWHERE] = "elsewhere"
    """Which engines the gateway speaks TLS with."""

    @property
    def ca_file(self) -> Path:
        """The CAs that members trust: one, or two while they are changed."""
        return self.certificates / "ca.crt"

    def identity_file(self, name: str) -> Path:
        """Certificate and private key of an instance, of `GATEWAY` or of `TOOLS`, in one file."""
        return self.certificates / f"{name}.pem"
