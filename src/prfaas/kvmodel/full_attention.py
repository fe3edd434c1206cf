"""KV of layers that look at every earlier token: MHA, GQA, MQA, and MLA (one shared latent head, no V)."""

from dataclasses import dataclass, replace
from typing import overload

from prfaas.kvmodel.spans import check_span, heads_per_rank, tokens_in_blocks


@dataclass(frozen=True, slots=True)
class FullAttention:
    """`layers` layers that keep K (`head_size_k`) and V (`head_size_v`) of every token for `kv_heads` heads.

    MLA is `kv_heads=1, head_size_k=kv_lora_rank + qk_rope_head_dim, head_size_v=0`. `dtype_bytes` is 2 for
    bf16, 1 for an fp8 cache.
    """

    layers: int
    kv_heads: int
    head_size_k: int
    head_size_v: int
    dtype_bytes: int = 2

    @property
    def is_mla(self) -> bool:
        """True for one latent head per layer in place of K and V."""
        return self.head_size_v == 0

    @property
    def token_bytes(self) -> int:
        """Bytes per token, all layers together."""
        return self.layers * self.kv_heads * (self.head_size_k + self.head_size_v) * self.dtype_bytes

    @overload
    def bytes_at(self, tokens: int) -> int: ...
    @overload
    def bytes_at(self, tokens: float) -> float: ...
    def bytes_at(self, tokens: float) -> float:
        """Bytes that the cache of `tokens` tokens holds."""
        return tokens * self.token_bytes

    def bytes_to_move(self, num_tokens: int, skip_tokens: int, block_tokens: int = 1) -> int:
        """Bytes to send so that token `num_tokens` can be computed where [0, `skip_tokens`) is held already.

        Whole blocks of `block_tokens` move, so a block that is held in part moves again.
        Raises ValueError if not 0 <= skip_tokens <= num_tokens.
        """
        check_span(num_tokens, skip_tokens, block_tokens)
        return tokens_in_blocks(skip_tokens, num_tokens, block_tokens) * self.token_bytes

    def per_rank(self, tensor_parallel: int) -> "FullAttention":
        """What one of `tensor_parallel` ranks holds; MLA's one latent head is in every rank.

        Raises ValueError if the heads can't be divided.
        """
        return replace(self, kv_heads=heads_per_rank(self.kv_heads, tensor_parallel))

    def describe(self) -> str:
        """One line for people."""
        kind = f"{self.layers} full attention"
        if self.is_mla:
            return f"{kind} (latent of {self.head_size_k}), {self.token_bytes} B per token"
        sizes = f"{self.head_size_k}+{self.head_size_v}"
        return f"{kind} ({self.kv_heads} heads of {sizes}), {self.token_bytes} B per token"
