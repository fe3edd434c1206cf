"""What became of every request, column by column."""

from array import array

_NOT_A_NUMBER = float("nan")


class Columns:
    """One entry per request in the order of arrival, 46 bytes each.

    Times from its arrival in seconds, NaN where it never came to that. `reason`: index into `reasons`.
    """

    __slots__ = (
        "e2e_s",
        "hit_tokens",
        "link_bytes",
        "offloaded",
        "reason",
        "reason_codes",
        "retries",
        "ttft_s",
        "uncached_tokens",
    )

    def __init__(self) -> None:
        self.ttft_s = array("d")
        self.e2e_s = array("d")
        self.uncached_tokens = array("i")
        self.hit_tokens = array("i")
        self.link_bytes = array("d")
        self.offloaded = array("b")
        self.reason = array("b")
        self.retries = array("b")
        self.reason_codes: dict[str, int] = {}

    def grow(self, count: int) -> None:
        """Room for `count` more requests."""
        for times in (self.ttft_s, self.e2e_s):
            times.extend([_NOT_A_NUMBER] * count)
        for column in (self.uncached_tokens, self.hit_tokens, self.link_bytes, self.offloaded, self.reason):
            column.frombytes(bytes(column.itemsize * count))
        self.retries.frombytes(bytes(count))

    @property
    def reasons(self) -> tuple[str, ...]:
        """The words that `reason` counts from 0."""
        return tuple(self.reason_codes)

    def code(self, reason: str) -> int:
        """The number of a reason, a new one if it was not seen before."""
        return self.reason_codes.setdefault(reason, len(self.reason_codes))
