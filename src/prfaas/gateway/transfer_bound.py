"""How long a transfer may take once its prefill has ended."""

from prfaas.deployment import Deployment
from prfaas.gateway.options import GatewayOptions
from prfaas.kvmodel import KvModel
from prfaas.scheduling import Decision
from prfaas.transport.ticket import Ticket

# Links are shared, and headers, retransmission and a link slower than stated all come on top.
_SLACK = 4.0

# Engines move whole blocks; vLLM's largest so far, so that the answer errs to the safe side.
_LARGEST_BLOCK_TOKENS = 256


class TransferBound:
    """Grace plus what the link's bandwidth explains. A stalled transfer ends earlier, by the receiver's own
    deadlines."""

    def __init__(self, deployment: Deployment, model: KvModel | None, options: GatewayOptions) -> None:
        self._deployment = deployment
        self._model = model
        self._options = options

    def fits(self, decision: Decision, num_tokens: int) -> bool:
        """Whether the KV of `num_tokens` tokens has room in the consumer's staging at all."""
        if self._model is None:
            return True
        nbytes = self._model.bytes_to_move(
            num_tokens, decision.skip_tokens, block_tokens=_LARGEST_BLOCK_TOKENS
        )
        ranks = self._deployment.instance(decision.decode).tensor_parallel
        return nbytes <= self._deployment.engine.staging_bytes * ranks

    def seconds(self, decision: Decision, ticket: Ticket) -> float:
        """Seconds after the prefill's end at which the transfer `decision` asks for is given up."""
        grace_s = self._options.transfer_grace_s
        source = self._deployment.instance(decision.prefill).cluster
        target = self._deployment.instance(decision.decode).cluster
        link = self._deployment.link(source, target)
        if link is None or self._model is None:
            return grace_s
        bits = 8 * self._model.bytes_to_move(ticket.num_tokens, ticket.skip_tokens)
        return grace_s + _SLACK * bits / link.bandwidth_bits_per_s
