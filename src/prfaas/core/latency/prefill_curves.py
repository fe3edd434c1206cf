"""Measured prefill times of one cluster: for a single decision, and for plans."""

from collections.abc import Callable

from prfaas.core.latency.service_curve import ServiceCurve


class PrefillCurves:
    """Two curves that learn from the same prefills."""

    def __init__(self, make: Callable[[], ServiceCurve]) -> None:
        """`make` gives a curve as it is before anything is measured."""
        self.alone = make()
        """Of prompts without a cached prefix. A decision knows the prefix, and adds what that costs
        (`after_prefix_s`)."""
        self.usual = make()
        """Of so many uncached tokens behind whatever prefixes such prompts have had lately. A plan knows how long
        prompts are without their prefixes, and no more."""

    def add(self, uncached_tokens: float, reused_tokens: float, seconds: float, now_s: float) -> float:
        """Take one measured prefill, as `ServiceCurve.add`.

        Returns:
            How much longer it took than was predicted, as a ratio.
        """
        ratio = seconds / self.alone.after_prefix_s(uncached_tokens, reused_tokens)
        self.alone.add(uncached_tokens, ratio * self.alone.seconds(uncached_tokens), now_s)
        self.usual.add(uncached_tokens, seconds, now_s)
        return ratio
