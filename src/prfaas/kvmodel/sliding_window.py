"""KV of layers that look only at the last few tokens."""

from dataclasses import dataclass, replace
from typing import overload

from prfaas.kvmodel.spans import check_span, heads_per_rank, tokens_in_blocks


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """`layers` layers that keep K and V of the last `window_tokens` tokens, the present one included."""

    layers: int
    kv_heads: int
    head_size_k: int
    head_size_v: int
    window_tokens: int
    dtype_bytes: int = 2

    @property
    def token_bytes(self) -> int:
        """Bytes per token inside the window, all layers together."""
        return self.layers * self.kv_heads * (self.head_size_k + self.head_size_v) * self.dtype_bytes

    @overload
    def bytes_at(self, tokens: int) -> int: ...
    @overload
    def bytes_at(self, tokens: float) -> float: ...
    def bytes_at(self, tokens: float) -> float:
        """Bytes of the window at a length of `tokens` tokens; constant once the window is full."""
        return min(tokens, self.window_tokens) * self.token_bytes

    def bytes_to_move(self, num_tokens: int, skip_tokens: int, block_tokens: int = 1) -> int:
        """Bytes of the blocks with what token `num_tokens` sees: positions from num_tokens - window + 1 on.

        They move whatever the other side holds of the prefix, since an engine drops what leaves the window.
        Raises ValueError if not 0 <= skip_tokens <= num_tokens.
        """
        check_span(num_tokens, skip_tokens, block_tokens)
        first = max(0, num_tokens - self.window_tokens + 1)
        return tokens_in_blocks(first, num_tokens, block_tokens) * self.token_bytes

    def per_rank(self, tensor_parallel: int) -> "SlidingWindow":
        """What one of `tensor_parallel` ranks holds. ValueError if the heads can't be divided."""
        return replace(self, kv_heads=heads_per_rank(self.kv_heads, tensor_parallel))

    def describe(self) -> str:
        """One line for people."""
        sizes = f"{self.kv_heads} heads of {self.head_size_k}+{self.head_size_v}"
        kind = f"{self.layers} sliding window of {self.window_tokens} ({sizes})"
        return f"{kind}, {self.token_bytes} B per token in it"
