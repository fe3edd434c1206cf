"""How long a streamed prefill takes, and what kills cost on average: what a prefill loses with its instance."""

import math

from prfaas.core.link.checkpoints import checkpoint_interval_s


def expected_loss_s(work_s: float, kills_per_s: float, risk_s: float = math.inf) -> float:
    """Seconds by which work takes longer on average, where kills come at random and take some of it back.

    The mean time of work of w seconds that begins again at each kill is (e^(k w) − 1) / k at rate k (J. W. Young, "A
    first order approximation to the optimum checkpoint interval", 1974, without checkpoints). So it is for each piece
    of work that goes on from what is kept. The loss grows as k w² / 2: a prefill twice as long loses four times as
    much. With pieces of r seconds it is k w r / 2.

    Args:
        work_s: The whole work.
        kills_per_s: How often it is killed while it goes on.
        risk_s: What a kill takes back at most; infinite: all that was done.
    """
    piece_s = work_s if work_s < risk_s else risk_s
    if kills_per_s <= 0.0 or piece_s <= 0.0:
        return 0.0
    # Beyond e^30 nothing would ever end; a float must not overflow.
    return work_s / piece_s * (math.expm1(min(kills_per_s * piece_s, 30.0)) / kills_per_s - piece_s)


def at_risk_s(
    prefill_s: float, link_wait_s: float, link_s: float, kills_per_s: float, checkpoint_s: float
) -> float:
    """Seconds of a streamed prefill that a kill takes back: twice what it does on average, as of work begun again.

    An engine goes on from the newest checkpoint, so half an interval is lost on average. And it goes on from what has
    arrived. A stream that has to wait for the link's queue lags behind its prefill by that wait at first, and by less
    the more of it has come. Where the link is faster than the prefill it catches up.

    Args:
        prefill_s: What the prefill takes.
        link_wait_s: From its start until the link carries the first of its bytes.
        link_s: What its bytes take on the link.
        kills_per_s: How often the instance is taken away while it is up.
        checkpoint_s: What a checkpoint takes on the link; 0: the model needs none. Infinite: what has arrived of a
            broken transfer is not kept.
    """
    interval_s = checkpoint_interval_s(checkpoint_s, kills_per_s)
    work_s = max(prefill_s, link_wait_s + link_s)
    # As `checkpoint_every_tokens`: none pays in so short a prefill.
    if 1.5 * interval_s > work_s:
        return math.inf
    lag_s = link_wait_s
    if prefill_s - link_s > link_wait_s:
        # The lag is over when the stream has caught up, after wait · prefill / (prefill − link) seconds.
        lag_s *= link_wait_s / (prefill_s - link_s)
    return interval_s + lag_s


def streamed_s(
    start_s: float,
    prefill_s: float,
    link_wait_s: float,
    link_s: float,
    rtt_s: float,
    kills_per_s: float = 0.0,
    checkpoint_s: float = math.inf,
) -> float:
    """Seconds until a streamed prefill has arrived.

    Both are needed: the prefill's end, and this KV's bytes after those that the link has already accepted. Where
    instances are killed, what that costs on average is added, until the last byte has left: what lies between two
    checkpoints and what has not arrived. `kills_per_s` and `checkpoint_s` are those of `at_risk_s`.
    """
    computed_s = start_s + prefill_s
    sent_s = (start_s if start_s > link_wait_s else link_wait_s) + link_s
    left_s = computed_s if computed_s > sent_s else sent_s
    if kills_per_s:
        waits_s = link_wait_s - start_s if link_wait_s > start_s else 0.0
        risk_s = at_risk_s(prefill_s, waits_s, link_s, kills_per_s, checkpoint_s)
        left_s += expected_loss_s(left_s - start_s, kills_per_s, risk_s)
    return left_s + rtt_s
