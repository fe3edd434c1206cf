"""One request as a stand-in sees it, and what it may be asked to do with KV of others."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from prfaas.serving.transport.ticket import Ticket, TicketError, prompt_digest

logger = logging.getLogger(__name__)

PARAMETER = "prfaas"
FROM_PARAMETER = "prfaas_from"
"""Keys of `kv_transfer_params`: the request's own transfer, and one that a prefill starts from."""


@dataclass(frozen=True, slots=True)
class Work:
    """A prompt and how many tokens to answer with. `tickets`: sealed, as they came."""

    token_ids: Sequence[int]
    max_tokens: int
    samples: int = 1
    salt: str = ""
    adapter: str = ""
    tickets: tuple[str, ...] = ()


@dataclass(slots=True)
class Roles:
    """What the tickets of a request make of this engine; `unwanted` transfers are for it but can't be used."""

    send: tuple[Ticket, str] | None = None
    load: Ticket | None = None
    unwanted: tuple[Ticket, ...] = ()

    @classmethod
    def of(cls, work: Work, name: str, key: bytes) -> "Roles":
        """Read the tickets: one that is not valid for this engine and prompt gives no role."""
        roles = cls()
        for sealed in work.tickets:
            try:
                ticket = Ticket.unseal(sealed, key, time.time())
            except TicketError as error:
                logger.warning("%s prefills locally: %s", name, error)
                continue
            ids = work.token_ids[: ticket.num_tokens]
            same = prompt_digest(ids, work.salt, work.adapter) == ticket.prompt_digest
            if ticket.producer == name and same and len(work.token_ids) == ticket.num_tokens:
                roles.send = (ticket, sealed)
            elif ticket.consumer == name and same and len(work.token_ids) > ticket.num_tokens:
                roles.load = ticket
            elif ticket.consumer == name:
                roles.unwanted += (ticket,)
            else:
                logger.warning("%s prefills locally: a ticket is for another engine or prompt", name)
        return roles
