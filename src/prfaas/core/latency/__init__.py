"""How fast an instance is: prefill seconds over lengths, decode step seconds over batches, and where that is known."""

from prfaas.core.latency.files import load_profile, profile_names, profile_text, save_profile
from prfaas.core.latency.profile import (
    Curve,
    DecodeCurve,
    Evidence,
    LatencyProfile,
    ProfileError,
    ProfileRangeError,
)

__all__ = [
    "Curve",
    "DecodeCurve",
    "Evidence",
    "LatencyProfile",
    "ProfileError",
    "ProfileRangeError",
    "load_profile",
    "profile_names",
    "profile_text",
    "save_profile",
]
