"""What kills cost a piece of work that begins again from its start."""

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
