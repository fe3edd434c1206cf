"""Equations 1 and 3 to 6 of the paper (sections 2.1 and 3.4.1), one function each."""

import math

from prfaas.units import BITS_PER_BYTE


def kv_throughput_bits_per_s(kv_bytes: float, prefill_s: float) -> float:
    """Eq. 1: Φ_kv(l) = S_kv(l) / T_prefill(l), in bits per second."""
    return kv_bytes * BITS_PER_BYTE / prefill_s


def theta_prfaas(instances: int, prefill_s: float, bandwidth_bits_per_s: float, kv_bytes: float) -> float:
    """Eq. 3: min(N_prfaas / T_prefill(l_long), B_out / S_kv(l_long)), requests per second.

    Prefill and transfer overlap layer by layer, so the slower of the two counts.
    """
    return min(instances / prefill_s, bandwidth_bits_per_s / (kv_bytes * BITS_PER_BYTE))


def theta_pd_p(n_prefill: int, prefill_s: float) -> float:
    """Eq. 4: N_p / T_prefill(l_short), requests per second."""
    return n_prefill / prefill_s


def theta_pd_d(n_decode: int, decode_batch: float, decode_step_s: float, output_tokens: float) -> float:
    """Eq. 5: N_d · BS_max / (T_decode · L_out), requests per second."""
    return n_decode * decode_batch / (decode_step_s * output_tokens)


def lambda_max(theta_prfaas: float, theta_pd_p: float, theta_pd_d: float, offloaded_fraction: float) -> float:
    """Eq. 6: min(Θ_prfaas / p, Θ_pd-p / (1 − p), Θ_pd-d), requests per second; a stage without requests is no limit."""
    p = offloaded_fraction
    return min(
        theta_prfaas / p if p > 0 else math.inf,
        theta_pd_p / (1 - p) if p < 1 else math.inf,
        theta_pd_d,
    )
