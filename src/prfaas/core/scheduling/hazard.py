"""How long a streamed prefill takes, and what kills cost a piece of work that begins again from its start."""

import math


def expected_loss_s(work_s: float, kills_per_s: float) -> float:
    """Seconds by which work takes longer on average, where kills come at random and each one makes it begin again.

    The mean time of work of w seconds under kills at rate k is (e^(k w) − 1) / k (J. W. Young, "A first order
    approximation to the optimum checkpoint interval", 1974, without checkpoints). It grows as k w² / 2: a prefill
    twice as long loses four times as much.
    """
    if kills_per_s <= 0.0:
        return 0.0
    # Beyond e^30 nothing would ever end; a float must not overflow.
    return math.expm1(min(kills_per_s * work_s, 30.0)) / kills_per_s - work_s


def streamed_s(
    start_s: float,
    prefill_s: float,
    link_wait_s: float,
    link_s: float,
    rtt_s: float,
    kills_per_s: float = 0.0,
) -> float:
    """Seconds until a streamed prefill has arrived.

    Both are needed: the prefill's end, and this KV's bytes after those that the link has already accepted. Where
    instances are killed, what that costs on average is added: all is lost until the last byte has left.
    """
    computed_s = start_s + prefill_s
    sent_s = (start_s if start_s > link_wait_s else link_wait_s) + link_s
    left_s = computed_s if computed_s > sent_s else sent_s
    if kills_per_s:
        left_s += expected_loss_s(left_s - start_s, kills_per_s)
    return left_s + rtt_s


def streamed_delay_s(
    start_s: float,
    prefill_s: float,
    link_wait_s: float,
    link_s: float,
    rtt_s: float,
    kills_per_s: float,
    first_from_prefill: bool,
) -> float:
    """What ways of streaming a prefill are compared by before they are candidates: `PrefillCandidate.delay_s`."""
    loaded_s = streamed_s(start_s, prefill_s, link_wait_s, link_s, rtt_s, kills_per_s)
    if not first_from_prefill:
        return loaded_s
    early_s = streamed_s(start_s, prefill_s, 0.0, 0.0, rtt_s, kills_per_s)
    return (early_s + loaded_s) / 2.0
