"""How long a transfer may take once its prefill has ended."""

from prfaas.deployment import Deployment
from prfaas.gateway.options import GatewayOptions
from prfaas.kvmodel import KvModel

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
        self._instances = {instance.name: instance for instance in deployment.instances}

    def fits(self, consumer: str, num_tokens: int, skip_tokens: int) -> bool:
        """Whether the KV of `num_tokens` tokens has room in the staging of `consumer` at all."""
        if self._model is None:
            return True
        nbytes = self._model.bytes_to_move(num_tokens, skip_tokens, block_tokens=_LARGEST_BLOCK_TOKENS)
        return nbytes <= self._deployment.engine.staging_bytes * self._instances[consumer].tensor_parallel

    def seconds(self, producer: str, consumer: str, num_tokens: int, skip_tokens: int) -> float:
        """Seconds after the prefill's end at which a transfer is given up."""
        grace_s = self._options.transfer_grace_s
        link = self._deployment.link(self._instances[producer].cluster, self._instances[consumer].cluster)
        if link is None or self._model is None:
            return grace_s
        bits = 8 * self._model.bytes_to_move(num_tokens, skip_tokens)
        return grace_s + _SLACK * bits / link.bandwidth_bits_per_s
