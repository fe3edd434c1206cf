"""The outcomes of requests while a simulation goes on."""

from array import array

_NEVER = array("d", [float("nan")])

REFUSED = "refused"
"""The reason of requests that would have waited too long (`Scenario.queue_limit_s`); they have no times."""


class Columns:
    """What became of every request, column by column: one entry each in the order of arrival, 74 bytes in all; 103
    where first tokens come from prefills.

    Times are seconds from its arrival, NaN where it never came to that.
    """

    def __init__(self, first_from_prefill: bool = False) -> None:
        self.ttft_s = array("d")
        self.e2e_s = array("d")
        # Of the last attempt: when its prefill began and ended, when all KV was at the decode instance.
        self.prefill_from_s, self.prefill_to_s, self.kv_there_s = array("d"), array("d"), array("d")
        self.prefilled_on, self.decoded_on = array("h"), array("h")  # index of the instance; -1: none
        self.uncached_tokens = array("i")
        self.hit_tokens = array("i")
        self.link_bytes = array("d")
        self.offloaded = array("b")
        self.reason = array("b")  # index into `reason_codes`
        self.retries = array("b")
        self.reason_codes: dict[str, int] = {}
        # Of the hit tokens, those that came from pools, by tier; no columns without pools.
        self.tier_tokens: dict[str, array[int]] = {}
        # Whose first token came from the prefill; the times of every second token and of the latest one that is known;
        # the longest gap between known ones.
        self.prefilled_first = array("b")
        self.first_from_prefill = first_from_prefill
        self.second_token_s, self.last_token_s, self.longest_gap_s = array("d"), array("d"), array("d")

    def grow(self, count: int) -> None:
        """Room for `count` more requests."""
        times = [self.ttft_s, self.e2e_s, self.prefill_from_s, self.prefill_to_s, self.kv_there_s]
        counts = [
            *self.tier_tokens.values(),
            self.uncached_tokens,
            self.hit_tokens,
            self.offloaded,
            self.reason,
            self.retries,
        ]
        if self.first_from_prefill:
            times += [self.second_token_s, self.last_token_s, self.longest_gap_s]
            counts.append(self.prefilled_first)
        for each in times:
            each.extend(_NEVER * count)
        self.link_bytes.frombytes(bytes(self.link_bytes.itemsize * count))
        for column in counts:
            column.frombytes(bytes(column.itemsize * count))
        for instances in (self.prefilled_on, self.decoded_on):
            instances.extend([-1] * count)

    def code(self, reason: str) -> int:
        """The number of a reason, a new one if it was not seen before."""
        return self.reason_codes.setdefault(reason, len(self.reason_codes))
