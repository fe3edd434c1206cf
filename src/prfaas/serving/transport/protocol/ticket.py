"""The sealed permission for one KV transfer: who sends what to whom, and until when.

A ticket names peers, never addresses. It travels in an HTTP request, where anybody may read it, as opaque text;
only a holder of the deployment's key can make or change one.
"""

import base64
import binascii
import hashlib
import hmac
import math
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Self

import msgspec

from prfaas.core.prefix.hashing import MediaItem

TICKET_PARAMETER = "prfaas"
"""The key of `kv_transfer_params` (of an HTTP request) whose value is the sealed ticket of its own transfer."""

PREFIX_TICKET_PARAMETER = "prfaas_from"
"""The same for a transfer that a prefill starts from: a prefix that another cluster sends first."""

KEPT_PARAMETER = "prfaas_kept"
"""Number of tokens after which all ranks can resume from the ticket's partial transfer."""

REMOTE_PREFILL_PARAMETER = "do_remote_prefill"
"""vLLM's own key: another engine has prefilled the prompt."""

CACHED_TOKENS_PARAMETER = "remote_prefill_cached_tokens"
"""vLLM's own key: cached tokens of the prompt, for the answer's usage."""


TRANSFER_ID_BYTES = 16
DIGEST_BYTES = 16
MAX_TOKENS = 1 << 30
MAX_PARTS = 1 << 10
MAX_NAME_BYTES = 255
MAX_SEALED_CHARS = 1024

_MAC_BYTES = 16
_ITEM = Struct("<IIH")
_PURPOSE = b"prfaas ticket 4\x00"
MAX_USES = 1024
MAX_WEIGHT = 65535
TENANT_BYTES = 8


class TicketError(ValueError):
    """The ticket is not one of ours, has expired, or says something absurd."""


def prompt_digest(
    token_ids: Sequence[int], salt: str = "", adapter: str = "", media: Sequence[MediaItem] = ()
) -> bytes:
    """BLAKE2b (16 bytes) over the ids as little-endian uint32, under the tenant's salt and the LoRA adapter.

    Tenants and adapters do not share KV, not even for equal ids. Nor do prompts with other media: each item that begins
    within the ids follows them, as offset and tokens (uint32), the length of its digest (uint16), and the digest.

    Raises:
        OverflowError: an id is not a uint32.
    """
    ids = token_ids if isinstance(token_ids, array) and token_ids.typecode == "I" else array("I", token_ids)
    if sys.byteorder == "big":
        ids = array("I", ids)
        ids.byteswap()
    key = hashlib.blake2b(f"{salt}\x00{adapter}".encode()).digest() if salt or adapter else b""
    if not media:
        return hashlib.blake2b(ids, digest_size=DIGEST_BYTES, key=key).digest()
    hashed = hashlib.blake2b(ids, digest_size=DIGEST_BYTES, key=key, person=b"media")
    for name, offset, tokens in media:
        if offset < len(ids):
            digest = name.encode()
            hashed.update(_ITEM.pack(offset, tokens, len(digest)) + digest)
    return hashed.digest()


def part_id(transfer_id: bytes, part: int) -> bytes:
    """The id under which one of the transfers of a ticket travels; the ticket's own is that of part 0.

    One rank of a consumer gets its KV in several where more ranks of the producer have it.
    """
    if not part:
        return transfer_id
    return hashlib.blake2b(transfer_id + part.to_bytes(2), digest_size=TRANSFER_ID_BYTES).digest()


def checkpoint_id(transfer_id: bytes, num_tokens: int) -> bytes:
    """The id of a transfer's checkpoint after these tokens; the transfer's own id for 0."""
    if not num_tokens:
        return transfer_id
    return hashlib.blake2b(
        transfer_id + num_tokens.to_bytes(4), digest_size=TRANSFER_ID_BYTES, person=b"checkpoint"
    ).digest()


@dataclass(frozen=True, slots=True)
class TransferClass:
    """Tenant, weight and class of a transfer on its link. Sealed in the ticket, so no client can choose it."""

    tenant: bytes = bytes(TENANT_BYTES)
    """8 bytes of the tenant; zeros where tenants are not distinguished."""
    weight: int = 1
    """A tenant with twice the weight of another gets twice the bytes while both have something to send."""
    background: bool = False
    """It gets the bandwidth that other transfers leave."""

    def __post_init__(self) -> None:
        if len(self.tenant) != TENANT_BYTES:
            raise TicketError(f"ticket's tenant has {len(self.tenant)} bytes, not {TENANT_BYTES}")
        if not 1 <= self.weight <= MAX_WEIGHT:
            raise TicketError(f"ticket's weight is {self.weight}, not within 1..{MAX_WEIGHT}")


