"""How often a prefill sends what another engine could go on from, where its own may be taken away.

Full attention travels block by block, and what has come of it is of use. A linear state is one of an exact number of
tokens, so it travels at the end alone; so does a window. A checkpoint has both after a chunk in the middle.
"""

import math

from prfaas.core.units import BITS_PER_BYTE


def checkpoint_interval_s(checkpoint_s: float, kills_per_s: float) -> float:
    """Seconds of work between two checkpoints that cost `checkpoint_s` each: √(2 c / k).

    J. W. Young, "A first order approximation to the optimum checkpoint interval", 1974. Infinite without kills.
    """
    return math.sqrt(2.0 * checkpoint_s / kills_per_s) if kills_per_s > 0.0 else math.inf


def checkpoint_every_tokens(
    prefill_tokens: int,
    prefill_s: float,
    kv_bytes: int,
    checkpoint_bytes: int,
    link_bits_per_s: float,
    kills_per_s: float,
) -> int:
    """About how many tokens a prefill computes between two checkpoints; 0: none pays.

    A checkpoint costs the time of its bytes on the link.

    Args:
        prefill_tokens: What the prefill computes.
        prefill_s: How long that takes.
        kv_bytes: What it sends.
        checkpoint_bytes: What a checkpoint has; 0: the model needs none.
        link_bits_per_s: What the link carries.
        kills_per_s: How often the instance is taken away while it is up.
    """
    if not checkpoint_bytes or prefill_tokens < 1 or link_bits_per_s <= 0.0:
        return 0
    # Until the last byte has left all can be lost.
    work_s = max(prefill_s, BITS_PER_BYTE * kv_bytes / link_bits_per_s)
    interval_s = checkpoint_interval_s(BITS_PER_BYTE * checkpoint_bytes / link_bits_per_s, kills_per_s)
    # At a later one too little is left: see below.
    if 1.5 * interval_s > work_s:
        return 0
    return math.ceil(prefill_tokens * interval_s / work_s)


def checkpoint_count(every_tokens: int, num_tokens: int) -> int:
    """How many a prefill of so many tokens sends at most: those of `is_checkpoint_due` if every token ended a chunk."""
    # Before the last ones less than half an interval is left.
    return max(2 * num_tokens - every_tokens, 0) // (2 * every_tokens) if every_tokens else 0


def is_checkpoint_due(every_tokens: int, last_tokens: int, end_tokens: int, num_tokens: int) -> bool:
    """True if a state snapshot at the end of a chunk spares more than it costs, on average.

    An interval τ = √(2 c / k) says what a checkpoint costs: c = k τ² / 2. What it spares is the probability of a kill
    in what is left, times what was computed since the last one: k · left · since.

    Args:
        every_tokens: The interval; 0: none is due.
        last_tokens: Where the last one was, or the prefill's beginning.
        end_tokens: Where the chunk ends.
        num_tokens: Where the prefill ends.
    """
    since, left = end_tokens - last_tokens, num_tokens - end_tokens
    return 0 < every_tokens <= since and 2 * since * left >= every_tokens**2
