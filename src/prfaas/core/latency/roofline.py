"""How fast an instance should be by its peaks: for a model on a GPU that nobody has measured together.

A step takes as long as the slower of its arithmetic and its reading, each at a share of the GPU's peak, and besides
what every layer and every request costs. The shares and costs are one set for all models and GPUs. They are fitted to
public measurements (`docs/explanation/estimates.md`), which also say how far off it is.
"""

from dataclasses import dataclass

from prfaas.core.latency.gpus import Gpu
from prfaas.core.latency.profile import ProfileError
from prfaas.core.latency.work import ModelWork

# Shares of the printed peaks, and what does not shrink with a faster GPU.
_MATRIX_SHARE = 0.27
_ATTENTION_SHARE = 0.4
_MEMORY_SHARE = 0.62
_LAYER_S = 85e-6
REQUEST_S = 0.06
"""Of every prompt, whatever its length: HTTP, tokenizer, scheduler, sampling."""

# Of all that is in an all-reduce over n ranks, each sends and receives 2 (n - 1) / n; two of them in a layer.
_REDUCTIONS_PER_LAYER = 2
_ACTIVATION_BYTES = 2

# What is left of a GPU's memory for weights and KVCache beside activations and graphs, vLLM's default.
_USABLE_MEMORY = 0.9

PREFILL_BAND = (0.55, 1.6)
DECODE_BAND = (0.7, 1.35)
"""Measured over estimated times: 8 of 10 public measurements are between these (`docs/explanation/estimates.md`)."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """One instance of `ranks` GPUs that share every layer of a model (tensor parallelism).

    Raises:
        ProfileError: the model does not fit, or its heads can't be divided among so many ranks.
    """

    work: ModelWork
    gpu: Gpu
    ranks: int

    def __post_init__(self) -> None:
        try:
            self.work.kv.per_rank(self.ranks)
        except ValueError as error:
            raise ProfileError(f"{self.work.name} on {self.ranks} GPUs: {error}") from None
        needed, there = self.work.weight_bytes / self.ranks, _USABLE_MEMORY * self.gpu.memory_bytes
        if needed >= there:
            raise ProfileError(
                f"{self.work.name} ({self.work.weights.name} weights) needs {needed / 1e9:.0f} GB on each of "
                f"{self.ranks} {self.gpu.name}, which have {there / 1e9:.0f} GB for it; give more "
                "GPUs or smaller weights"
            )

    def prefill_s(self, tokens: float) -> float:
        """Seconds until the first token of a prompt of `tokens` tokens on an idle instance."""
        matrices, attention = self.work.prefill_flops(tokens)
        peak = self.gpu.flops_per_s(self.work.weights.compute)
        computing_s = matrices / (self.ranks * peak * _MATRIX_SHARE) + attention / (
            self.ranks * self.gpu.bf16_flops_per_s * _ATTENTION_SHARE
        )
        reading_s = self._reading_s(self.work.read_bytes(tokens) / self.ranks)
        return REQUEST_S + self._layers_s + max(computing_s, reading_s) + self._exchange_s(tokens)

    def decode_step_s(self, batch: float, context_tokens: float) -> float:
        """Seconds of one step of `batch` requests with `context_tokens` tokens each."""
        own = self.work.kv.per_rank(self.ranks)
        # A recurrent state is written back, too.
        cache_bytes = batch * (own.kv_bytes(context_tokens) + own.fixed_bytes)
        reading_s = self._reading_s(self.work.read_bytes(batch) / self.ranks + cache_bytes)
        peak = self.gpu.flops_per_s(self.work.weights.compute)
        computing_s = 2 * self.work.active_params * batch / (self.ranks * peak * _MATRIX_SHARE)
        return self._layers_s + max(computing_s, reading_s) + self._exchange_s(batch)

    def max_batch(self, context_tokens: float) -> int:
        """Requests of `context_tokens` tokens whose KVCache is in memory at once."""
        left = _USABLE_MEMORY * self.gpu.memory_bytes - self.work.weight_bytes / self.ranks
        return int(left / self.work.kv.per_rank(self.ranks).kv_bytes(context_tokens))

    @property
    def _layers_s(self) -> float:
        return self.work.layers * _LAYER_S

    def _reading_s(self, num_bytes: float) -> float:
        return num_bytes / (self.gpu.memory_bytes_per_s * _MEMORY_SHARE)

    def _exchange_s(self, tokens: float) -> float:
        passed = _REDUCTIONS_PER_LAYER * self.work.layers * tokens * self.work.hidden_size * _ACTIVATION_BYTES
        return passed * 2 * (self.ranks - 1) / self.ranks / self.gpu.link_bytes_per_s
