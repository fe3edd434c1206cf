"""The check of an OPEN: its ticket, the names in it, and the regions that both sides expect."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from prfaas.serving.transport.incoming import IncomingTransfer, ProducerSession
from prfaas.serving.transport.options import ReceiverOptions
from prfaas.serving.transport.region_layout import TransferLayout, expected_regions
from prfaas.serving.transport.ticket import (
    MAX_PARTS,
    MAX_TOKENS,
    Ticket,
    TicketError,
    checkpoint_id,
    part_id,
)
from prfaas.serving.transport.wire import (
    MAX_REGION_BYTES,
    MAX_REGIONS,
    WireError,
    cached_tokens_of,
    count_field,
    text_field,
)


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
        ticket = Ticket.unseal(text_field(body, "ticket"), self.key, time.time())
        part = count_field({"part": 0, **body}, "part", MAX_PARTS)
        whole_id = part_id(ticket.transfer_id, part)
        checkpoint_tokens = count_field({"checkpoint": 0, **body}, "checkpoint", MAX_TOKENS)
        if checkpoint_id(whole_id, checkpoint_tokens) != transfer_id:
            raise TicketError("ticket belongs to another transfer")
        if not _is_rank_of(self.name, ticket.consumer):
            raise TicketError(f"ticket names consumer {ticket.consumer}, this is {self.name}")
        if not _is_rank_of(session.name, ticket.producer):
            raise TicketError(f"ticket names producer {ticket.producer}, the peer is {session.name}")
        theirs = body.get("regions")
        if not isinstance(theirs, list) or not all(type(nbytes) is int for nbytes in theirs):
            raise WireError("field 'regions' must be a list of sizes in bytes")
        form = body.get("form", "")
        ours = expected_regions(self.layout, ticket, theirs, session.name, form, part, checkpoint_tokens)
        if len(ours) > MAX_REGIONS or not all(0 <= nbytes <= MAX_REGION_BYTES for nbytes in ours):
            raise WireError("this side's own regions are out of bounds")
        _raise_if_different(ours, theirs, self.name, session.name)
        if checkpoint_tokens:
            ticket = replace(ticket, num_tokens=checkpoint_tokens, skip_tokens=0)
        return IncomingTransfer(
            *(replace(ticket, transfer_id=transfer_id), ours, session, time.monotonic()),
            uncounted_regions=self.options.uncounted_regions,
            cached_tokens=cached_tokens_of(body),
            checkpoint_of=whole_id if checkpoint_tokens else None,
        )


def _is_rank_of(name: str, instance: str) -> bool:
    """Whether `name` is `instance` itself or one of its ranks ("pd-0/1" of "pd-0")."""
    return name == instance or name.rpartition("/")[0] == instance


def _raise_if_different(ours: tuple[int, ...], theirs: list[int], name: str, peer: str) -> None:
    if len(ours) != len(theirs):
        raise WireError(f"{peer} announced {len(theirs)} regions, {name} expects {len(ours)}")
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if mine != other:
            raise WireError(f"{peer} announced {other} bytes in region {index}, {name} expects {mine}")
