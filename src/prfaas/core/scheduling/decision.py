"""Where one request goes, and the KV bytes that move for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct

from prfaas.core.kv.model import KvModel
from prfaas.core.prefix.index import NOTHING, PoolHit, PrefixHit

__all__ = ["NOTHING", "PoolHit", "PrefixHit", "RoutingRequest"]


@dataclass(frozen=True, slots=True)
class KvFacts:
    """What the model's KV cache allows, and how many bytes move for a prompt.

    The two functions own every convention of a transfer's size: whether the last prompt token is sent, and what whole
    blocks add.
    """

    is_hybrid: bool
    """Some layers' state can't be cut at any token. Full-attention blocks alone then spare bytes but no computing."""
    can_skip: bool
    """Full-attention blocks spare bytes. Not so with sliding windows: engines keep window blocks only near a prompt's
    end and don't count a prefix without them as held."""
    bytes_to_move: Callable[[int, int], int]
    """`(prompt_tokens, skip_tokens)`: KV bytes that the prefill of a prompt sends to the instance that decodes, less
    those of the first `skip_tokens` tokens."""
    prefix_bytes_to_move: Callable[[int, int], int]
    """`(num_tokens, skip_tokens)`: KV bytes of the first `num_tokens` tokens, less those of the first `skip_tokens`:
    what a cache transfer moves."""
    checkpoint_bytes: int = 0
    """What layers with a state or a window hold after any number of tokens: a checkpoint; 0: there are none."""

    @classmethod
    def of_model(cls, model: KvModel, *, block_tokens: int = 1, sends_last_token: bool = True) -> "KvFacts":
        """The facts of a model whose engines move whole blocks.

        Args:
            model: the model's KV groups.
            block_tokens: tokens of a block; 1: bytes are exact.
            sends_last_token: False: the KV of a prompt's last token is not sent, the decode instance computes it.
        """
        prefix_bytes = _prefix_bytes(model, block_tokens)
        to_move = prefix_bytes if sends_last_token else _without_last_token(prefix_bytes)
        # With whole blocks held of what is cut at any of their ends.
        many_tokens = block_tokens << 20
        checkpoint_bytes = model.bytes_to_move(many_tokens, many_tokens, block_tokens)
        return cls(model.is_hybrid, not model.has_window, to_move, prefix_bytes, checkpoint_bytes)


