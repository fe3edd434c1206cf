"""How a prefill elsewhere fails, whom that blames, and what may be left of it."""

from dataclasses import dataclass

from prfaas.serving.gateway.bodies import Json
from prfaas.serving.gateway.engine_client import FROZEN, OWN_RESOURCES, EngineCallError
from prfaas.serving.gateway.kv_transfer import DROPPED, KvTransfers, StartedTransfer, TransferFailedError
from prfaas.serving.transport.ticket import KEPT_PARAMETER, Ticket

PREEMPTED = "preempted"
"""The reason of a prefill that its instance could not have ended before it is taken away."""
INCOMPATIBLE = "incompatible"
LINK_SILENT = "link-silent"
LINK_SLOW = "link-slow"
CONSUMER_FROZEN = "consumer-frozen"
CONSUMER_SILENT = "consumer-silent"
# The control plane knows of a frozen engine, and finds out by itself whether an unreachable one lives. Two that are
# incompatible are well, each of them. So are the two of a transfer whose prefix the consumer has evicted meanwhile.
# A transfer between clusters that is late has moved all the time: one that stands still is ended by its receiver, and
# that blames the producer.
BLAMES_NOBODY = (
    *(FROZEN, INCOMPATIBLE, PREEMPTED, DROPPED, LINK_SILENT, LINK_SLOW),
    *(CONSUMER_FROZEN, "consumer-unreachable"),
)
HOPELESS = (CONSUMER_FROZEN, CONSUMER_SILENT, "consumer-unreachable")
# Of the producer or its path to the consumer: what has arrived there is as good as ever.
_LEAVES_PART = ("transfer-failed", "transfer-deadline", "not-announced", PREEMPTED, LINK_SILENT, LINK_SLOW)


@dataclass(frozen=True, slots=True)
class KeptPart(StartedTransfer):
    """What has come of a transfer that broke: its staging is kept for the decode request."""

    usable_tokens: int
    """The decode engine can go on after so many tokens of the prompt, more than the ticket leaves out."""

    def params(self) -> Json:
        return {**StartedTransfer.params(self), KEPT_PARAMETER: self.usable_tokens}


class HopFailedError(Exception):
    """A prefill elsewhere, or its transfer, failed. Nothing of it is left in any staging but what was kept."""

    def __init__(self, reason: str, *, hopeless: bool) -> None:
        """`reason`: one word. `hopeless`: another producer would fail as well."""
        super().__init__(reason)
        self.reason = reason
        self.hopeless = hopeless
        self.kept: KeptPart | None = None
        """Whoever does not use it must have it freed."""

    def keeping(self, kept: KeptPart | None) -> "HopFailedError":
        """The same failure, of which something is left."""
        self.kept = kept
        return self


async def kept_part(
    transfers: KvTransfers,
    ticket: Ticket,
    sealed: str,
    failure: EngineCallError | TransferFailedError,
    timeout_s: float,
) -> KeptPart | None:
    """What has come of a transfer whose producer, or its path, has failed; None: nothing that is of use."""
    if isinstance(failure, EngineCallError):
        leaves_part = not failure.is_clients_fault and failure.reason not in (FROZEN, OWN_RESOURCES)
    else:
        leaves_part = failure.reason in _LEAVES_PART
    if not leaves_part:
        return None
    tokens = await transfers.keep(ticket, str(failure), timeout_s)
    return KeptPart(ticket, sealed, 0, tokens) if tokens > ticket.skip_tokens else None
