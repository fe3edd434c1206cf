"""The cost of a link's bytes, while its price may change."""

from prfaas.core.units import GB


class LinkCost:
    """Counts each byte by the price at which it was carried."""

    def __init__(self, price_per_gb: float) -> None:
        """`price_per_gb`: in the currency of the deployment file's prices."""
        self._price_per_gb = price_per_gb
        self._before = 0.0
        self._since_bytes = 0

    def reprice(self, price_per_gb: float, carried_bytes: int) -> None:
        """Count by another price what is carried from now on; `carried_bytes` have been by now."""
        self._before, self._since_bytes = self.total(carried_bytes), carried_bytes
        self._price_per_gb = price_per_gb

    def total(self, carried_bytes: int) -> float:
        """The cost of `carried_bytes`, the last ones at the newest price."""
        return self._before + (carried_bytes - self._since_bytes) / GB * self._price_per_gb
