"""Transfers by NIXL in requests: a ticket that asks for one, and the handover that the producer answers with.

vLLM's NIXL connector reads the address to connect to, and the blocks to read there, from a request. So the producer
seals them with the deployment's key, and nobody on the way to the consumer can change them.
"""

import base64
import binascii
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import msgspec

NIXL_MARK = "nixl."
"""Prefix of a ticket's text where NIXL is to move the KV. A ticket itself has no dot."""

MAX_HANDOVER_CHARS = 16 << 20
"""Enough for the block ids of a million tokens."""

_MAC_BYTES = 16
_PURPOSE = b"prfaas handover\x00"


class HandoverError(ValueError):
    """The text is no handover of a producer of this deployment."""


def by_nixl(sealed_ticket: str) -> str:
    """Mark a ticket as one for a transfer by NIXL."""
    return NIXL_MARK + sealed_ticket


def is_by_nixl(text: str) -> bool:
    """True if the text of a ticket or handover is about a transfer by NIXL."""
    return text.startswith(NIXL_MARK)


def ticket_of(text: str) -> str:
    """The sealed ticket in a text for which `is_by_nixl` holds."""
    return text.removeprefix(NIXL_MARK).partition(".")[0]


@dataclass(frozen=True, slots=True)
class Handover:
    """A producer's offer of KV to be read by NIXL."""

    ticket: str
    """The sealed ticket that it belongs to."""
    params: Mapping[str, Any]
    """`kv_transfer_params` as vLLM's NIXL connector gives and takes them."""
    expires_at_s: float
    """Unix time until which the producer keeps the blocks. A later read may get another request's KV."""

    def seal(self, key: bytes) -> str:
        """Seal it into opaque text, the inverse of `unseal` with the same key."""
        payload = msgspec.msgpack.encode([self.expires_at_s, self.params])
        sealed = base64.urlsafe_b64encode(payload + _mac(key, self.ticket, payload)).rstrip(b"=")
        return f"{NIXL_MARK}{self.ticket}.{sealed.decode('ascii')}"

    @classmethod
    def unseal(cls, text: str, key: bytes) -> Self:
        """Check and open a sealed handover. The ticket in it is still to be unsealed.

        Raises:
            HandoverError: it was not made by `seal` with this key.
        """
        if len(text) > MAX_HANDOVER_CHARS:
            raise HandoverError(f"handover has {len(text)} characters, more than {MAX_HANDOVER_CHARS}")
        ticket, _, sealed = text.removeprefix(NIXL_MARK).partition(".")
        try:
            raw = base64.b64decode(sealed + "=" * (-len(sealed) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise HandoverError("handover is not base64url text") from None
        payload, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, _mac(key, ticket, payload)):
            raise HandoverError("handover was not sealed with this deployment's key")
        expires_at_s, params = msgspec.msgpack.decode(payload, type=tuple[float, dict[str, Any]])
        return cls(ticket, params, expires_at_s)


def _mac(key: bytes, ticket: str, payload: bytes) -> bytes:
    # Exactly one ticket stands before the zero byte: its text has none.
    return hmac.digest(key, _PURPOSE + ticket.encode() + b"\x00" + payload, "sha256")[:_MAC_BYTES]
