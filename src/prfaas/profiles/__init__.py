"""How fast an instance is: prefill seconds over lengths, decode step seconds over batches, and where that is known."""

from prfaas.profiles.curve import Curve
from prfaas.profiles.errors import ProfileError, ProfileRangeError
from prfaas.profiles.files import load_profile, profile_names, profile_text, save_profile
from prfaas.profiles.profile import DecodeCurve, LatencyProfile, PrefillCurve

__all__ = [
    "Curve",
    "DecodeCurve",
    "LatencyProfile",
    "PrefillCurve",
    "ProfileError",
    "ProfileRangeError",
    "load_profile",
    "profile_names",
    "profile_text",
    "save_profile",
]
