"""Seconds of a prefill that goes on from a cached prefix."""

from collections.abc import Callable


def after_prefix_s(
    prefill_s: Callable[[float], float], uncached_tokens: float, reused_tokens: float
) -> float:
    """Seconds of computing `uncached_tokens` behind `reused_tokens` that need not be computed.

    New tokens attend to the cached ones as well. So they take what the whole prompt takes more than its prefix,
    T(l) − T(p): with a full-attention layer in T, that is more than a prompt of l − p tokens takes. It is never less,
    since T(l − p) has the fixed cost of a prefill too. The paper's T_prefill (section 3.4) leaves this attention out.

    Args:
        prefill_s: T, seconds of a prefill without a cached prefix.
        uncached_tokens: l − p.
        reused_tokens: p, at least 0.
    """
    alone_s = prefill_s(uncached_tokens)
    if not reused_tokens:
        return alone_s
    longer_s = prefill_s(uncached_tokens + reused_tokens) - prefill_s(reused_tokens)
    return longer_s if longer_s > alone_s else alone_s
