"""How long a transfer over a link may take before it is given up."""

from prfaas.core.units import BITS_PER_BYTE

# Links are shared, and headers, retransmission and a link slower than stated all come on top.
_SLACK = 4.0


def late_after_s(num_bytes: int, bandwidth_bits_per_s: float, grace_s: float) -> float:
    """Seconds after its prefill's end: the grace, and what the bandwidth explains.

    Args:
        num_bytes: of the transfer.
        bandwidth_bits_per_s: of the link, as configured; infinite inside a cluster.
        grace_s: the least.
    """
    return grace_s + _SLACK * BITS_PER_BYTE * num_bytes / bandwidth_bits_per_s
