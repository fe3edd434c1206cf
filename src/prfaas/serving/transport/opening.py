"""The check of an OPEN: its ticket, the names in it, and the regions that both sides expect."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from prfaas.serving.transport.incoming import IncomingTransfer, ProducerSession
from prfaas.serving.transport.offer import Offer
from prfaas.serving.transport.options import ReceiverOptions
from prfaas.serving.transport.region_layout import TransferLayout, expected_regions
from prfaas.serving.transport.ticket import Ticket, TicketError, checkpoint_id, part_id
from prfaas.serving.transport.wire import MAX_REGION_BYTES, MAX_REGIONS, WireError, read_body


@dataclass(frozen=True, slots=True)
class OpenCheck:
    """What a consumer holds an OPEN against."""

    name: str
    """The consumer's."""
    key: bytes
    """Of the deployment, 32 bytes."""
    layout: TransferLayout
    """Gives the regions that the consumer expects."""
    options: ReceiverOptions

    def transfer(
        self, session: ProducerSession, transfer_id: bytes, body: Mapping[str, Any]
    ) -> IncomingTransfer:
        """The transfer that a producer opens, if its ticket allows it.

        Raises:
            ValueError: with the sentence to refuse the OPEN with.
        """
        offer = read_body(Offer, body)
        ticket = Ticket.unseal(offer.ticket, self.key, time.time())
        whole_id = part_id(ticket.transfer_id, offer.part)
        if checkpoint_id(whole_id, offer.checkpoint) != transfer_id:
            raise TicketError("ticket belongs to another transfer")
        if not _is_rank_of(self.name, ticket.consumer):
            raise TicketError(f"ticket names consumer {ticket.consumer}, this is {self.name}")
        if not _is_rank_of(session.name, ticket.producer):
            raise TicketError(f"ticket names producer {ticket.producer}, the peer is {session.name}")
        ours = expected_regions(self.layout, ticket, offer, session.name)
        if len(ours) > MAX_REGIONS or not all(0 <= nbytes <= MAX_REGION_BYTES for nbytes in ours):
            raise WireError("this side's own regions are out of bounds")
        _raise_if_different(ours, offer.regions, self.name, session.name)
        if offer.checkpoint:
            ticket = replace(ticket, num_tokens=offer.checkpoint, skip_tokens=0)
        return IncomingTransfer(
            *(replace(ticket, transfer_id=transfer_id), ours, session, time.monotonic()),
            uncounted_regions=self.options.uncounted_regions,
            cached_tokens=offer.cached_tokens,
            checkpoint_of=whole_id if offer.checkpoint else None,
        )


def _is_rank_of(name: str, instance: str) -> bool:
    """Whether `name` is `instance` itself or one of its ranks ("pd-0/1" of "pd-0")."""
    return name == instance or name.rpartition("/")[0] == instance


def _raise_if_different(ours: tuple[int, ...], theirs: tuple[int, ...], name: str, peer: str) -> None:
    if len(ours) != len(theirs):
        raise WireError(f"{peer} announced {len(theirs)} regions, {name} expects {len(ours)}")
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if mine != other:
            raise WireError(f"{peer} announced {other} bytes in region {index}, {name} expects {mine}")
