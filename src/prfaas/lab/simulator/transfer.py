"""The bytes of KV that one request sends over a link, by when they can leave."""

from prfaas.core.kv.layers import SlidingWindow
from prfaas.core.kv.model import KvModel
from prfaas.core.scheduling.decision import KvFacts


class KvMoves:
    """`KvModel.bytes_to_move`, divided by when the bytes are there.

    What full attention makes leaves while the prefill runs; a linear state belongs to a length, so it can only leave at
    its end. Windows leave with the chunks that compute what they hold at the end, or without chunks at the end too.
    """

    def __init__(self, model: KvModel) -> None:
        self.facts = KvFacts.of_model(model)
        """What policies read, as in the live system; it has the bytes of a whole transfer."""
        self._token_bytes = model.token_bytes
        self._windows = [group for group in model.groups if isinstance(group, SlidingWindow)]

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
