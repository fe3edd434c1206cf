"""KV of a group of equal layers for a request, and how many bytes of it must move.

Three kinds: full attention (MHA, GQA, MQA, MLA) keeps every token, a window the last few or those of a chunk, and
linear attention (GDN, KDA, Mamba, Mamba2, Lightning) or a short convolution a state of fixed size.
"""

from dataclasses import dataclass, replace
from typing import TypeVar

from prfaas.core.kv.config_fields import ElementBytes

_USUAL = ElementBytes(kv=2, state=4)
_Tokens = TypeVar("_Tokens", int, float)
"""Whole numbers of them give whole numbers of bytes; a mean length does as well."""


def check_span(num_tokens: int, skip_tokens: int, block_tokens: int) -> None:
    """Refuse a transfer that can't be.

    Raises:
        ValueError: not 0 <= skip_tokens <= num_tokens, or a block of less than one token.
    """
    if not 0 <= skip_tokens <= num_tokens:
        raise ValueError(
            f"KV of tokens [{skip_tokens}, {num_tokens}) can't be moved: need 0 <= skip <= number of tokens"
        )
    if block_tokens < 1:
        raise ValueError(f"a block holds at least one token, not {block_tokens}")


def tokens_in_blocks(start: int, end: int, block_tokens: int) -> int:
    """Tokens of room in the blocks that hold positions [start, end), none if it is empty and aligned."""
    return (-(-end // block_tokens) - start // block_tokens) * block_tokens


def heads_per_rank(kv_heads: int, tensor_parallel: int) -> int:
    """KV heads of one rank: divided among the ranks, or repeated where there are fewer heads than ranks.

    Raises:
        ValueError: neither number divides the other, so the ranks would differ.
    """
    if tensor_parallel < 1:
        raise ValueError(f"tensor_parallel must be at least 1, not {tensor_parallel}")
    if kv_heads % tensor_parallel and tensor_parallel % kv_heads:
        raise ValueError(f"{kv_heads} KV heads can't be divided among {tensor_parallel} ranks")
    return max(1, kv_heads // tensor_parallel)


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """`layers` layers that keep K and V of the last `window_tokens` tokens, the present one included."""

    layers: int
    kv_heads: int
    head_size_k: int
    head_size_v: int
    window_tokens: int
    dtype_bytes: int = 2
    block_tokens: int = 0
    """Of a block, where these layers have their own; 0: the engine's."""

    @property
    def token_bytes(self) -> int:
        """Bytes per token inside the window, all layers together."""
        return self.layers * self.kv_heads * (self.head_size_k + self.head_size_v) * self.dtype_bytes

    def bytes_at(self, tokens: _Tokens) -> _Tokens:
        """Bytes of the window at a length of `tokens` tokens; constant once the window is full."""
        return self.held_tokens(tokens) * self.token_bytes

    def held_tokens(self, tokens: _Tokens) -> _Tokens:
        """Tokens that the layers keep at a length of `tokens` tokens."""
        return min(tokens, self.window_tokens)

    def bytes_to_move(self, num_tokens: int, skip_tokens: int, block_tokens: int = 1) -> int:
        """Bytes of the blocks with what token `num_tokens` sees: positions from num_tokens - window + 1 on.

        They move whatever the other side holds of the prefix, since an engine drops what leaves the window.
        Raises ValueError if not 0 <= skip_tokens <= num_tokens.
        """
        check_span(num_tokens, skip_tokens, block_tokens)
        first = max(0, num_tokens - self.window_tokens + 1)
        return tokens_in_blocks(first, num_tokens, self.block_tokens or block_tokens) * self.token_bytes

    def per_rank(self, tensor_parallel: int) -> "SlidingWindow":
        """The part of one of `tensor_parallel` ranks. ValueError if the heads can't be divided."""
        return replace(self, kv_heads=heads_per_rank(self.kv_heads, tensor_parallel))

    def on_all_ranks(self, tensor_parallel: int) -> "SlidingWindow":
        """The KV that `tensor_parallel` ranks hold together. ValueError if the heads can't be divided."""
        return replace(self, kv_heads=tensor_parallel * heads_per_rank(self.kv_heads, tensor_parallel))

    def describe(self) -> str:
        """One line for people."""
        sizes = f"{self.kv_heads} heads of {self.head_size_k}+{self.head_size_v}"
        kind = f"{self.layers} sliding window of {self.window_tokens} ({sizes})"
        return f"{kind}, {self.token_bytes} B per token in it"


@dataclass(frozen=True, slots=True)
class ChunkedWindow(SlidingWindow):
    """`layers` layers that keep K and V of one chunk: tokens [n, n + `window_tokens`), n a multiple of its size.

    It empties at every chunk's end, unlike a sliding window. vLLM 0.32: `ChunkedLocalAttentionManager` in
    v1/core/single_type_kv_cache_manager.py, whose `get_num_skipped_tokens` says which tokens are not needed.
    """

    def held_tokens(self, tokens: _Tokens) -> _Tokens:
        """Tokens of the chunk that the last of `tokens` tokens is in."""
        return tokens - (-(-tokens // self.window_tokens) - 1) * self.window_tokens if tokens > 0 else 0

    def bytes_to_move(self, num_tokens: int, skip_tokens: int, block_tokens: int = 1) -> int:
        """Bytes of the blocks with what token `num_tokens` sees of its chunk, none if it begins one.

        They move whatever the other side holds of the prefix.
        Raises ValueError if not 0 <= skip_tokens <= num_tokens.
        """
        check_span(num_tokens, skip_tokens, block_tokens)
        first = num_tokens // self.window_tokens * self.window_tokens
        return (
            tokens_in_blocks(first, num_tokens, block_tokens) * self.token_bytes if first < num_tokens else 0
        )

    def describe(self) -> str:
        """One line for people."""
        sizes = f"{self.kv_heads} heads of {self.head_size_k}+{self.head_size_v}"
        return f"{self.layers} chunks of {self.window_tokens} ({sizes}), {self.token_bytes} B per token in it"


@dataclass(frozen=True, slots=True)
class LinearState:
    """`layers` layers with `conv_bytes` (last inputs of the convolution) and `recurrent_bytes` each.

    `heads` own the recurrent state and are what tensor parallelism divides. `grouped_conv_bytes` of `conv_bytes`
    belong to `conv_groups` groups (key heads) that several heads share. Without them `per_rank` is not known, but where
    the state `is_whole`: every rank has all of it.
    """

    layers: int
    conv_bytes: int
    recurrent_bytes: int
    kind: str = ""
    heads: int = 0
    conv_groups: int = 0
    grouped_conv_bytes: int = 0
    groups_replicate: bool = False
    is_whole: bool = False

    @classmethod
    def gated_delta_net(
        cls,
        layers: int,
        *,
        key_heads: int,
        value_heads: int,
        key_head_size: int,
        value_head_size: int,
        conv_kernel: int,
        size: ElementBytes = _USUAL,
        kind: str = "GDN",
    ) -> "LinearState":
        """From the shape: conv (kernel - 1) × (2·keys + values), state value_heads × value_size × key_size.

        Shapes as in vLLM 0.32 `MambaStateShapeCalculator.gated_delta_net_state_shape`, without speculation.
        """
        column_bytes = (conv_kernel - 1) * size.conv
        keys = 2 * key_heads * key_head_size
        return cls(
            layers=layers,
            conv_bytes=(keys + value_heads * value_head_size) * column_bytes,
            recurrent_bytes=value_heads * value_head_size * key_head_size * size.state,
            kind=kind,
            heads=value_heads,
            conv_groups=key_heads,
            grouped_conv_bytes=keys * column_bytes,
        )

    @classmethod
    def kimi_delta_attention(
        cls,
        layers: int,
        *,
        heads: int,
        head_size: int,
        conv_kernel: int,
        size: ElementBytes = _USUAL,
    ) -> "LinearState":
        """From the shape: conv (kernel - 1) × 3·heads·size, state heads × size × size.

        Shapes as in vLLM 0.32 `MambaStateShapeCalculator.kda_state_shape`, without speculation.
        """
        return cls.gated_delta_net(
            layers,
            key_heads=heads,
            value_heads=heads,
            key_head_size=head_size,
            value_head_size=head_size,
            conv_kernel=conv_kernel,
            size=size,
            kind="KDA",
        )

    @classmethod
    def mamba2(
        cls,
        layers: int,
        *,
        heads: int,
        head_size: int,
        groups: int,
        state_size: int,
        conv_kernel: int,
        size: ElementBytes = _USUAL,
    ) -> "LinearState":
        """From the shape: conv (kernel - 1) × (heads·size + 2·groups·state), state heads × size × state.

        Shapes as in vLLM 0.32 `MambaStateShapeCalculator.mamba2_state_shape`, without speculation.
        """
        column_bytes = (conv_kernel - 1) * size.conv
        grouped = 2 * groups * state_size
        return cls(
            layers=layers,
            conv_bytes=(heads * head_size + grouped) * column_bytes,
            recurrent_bytes=heads * head_size * state_size * size.state,
            kind="Mamba2",
            heads=heads,
            conv_groups=groups,
            grouped_conv_bytes=grouped * column_bytes,
            groups_replicate=True,
        )

    @classmethod
    def mamba1(
        cls,
        layers: int,
        *,
        channels: int,
        state_size: int,
        conv_kernel: int,
        size: ElementBytes = _USUAL,
    ) -> "LinearState":
        """From the shape: conv (kernel - 1) × channels, state channels × state.

        Shapes as in vLLM 0.32 `MambaStateShapeCalculator.mamba1_state_shape`; ranks divide the channels.
        """
        return cls(
            layers=layers,
            conv_bytes=(conv_kernel - 1) * channels * size.conv,
            recurrent_bytes=channels * state_size * size.state,
            kind="Mamba",
            heads=channels,
        )

    @classmethod
    def short_conv(
        cls, layers: int, *, channels: int, conv_kernel: int, size: ElementBytes = _USUAL
    ) -> "LinearState":
        """From the shape: conv (kernel - 1) × channels, no recurrent state.

        Shape as in vLLM 0.32 `MambaStateShapeCalculator.short_conv_state_shape`; ranks divide the channels.
        """
        conv_bytes = (conv_kernel - 1) * channels * size.conv
        return cls(layers, conv_bytes, 0, kind="ShortConv", heads=channels)

    @classmethod
    def lightning(
        cls, layers: int, *, heads: int, head_size: int, size: ElementBytes = _USUAL
    ) -> "LinearState":
        """From the shape: no convolution, state heads × size × size.

        Shape as in vLLM 0.32 `MambaStateShapeCalculator.linear_attention_state_shape`.
        """
        recurrent = heads * head_size * head_size * size.state
        return cls(layers, 0, recurrent, kind="Lightning", heads=heads)

    @classmethod
    def ring(cls, layers: int, *, nbytes: int) -> "LinearState":
        """What is still to be compressed into an entry, in a block that a request keeps from its first token on.

        vLLM 0.32 `CircularBufferSpec`; every rank has all of it.
        """
        return cls(layers, nbytes, 0, kind="ring", is_whole=True)

    @property
    def state_bytes(self) -> int:
        """Bytes of one layer's state."""
        return self.conv_bytes + self.recurrent_bytes

    def bytes_at(self, tokens: _Tokens) -> _Tokens:
        """Bytes of all layers' state, at any length but 0."""
        return self.layers * self.state_bytes if tokens > 0 else 0

    def bytes_to_move(self, num_tokens: int, skip_tokens: int, block_tokens: int = 1) -> int:
        """Bytes of the state after `num_tokens` tokens: it moves once, whole, whatever the other side holds.

        Raises ValueError if not 0 <= skip_tokens <= num_tokens.
        """
        check_span(num_tokens, skip_tokens, block_tokens)
        return self.bytes_at(num_tokens)

    def per_rank(self, tensor_parallel: int) -> "LinearState":
        """The part of one of `tensor_parallel` ranks: its heads' state, and the groups that those heads use.

        Raises:
            ValueError: the heads can't be divided among the ranks.
        """
        if tensor_parallel == 1 or self.is_whole:
            return self
        if self.heads == 0 or self.heads % tensor_parallel:
            raise ValueError(
                f"{self.heads or 'an unknown number of'} {self.kind or 'linear state'} heads can't be divided among "
                f"{tensor_parallel} ranks"
            )
        groups = self.conv_groups // tensor_parallel
        if self.conv_groups % tensor_parallel:
            if not self.groups_replicate or tensor_parallel % self.conv_groups:
                raise ValueError(
                    f"{self.conv_groups} {self.kind} key heads can't be divided among {tensor_parallel} ranks"
                )
            groups = 1
        grouped = self.grouped_conv_bytes // self.conv_groups * groups if self.conv_groups else 0
        return replace(
            self,
            conv_bytes=(self.conv_bytes - self.grouped_conv_bytes) // tensor_parallel + grouped,
            recurrent_bytes=self.recurrent_bytes // tensor_parallel,
            heads=self.heads // tensor_parallel,
            conv_groups=groups,
            grouped_conv_bytes=grouped,
        )

    def on_all_ranks(self, tensor_parallel: int) -> "LinearState":
        """The KV that `tensor_parallel` ranks hold together: too few groups are copied. ValueError as `per_rank`."""
        rank = self.per_rank(tensor_parallel)
        return replace(self, conv_bytes=tensor_parallel * rank.conv_bytes)

    def describe(self) -> str:
        """One line for people."""
        kind = f"{self.kind} linear state" if self.kind else "linear state"
        return f"{self.layers} {kind}, {self.state_bytes} B each at any length"


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

    def bytes_at(self, tokens: _Tokens) -> _Tokens:
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
        """The part of one of `tensor_parallel` ranks; MLA's one latent head is in every rank.

        Raises ValueError if the heads can't be divided.
        """
        return replace(self, kv_heads=heads_per_rank(self.kv_heads, tensor_parallel))

    def on_all_ranks(self, tensor_parallel: int) -> "FullAttention":
        """The KV that `tensor_parallel` ranks hold, a head or latent each at least. ValueError as `per_rank`."""
        return replace(self, kv_heads=tensor_parallel * heads_per_rank(self.kv_heads, tensor_parallel))

    def describe(self) -> str:
        """One line for people."""
        kind = f"{self.layers} full attention"
        if self.is_mla:
            return f"{kind} (latent of {self.head_size_k}), {self.token_bytes} B per token"
        sizes = f"{self.head_size_k}+{self.head_size_v}"
        return f"{kind} ({self.kv_heads} heads of {sizes}), {self.token_bytes} B per token"


@dataclass(frozen=True, slots=True)
class CompressedAttention(FullAttention):
    """`layers` layers that keep an entry for several tokens each, in pages of `page_tokens` tokens that move whole.

    `head_size_k` are the bytes of a page with all that fills it up; every rank has it. vLLM 0.32: `MLAAttentionSpec`
    with `tokens_per_state` and `alignment`. Attention of which an engine tells the pages alone counts like that too.
    """

    dtype_bytes: int = 1
    page_tokens: int = 256

    @property
    def _page_bytes(self) -> int:
        return self.layers * self.kv_heads * self.head_size_k

    @property
    def token_bytes(self) -> int:
        """Bytes per token, all layers together, rounded up."""
        return -(-self._page_bytes // self.page_tokens)

    def bytes_to_move(self, num_tokens: int, skip_tokens: int, block_tokens: int = 1) -> int:
        """As that of full attention, in blocks of a page at least."""
        check_span(num_tokens, skip_tokens, block_tokens)
        tokens = tokens_in_blocks(skip_tokens, num_tokens, max(block_tokens, self.page_tokens))
        return -(-tokens * self._page_bytes // self.page_tokens)

    def describe(self) -> str:
        """One line for people."""
        page = f"{self.head_size_k} B per {self.page_tokens} tokens"
        return f"{self.layers} compressed attention ({page}), {self.token_bytes} B per token"
