"""What one instance holds of one prompt."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """What one instance holds of one prompt, in tokens.

    `reusable_tokens`: a prefill there starts after them: the full-attention blocks cover them, and linear state
    and sliding windows are held for exactly that length. `attention_tokens`, never fewer: the full-attention
    blocks alone, which need not be sent there again even where the states must be.
    """

    reusable_tokens: int
    attention_tokens: int


NOTHING = Held(0, 0)
