"""What a producer says of a transfer when it opens it: the attributes that travel from producer to consumer."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from prfaas.serving.transport.ticket import MAX_PARTS
from prfaas.serving.transport.wire import MAX_REGION_BYTES, MAX_REGIONS, TokenCount


@dataclass(frozen=True, slots=True)
class Offer:
    """The fields of an OPEN frame. One that is new has a default, which peers of before mean by not naming it."""

    ticket: Annotated[str, Meta(max_length=4096)]
    """Sealed."""
    regions: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=MAX_REGION_BYTES)], ...], Meta(max_length=MAX_REGIONS)
    ]
    """Their sizes, in bytes."""
    cached_tokens: TokenCount | None = None
    """That the producer need not compute; None: it does not say."""
    form: Annotated[str, Meta(max_length=4096)] = ""
    """The mark of the form in which pages travel; "": as both sides keep them."""
    part: Annotated[int, Meta(ge=0, le=MAX_PARTS)] = 0
    """Which of the ticket's transfers it is."""
    checkpoint: TokenCount = 0
    """It is a checkpoint after so many tokens; 0: it is none."""
    resume: bool = False
    """The consumer has accepted the transfer before."""
