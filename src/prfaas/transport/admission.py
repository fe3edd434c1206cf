"""Whether an OPEN may become a transfer: the ticket, the names in it, and the regions both sides expect."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from prfaas.transport.ticket import Ticket, TicketError
from prfaas.transport.wire import MAX_REGION_BYTES, MAX_REGIONS, WireError, text_field


class RegionLayout(Protocol):
    """The consumer's own idea of what a transfer consists of."""

    def region_bytes(self, num_tokens: int, skip_tokens: int) -> Sequence[int]:
        """Sizes in bytes of the regions of one transfer; ValueError if the numbers are absurd."""


def check_open(
    body: Mapping[str, Any],
    *,
    transfer_id: bytes,
    name: str,
    producer: str,
    key: bytes,
    layout: RegionLayout,
) -> tuple[Ticket, tuple[int, ...]]:
    """The ticket of an OPEN and the region sizes in bytes; ValueError with the sentence to refuse it with.

    `name` is this side's, `producer` the authenticated peer's.
    """
    ticket = Ticket.unseal(text_field(body, "ticket"), key, time.time())
    if ticket.transfer_id != transfer_id:
        raise TicketError("ticket belongs to another transfer")
    if not _is_rank_of(name, ticket.consumer):
        raise TicketError(f"ticket names consumer {ticket.consumer}, this is {name}")
    if not _is_rank_of(producer, ticket.producer):
        raise TicketError(f"ticket names producer {ticket.producer}, the peer is {producer}")
    ours = tuple(layout.region_bytes(ticket.num_tokens, ticket.skip_tokens))
    if len(ours) > MAX_REGIONS or not all(0 <= nbytes <= MAX_REGION_BYTES for nbytes in ours):
        raise WireError("this side's own regions are out of bounds")
    theirs = body.get("regions")
    if not isinstance(theirs, list) or not all(type(nbytes) is int for nbytes in theirs):
        raise WireError("field 'regions' must be a list of sizes in bytes")
    _raise_if_different(ours, theirs, name, producer)
    return ticket, ours


def _is_rank_of(name: str, instance: str) -> bool:
    """Whether `name` is `instance` itself or one of its ranks ("pd-0/1" of "pd-0")."""
    return name == instance or name.rpartition("/")[0] == instance


def _raise_if_different(ours: tuple[int, ...], theirs: list[int], name: str, peer: str) -> None:
    if len(ours) != len(theirs):
        raise WireError(f"{peer} announced {len(theirs)} regions, {name} expects {len(ours)}")
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if mine != other:
            raise WireError(f"{peer} announced {other} bytes in region {index}, {name} expects {mine}")
