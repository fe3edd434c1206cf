"""The bytes of KV that one request sends over a link, by when they can leave."""

from prfaas.core.kv.layers import FullAttention, LinearState, SlidingWindow
from prfaas.core.kv.model import KvModel
from prfaas.core.scheduling.decision import KvFacts

# More than any window has.
_MANY_TOKENS = 1 << 20


class KvMoves:
    """`KvModel.bytes_to_move`, divided by when the bytes are there.

    What full attention makes leaves while the prefill runs; a linear state belongs to a length, so it can only leave at
    its end. Windows leave with the chunks that compute what they hold at the end, or without chunks at the end too.
    """

    facts: KvFacts
    """The facts that policies read, as in the live system."""

    def __init__(self, model: KvModel) -> None:
        self._model = model
        self._token_bytes = sum(
            group.token_bytes for group in model.groups if isinstance(group, FullAttention)
        )
        self._windows = [group for group in model.groups if isinstance(group, SlidingWindow)]
        self._fixed_bytes = (
            model.fixed_bytes
            if all(isinstance(group, FullAttention | LinearState) for group in model.groups)
            else None
        )
        self.facts = KvFacts(
            model.is_hybrid,
            not model.has_window,
            self.total_bytes,
            self.total_bytes,
            model.bytes_to_move(_MANY_TOKENS, _MANY_TOKENS),
        )

    def total_bytes(self, num_tokens: int, skip_tokens: int) -> int:
        """Bytes of the whole transfer (`KvModel.bytes_to_move`); a skip beyond the end counts as the end."""
        if self._fixed_bytes is None:
            return self._model.bytes_to_move(num_tokens, min(skip_tokens, num_tokens))
        if num_tokens <= 0:
            return 0
        if skip_tokens >= num_tokens:
            return self._fixed_bytes
        return self._token_bytes * (num_tokens - skip_tokens) + self._fixed_bytes

    def streamed_bytes(self, num_tokens: int, skip_tokens: int) -> int:
        """Of the total, what leaves while the prefill runs, but for windows."""
        return self._token_bytes * (num_tokens - skip_tokens) if skip_tokens < num_tokens else 0

    def window_bytes(self, num_tokens: int, done_tokens: int) -> int:
        """Of what windows hold after `num_tokens` tokens, what is computed with the first `done_tokens`."""
        total_bytes = 0
        for group in self._windows:
            held_bytes = group.bytes_to_move(num_tokens, 0)
            total_bytes += max(0, held_bytes - group.token_bytes * max(0, num_tokens - done_tokens))
        return total_bytes
