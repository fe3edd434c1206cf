"""Attributes of a transfer that its producer sends to the consumer when it opens it."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from prfaas.serving.transport.protocol.ticket import MAX_PARTS
from prfaas.serving.transport.protocol.wire import MAX_REGION_BYTES, MAX_REGIONS, TokenCount


@dataclass(frozen=True, slots=True)
class Offer:
    """The fields of an OPEN frame. A new field needs a default, which older releases mean by leaving it out."""

    ticket: Annotated[str, Meta(max_length=4096)]
    """Sealed."""
    regions: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=MAX_REGION_BYTES)], ...], Meta(max_length=MAX_REGIONS)
    ]
    """Their sizes, in bytes."""
    cached_tokens: TokenCount | None = None
    """Tokens that the producer has cached; None: unknown."""
    form: Annotated[str, Meta(max_length=4096)] = ""
    """Mark of the form in which pages travel; "": as both sides keep them."""
    part: Annotated[int, Meta(ge=0, le=MAX_PARTS)] = 0
    """Number of the transfer among those of its ticket."""
    checkpoint: TokenCount = 0
    """Tokens after which it is a checkpoint; 0: it is none."""
    resume: bool = False
    """The consumer has accepted the transfer before."""