def _prefix_bytes(model: KvModel, block_tokens: int) -> Callable[[int, int], int]:
    """`model.bytes_to_move`, without its loop over the groups where no group has a window."""

    def windowed_bytes(num_tokens: int, skip_tokens: int) -> int:
        return model.bytes_to_move(num_tokens, min(skip_tokens, num_tokens), block_tokens)

    if model.has_window:
        return windowed_bytes
    token_bytes, fixed_bytes = model.token_bytes, model.fixed_bytes

    def prefix_bytes(num_tokens: int, skip_tokens: int) -> int:
        if num_tokens <= 0:
            return 0
        if skip_tokens > num_tokens:
            skip_tokens = num_tokens
        blocks = -(-num_tokens // block_tokens) - skip_tokens // block_tokens
        return token_bytes * blocks * block_tokens + fixed_bytes

    return prefix_bytes


def _without_last_token(prefix_bytes: Callable[[int, int], int]) -> Callable[[int, int], int]:
    def bytes_to_move(prompt_tokens: int, skip_tokens: int) -> int:
        return prefix_bytes(max(prompt_tokens - 1, 0), skip_tokens)

    return bytes_to_move


class PoolCopy(Struct, frozen=True):
    """A prefix that another machine of the cluster holds, read into the pool of an instance's own machine."""

    transfer: "CacheTransfer"
    """From that machine's pool: a prefill starts after its tokens."""
    copy_s: float
    """What moving takes."""
    load_s: float
    """What loading it into the engine takes after that."""


class RoutingRequest(Struct, frozen=True):
    """What routing needs to know of one request.

    `tiers.with_pools` makes one where machines have prefix-cache pools.
    """

    num_tokens: int
    """Tokens of the whole prompt."""
    held: Mapping[str, PrefixHit] = {}
    """Instance name → what it holds of the prompt, the pool of its machine included; an absent one holds nothing."""
    ordinal: int = 0
    """Counts requests in the order of their arrival. A policy without randomness can distribute by it."""
    loads_s: Mapping[str, float] = {}
    """Instance name → what loading its reusable prefix from the pool of its machine takes; absent: it loads nothing."""
    pools: Mapping[str, PoolHit] = {}
    """Pool name → what it holds of the prompt; an absent one holds nothing."""
    copies: Mapping[str, PoolCopy] = {}
    """Instance name → the prefix that is worth reading from another machine of its cluster; absent: none is."""
    own: Mapping[str, PrefixHit] = {}
    """As `held` without the pools; empty where these hold nothing."""
    first_from_prefill: bool = False
    """Whether the client gets the first token from the instance that prefills, where that is not the one that decodes,
    and may sample (`view.may_sample`). It waits for no KV and no decode slot then; the rest of the answer does."""

    def reusable_at(self, instance: str) -> int:
        """Tokens that a prefill at `instance` need not compute; the last prompt token is always computed."""
        here = self.held.get(instance)
        return 0 if here is None else self._below_last(here.reusable_tokens)

    def attention_at(self, instance: str) -> int:
        """Tokens whose full-attention blocks `instance` holds, less the last prompt token."""
        here = self.held.get(instance)
        return 0 if here is None else self._below_last(here.attention_tokens)

    def _below_last(self, tokens: int) -> int:
        return tokens if tokens < self.num_tokens else max(self.num_tokens - 1, 0)


class HitTokens(NamedTuple):
    """Where the tokens come from that a prefill need not compute, as a decision expects it. They add up."""

    own: int
    """In the engine's own blocks."""
    memory: int
    """In the memory of its machine's pool."""
    ssd: int
    """On the pool's SSD."""
    moved: int
    """With the decision's cache transfer, from another machine."""


class Route(StrEnum):
    """Which kind of cluster prefills."""

    LOCAL = "local"
    """The PD cluster, perhaps the decode instance itself."""
    OFFLOAD = "offload"
    """A PrfaaS cluster."""


class CacheTransfer(Struct, frozen=True):
    """The KV of a prompt's beginning goes to the prefill instance before it starts.

    Section 3.4.3: where the longer cache is not in the cluster that computes, and bandwidth is abundant, that cache
    moves first.
    """

    source: str
    """The instance that holds it, or the pool."""
    num_tokens: int
    """Length of the prefix. An instance computes the last of these tokens when it sends them."""
    skip_tokens: int
    """Leading tokens that are not sent, since the prefill instance holds them, or the pool of its machine."""
    kv_bytes: int
    """KV bytes that move."""
    from_pool: bool = False
    """It goes from pool `source` to the pool of the prefill instance's machine."""

    @property
    def reusable_tokens(self) -> int:
        """Tokens that the prefill need not compute after it."""
        return self.num_tokens if self.from_pool else self.num_tokens - 1


HELD_OUT = "holdout"
"""The reason of what stays although it would have been offloaded."""


class OtherWay(Struct, frozen=True):
    """What the way that was not taken would have been, by the numbers of the same moment."""

    prefill: str
    """The instance that would have prefilled."""
    prefill_tokens: int
    """What it would have computed."""
    first_token_s: float
    """Predicted, as `Decision.first_token_s`."""


# A struct, not a data class, which takes five times as long to make: a simulator asks for a hundred thousand a second.
class Decision(Struct, kw_only=True, frozen=True):
    """One routing decision, with the numbers that decided. `msgspec.structs.replace` makes another."""

    route: Route
    prefill: str
    """The instance that prefills. If it is also `decode`, nothing is transferred."""
    decode: str
    """The instance that decodes."""
    uncached_tokens: int
    """What was compared with the threshold: what the PD cluster would have to prefill."""
    prefill_tokens: int
    """What `prefill` has to compute."""
    skip_tokens: int
    """Leading tokens that are not sent, since `decode` holds their full-attention blocks."""
    kv_bytes: int
    """KV bytes that go from `prefill` to `decode`; 0 if they are the same instance."""
    reason: str
    """One word for logs and metrics."""
    threshold_tokens: float
    """The threshold at that moment, adjustments included."""
    predicted_ttft_s: float
    """Wait, prefill, and what of the transfer the prefill does not hide. A first token of the prefill waits for no
    transfer: that is `kv_wait_s` then."""
    cache_transfer: CacheTransfer | None = None
    cache_stays: str = ""
    """Why a longer prefix that another cluster holds does not move to `prefill` first, in a word: "no-bandwidth",
    "spares-little", "slower", "egress-price", "decode-prefills". Empty: one moves, or no other cluster holds one."""
    urgency_s: float | None = None
    """None: the prefill goes to `prefill` at once, in the order of arrival. A number: it waits until an instance of
    the cluster is free, and of those that wait the one with the smallest number is next. `prefill` is then the
    instance that it would get now."""
    is_bound: bool = False
    """With an urgency: only `prefill` may do it."""
    load_s: float = 0.0
    """Of the predicted TTFT what `prefill` needs to load its cached prefix from the pool of its machine."""
    pools: Mapping[str, PoolHit] | None = None
    """Pool name → what it held of the prompt; None: none held anything."""
    hit: HitTokens | None = None
    """Where the tokens come from that `prefill` need not compute; None: no pool held anything."""
    decode_wait_s: float = 0.0
    """What comes after the predicted TTFT and `kv_wait_s`: until `decode` has a slot for the request, as predicted."""
    kv_wait_s: float = 0.0
    """What comes after a predicted TTFT that waits for no KV: until `decode` has it and can write the second token."""
    num_tokens: int = 0
    """Tokens of the whole prompt; 0: nothing is known of a cached prefix."""
    other: OtherWay | None = None
    """Of an offloaded request, and of one that was held out; known where a ledger is kept."""

    @property
    def first_token_s(self) -> float:
        """Until the client has the first token, as predicted. One of the prefill waits for no decode slot."""
        return self.predicted_ttft_s + (0.0 if self.kv_wait_s else self.decode_wait_s)

    @property
    def reused_tokens(self) -> int:
        """Leading tokens of the prompt that `prefill` need not compute: `prefill_tokens` follow them."""
        return max(self.num_tokens - self.prefill_tokens, 0)

    @property
    def transfers(self) -> bool:
        """Whether KV moves from one instance to another."""
        return self.prefill != self.decode
