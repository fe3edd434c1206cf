"""A model as the KVCache sees it: groups of layers of one kind each."""

from dataclasses import dataclass

from prfaas.kvmodel.full_attention import FullAttention
from prfaas.kvmodel.linear_state import LinearState
from prfaas.kvmodel.sliding_window import SlidingWindow

Group = FullAttention | SlidingWindow | LinearState


@dataclass(frozen=True, slots=True)
class KvModel:
    """What one request's KVCache is made of, summed over tensor-parallel ranks."""

    name: str
    groups: tuple[Group, ...]

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
        """True if some layers see a sliding window only."""
        return any(isinstance(group, SlidingWindow) for group in self.groups)

    @property
    def token_bytes(self) -> int:
        """Bytes by which the cache grows with every token, once all windows are full."""
        return sum(group.token_bytes for group in self.groups if isinstance(group, FullAttention))

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of a request's KVCache at a length of `tokens` tokens: S(l) of the paper's section 2."""
        return sum(group.bytes_at(tokens) for group in self.groups)

    def bytes_to_move(self, num_tokens: int, skip_tokens: int = 0, block_tokens: int = 1) -> int:
        """Bytes to send so that token `num_tokens` can be computed where [0, `skip_tokens`) is held already.

        Exact with `block_tokens=1`; an engine with blocks of B tokens moves whole blocks.
        Raises ValueError if not 0 <= skip_tokens <= num_tokens.
        """
        return sum(group.bytes_to_move(num_tokens, skip_tokens, block_tokens) for group in self.groups)

    def describe(self) -> str:
        """One line for people."""
        return f"{self.name}: " + "; ".join(group.describe() for group in self.groups)
