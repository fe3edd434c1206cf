"""How engines and the gateway know each other, and what of theirs is encrypted."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

EngineTls = Literal["elsewhere", "always", "never"]
"""Which engines the gateway speaks TLS with: of other clusters than its own, all, or none."""

GATEWAY = "gateway"
"""Whose certificate the gateway and its control plane show."""

TOOLS = "tools"
"""Whose certificate `prfaas doctor` and other tools show."""


@dataclass(frozen=True, slots=True)
class Security:
    """How engines know each other, and which requests may share."""

    key_file: Path
    """File of the key that authenticates engines and seals tickets; the key itself is never kept here."""
    tenant_header: str | None = None
    """Requests with different values of this header share no cached prefix; None: all requests share."""
    certificates: Path = Path("certificates")
    """Folder of the CA's certificate and of every member's own, as `prfaas certs` writes them."""
    encrypt_inside: bool = False
    """KVCache between instances of one cluster is encrypted, too."""

    @property
    def ca_file(self) -> Path:
        """The CAs that members trust: one, or two while they are changed."""
        return self.certificates / "ca.crt"

    def identity_file(self, name: str) -> Path:
        """Certificate and private key of an instance, of `GATEWAY` or of `TOOLS`, in one file."""
        return self.certificates / f"{name}.pem"
