"""How fast an instance should be by its peaks: for a model on a GPU that nobody has measured together.

A step takes as long as the slower of its arithmetic and its reading, each at a share of the GPU's peak, and besides
what every layer and every request costs. The shares and costs are one set for all models and GPUs. They are fitted to
public measurements (`docs/explanation/estimates.md`), which also say how far off it is.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

import msgspec

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
class Gpu:
    """One GPU with dense matrices: no number counts zeros that a sparse kernel leaves out."""

    name: str
    bf16_flops_per_s: float
    fp8_flops_per_s: float | None
    """None: it has no fp8 matrix units, and computes fp8 weights in bf16."""
    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """To its neighbours in the machine, one direction."""
    source: str
    fp4_flops_per_s: float | None = None
    per_machine: int = 8
    """GPUs that are linked so fast with each other."""
    matrix_share: float = _MATRIX_SHARE
    attention_share: float = _ATTENTION_SHARE
    """Of the printed peak in prefills: all GPUs' shares, where its own are not known."""

    def flops_per_s(self, compute: str) -> float:
        """Peak for operands of "bf16", "fp8" or "fp4"; where it has no such units, that of the next wider ones."""
        wider = {
            "fp4": (self.fp4_flops_per_s, self.fp8_flops_per_s),
            "fp8": (self.fp8_flops_per_s,),
        }.get(compute, ())
        return next((peak for peak in wider if peak is not None), self.bf16_flops_per_s)


@cache
def _gpus() -> Mapping[str, Gpu]:
    text = (resources.files(__package__) / "data" / "gpus.json").read_bytes()
    return {each.name: each for each in msgspec.json.decode(text, type=tuple[Gpu, ...])}


def gpu_names() -> tuple[str, ...]:
    """Of all GPUs that are known."""
    return tuple(_gpus())


def gpu(name: str) -> Gpu:
    """The GPU of this name, in any case.

    Raises:
        ProfileError: it is not known.
    """
    known = _gpus()
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(known)}"
        raise ProfileError(f'there is no GPU "{name}"; {hint}')
    return known[name.lower()]


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
        computing_s = matrices / (self.ranks * peak * self.gpu.matrix_share) + attention / (
            self.ranks * self.gpu.bf16_flops_per_s * self.gpu.attention_share
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