DEFAULT_CLASS = TransferClass()


@dataclass(frozen=True, slots=True)
class TransferAttributes:
    """Attributes of a transfer that the gateway sets, sealed in its ticket.

    A new one needs a default, which older releases mean by leaving it out; they ignore attributes that they lack.
    """

    uses: int = 1
    """Requests of the consumer that load the transfer (vLLM makes `n` requests of one with `n` > 1)."""
    service: TransferClass = DEFAULT_CLASS
    """How it shares the link."""
    checkpoint_tokens: int = 0
    """The producer sends a checkpoint about every `checkpoint_tokens` (see `checkpoints.is_due`); 0: none."""

    def __post_init__(self) -> None:
        if not 0 <= self.checkpoint_tokens <= MAX_TOKENS:
            raise TicketError(
                f"ticket's checkpoint_tokens is {self.checkpoint_tokens}, not within 0..{MAX_TOKENS}"
            )
        if not 1 <= self.uses <= MAX_USES:
            raise TicketError(f"ticket's uses is {self.uses}, not within 1..{MAX_USES}")


PLAIN = TransferAttributes()
"""Attributes of a transfer without any of its own."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """KV of tokens [skip_tokens, num_tokens) of one prompt goes from `producer` to `consumer`."""

    transfer_id: bytes
    """16 random bytes."""
    producer: str
    """Name of the instance that sends."""
    consumer: str
    """Name of the instance that receives."""
    num_tokens: int
    skip_tokens: int
    """Tokens whose KV the consumer holds already."""
    prompt_digest: bytes
    """Of the ids [0, num_tokens), the tenant and the adapter: see `prompt_digest`."""
    expires_at_s: float
    """Unix time."""
    attributes: TransferAttributes = PLAIN

    def __post_init__(self) -> None:
        if len(self.transfer_id) != TRANSFER_ID_BYTES:
            raise TicketError(f"ticket's transfer_id has {len(self.transfer_id)} bytes, not 16")
        if len(self.prompt_digest) != DIGEST_BYTES:
            raise TicketError(f"ticket's prompt_digest has {len(self.prompt_digest)} bytes, not 16")
        if not 0 < self.num_tokens <= MAX_TOKENS:
            raise TicketError(f"ticket's num_tokens is {self.num_tokens}, not within 1..{MAX_TOKENS}")
        if not 0 <= self.skip_tokens <= self.num_tokens:
            raise TicketError(f"ticket's skip_tokens is {self.skip_tokens}, not within 0..{self.num_tokens}")
        if not math.isfinite(self.expires_at_s):
            raise TicketError("ticket's expires_at_s is not a finite number")
        for field, name in (("producer", self.producer), ("consumer", self.consumer)):
            if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
                raise TicketError(f"ticket's {field} must have 1 to {MAX_NAME_BYTES} bytes")

    def seal(self, key: bytes) -> str:
        """Seal it into opaque base64url text (no padding), the inverse of `unseal` with the same key."""
        body = msgspec.msgpack.encode(self)
        return base64.urlsafe_b64encode(body + _mac(key, body)).rstrip(b"=").decode("ascii")

    @classmethod
    def unseal(cls, text: str, key: bytes, now_s: float) -> Self:
        """Check and open a sealed ticket.

        Raises:
            TicketError: it was not made by `seal` with this key, or it has expired.
        """
        raw = _decode(text)
        body, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, _mac(key, body)):
            raise TicketError("ticket was not sealed with this deployment's key")
        try:
            # What a newer release says besides is ignored.
            ticket = msgspec.msgpack.decode(body, type=cls)
        except ValueError as error:
            raise TicketError(f"ticket of another form: {error}") from None
        if ticket.expires_at_s <= now_s:
            raise TicketError(f"ticket expired {now_s - ticket.expires_at_s:.1f} s ago")
        return ticket


def _mac(key: bytes, body: bytes) -> bytes:
    return hmac.digest(key, _PURPOSE + body, "sha256")[:_MAC_BYTES]


def _decode(text: str) -> bytes:
    if len(text) > MAX_SEALED_CHARS:
        raise TicketError(f"ticket has {len(text)} characters, more than {MAX_SEALED_CHARS}")
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise TicketError("ticket is not base64url text") from None
    # One ticket has one spelling: spare bits of the last character must be zero, no padding may be given.
    if base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii") != text:
        raise TicketError("ticket is not base64url text")
    return raw
