"""A model as the KVCache sees it: groups of layers of one kind each."""

from dataclasses import dataclass, replace
from typing import overload

from prfaas.core.arrays import NDArray, np
from prfaas.core.kv.layers import ChunkedWindow, FullAttention, LinearState, SlidingWindow

Group = FullAttention | SlidingWindow | LinearState

# Long enough for windows to be full and states to matter little.
_COMPARED_TOKENS = 32768


@dataclass(frozen=True, slots=True)
class KvModel:
    """The KVCache of one request by groups of layers; on one rank, unless it comes from `per_rank`."""

    name: str
    groups: tuple[Group, ...]
    """Of its own layers, then of those of what drafts tokens for it."""
    drafter: str = ""
    """Which one that is: only between engines that have the same does its part cross. "": none has a KVCache."""
    drafter_groups: int = 0
    """How many of `groups`, the last ones, are the drafter's."""

    @property
    def own_groups(self) -> tuple[Group, ...]:
        """Those of the model without a drafter's."""
        return self.groups[: len(self.groups) - self.drafter_groups]

    def without_drafter(self) -> "KvModel":
        """What an engine keeps that drafts nothing."""
        return replace(self, groups=self.own_groups, drafter="", drafter_groups=0)

    @property
    def is_hybrid(self) -> bool:
        """True if some layers keep a window or a state in place of every token."""
        return any(not isinstance(group, FullAttention) for group in self.groups)

    @property
    def has_linear_state(self) -> bool:
        """True if some layers keep a recurrent state."""
        return any(isinstance(group, LinearState) for group in self.groups)

    @property
    def has_window(self) -> bool:
        """True if some layers see a window or a chunk only."""
        return any(isinstance(group, SlidingWindow) for group in self.groups)

    @property
    def token_bytes(self) -> int:
        """Bytes by which the cache grows with every token, once all windows are full."""
        return sum(group.token_bytes for group in self.groups if isinstance(group, FullAttention))

    @property
    def layers(self) -> int:
        """Caches of all layers. Those without one (MLP, experts) don't count, those with two (Falcon-H1) do twice."""
        return sum(group.layers for group in self.groups)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of linear state, the same at any length but 0."""
        return sum(group.bytes_at(1) for group in self.groups if isinstance(group, LinearState))

    @property
    def window_bytes(self) -> int:
        """Bytes of all sliding windows once they are full."""
        return sum(
            group.bytes_at(group.window_tokens) for group in self.groups if isinstance(group, SlidingWindow)
        )

    def compared_bytes(self) -> int:
        """Bytes by which the same layers in two dtypes, or on more ranks, are compared: those of a long prompt."""
        return self.kv_bytes(_COMPARED_TOKENS)

    @overload
    def kv_bytes(self, tokens: int) -> int: ...
    @overload
    def kv_bytes(self, tokens: float) -> float: ...
    @overload
    def kv_bytes(self, tokens: "NDArray[np.float64]") -> "NDArray[np.float64]": ...
    def kv_bytes(self, tokens: "float | NDArray[np.float64]") -> "float | NDArray[np.float64]":
        """Bytes of a request's KVCache at a length of `tokens` tokens: S(l) of the paper's section 2.

        `tokens` may be a mean length; an array gives an array of its shape.
        """
        if isinstance(tokens, int | float):
            return sum(group.bytes_at(tokens) for group in self.groups)
        lengths = np.asarray(tokens, dtype=np.float64)
        total: NDArray[np.float64] = lengths * self.token_bytes + np.where(lengths > 0, self.fixed_bytes, 0)
        for group in self.groups:
            if isinstance(group, SlidingWindow):
                window = group.window_tokens
                held = (
                    lengths - np.maximum(np.ceil(lengths / window) - 1, 0) * window
                    if isinstance(group, ChunkedWindow)
                    else np.minimum(lengths, window)
                )
                total = total + held * group.token_bytes
        return total

    def bytes_to_move(self, num_tokens: int, skip_tokens: int = 0, block_tokens: int = 1) -> int:
        """Bytes to send so that token `num_tokens` can be computed where [0, `skip_tokens`) is held already.

        Exact with `block_tokens=1`; an engine with blocks of B tokens moves whole blocks.
        Raises ValueError if not 0 <= skip_tokens <= num_tokens.
        """
        return sum(group.bytes_to_move(num_tokens, skip_tokens, block_tokens) for group in self.groups)

    def per_rank(self, tensor_parallel: int) -> "KvModel":
        """The part of one of `tensor_parallel` ranks, where `self` is the model on one rank.

        Raises:
            ValueError: some layers' heads can't be divided among so many ranks.
        """
        return replace(self, groups=tuple(group.per_rank(tensor_parallel) for group in self.groups))

    @property
    def full_heads(self) -> int:
        """KV heads of its own full attention; 0 if its layers have unlike numbers, or all of them latents."""
        found = {each.kv_heads for each in self.own_groups if type(each) is FullAttention and not each.is_mla}
        return found.pop() if len(found) == 1 else 0

    def on_all_ranks(self, tensor_parallel: int) -> "KvModel":
        """The KVCache that `tensor_parallel` ranks hold together: too few heads are copied.

        Qwen3-Next has 2 KV heads, so 4 ranks keep each twice; MLA has one latent, which every rank keeps.

        Raises:
            ValueError: as `per_rank`.
        """
        return replace(self, groups=tuple(group.on_all_ranks(tensor_parallel) for group in self.groups))

    def describe(self) -> str:
        """One line for people."""
        kept = [group.describe() for group in self.groups]
        drafted = [f"drafts: {each}" for each in kept[len(self.own_groups) :]]
        return f"{self.name}: " + "; ".join([*kept[: len(self.own_groups)], *drafted])


def model_on_wire(sent: KvModel, kept: KvModel, consumer_ranks: int) -> KvModel:
    """The part of a request's KVCache that crosses from one engine to another: all counts of such bytes use it.

    Full attention crosses once, whatever ranks keep alike: the producer's take turns to send it, and the consumer's
    read what one of them was sent. Windows, states, and full attention of layers with unlike numbers of heads are sent
    to each of the consumer's ranks that keeps them; so is a drafter's, but for latents. Between unlike dtypes the
    narrower one crosses, and between unlike drafters nothing of theirs.

    Args:
        sent: the model on one rank, as the producer keeps it.
        kept: the same, as the consumer keeps it.
        consumer_ranks: tensor-parallel ranks of the consumer.

    Raises:
        ValueError: some layers' heads can't be divided among the consumer's ranks.
    """
    if sent.drafter != kept.drafter:
        sent, kept = sent.without_drafter(), kept.without_drafter()
    model = min(sent, kept, key=KvModel.compared_bytes)
    held, own = model.on_all_ranks(consumer_ranks), len(model.own_groups)
    return replace(
        model,
        groups=tuple(
            once
            if isinstance(once, FullAttention) and (once.is_mla or (model.full_heads and index < own))
            else copies
            for index, (once, copies) in enumerate(zip(model.groups, held.groups, strict=True))
        ),
    )
