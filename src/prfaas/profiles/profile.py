"""How fast one instance is: a model on some hardware."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

from prfaas.profiles.curve import Curve
from prfaas.profiles.errors import ProfileError, ProfileRangeError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PrefillCurve = Curve
"""Seconds from a request's start to its first token on an idle instance, over uncached prompt tokens."""

# A step of exactly the limit keeps the limit, whatever rounding made of 1 / 40.
_LIMIT_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class DecodeCurve:
    """Seconds of one decode step over the number of requests in the batch.

    `context_tokens` is the context length per request that the steps were measured at (None: not stated).
    """

    curve: Curve
    context_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class LatencyProfile:
    """T_prefill and T_decode of one instance of `gpus_per_instance` GPUs (the paper's Table 4).

    `decode` is None where only prefill is known. `source` says where the numbers come from.
    """

    name: str
    hardware: str
    model: str
    gpus_per_instance: int
    prefill: PrefillCurve
    decode: DecodeCurve | None
    source: str

    @property
    def range_tokens(self) -> tuple[float, float]:
        """The prompt lengths that prefill times are known for, both ends included."""
        return (self.prefill.low, self.prefill.high)

    def require_range(self, low_tokens: float, high_tokens: float) -> None:
        """Make sure that prefill times are known for all of [low_tokens, high_tokens].

        Raises:
            ProfileRangeError: they are not.
        """
        for tokens in (low_tokens, high_tokens):
            if not self.prefill.covers(tokens):
                raise self._outside(tokens)

    @overload
    def prefill_s(self, tokens: float) -> float: ...
    @overload
    def prefill_s(self, tokens: "NDArray[np.float64]") -> "NDArray[np.float64]": ...
    def prefill_s(self, tokens: "float | NDArray[np.float64]") -> "float | NDArray[np.float64]":
        """T_prefill in seconds for `tokens` uncached tokens; an array gives an array of its shape.

        Raises:
            ProfileRangeError: a length outside `range_tokens`. There is no extrapolation.
        """
        try:
            return self.prefill.at(tokens)
        except ProfileRangeError:
            raise self._outside(tokens) from None

    @property
    def range_batch(self) -> tuple[float, float]:
        """The batch sizes that decode step times are known for. ProfileError without decode times."""
        return (self._decode.low, self._decode.high)

    def decode_step_s(self, batch: float) -> float:
        """T_decode in seconds with `batch` requests in the batch.

        Raises:
            ProfileError: this profile has no decode times.
            ProfileRangeError: a batch outside `range_batch`.
        """
        if not self._decode.covers(batch):
            raise ProfileRangeError(
                f'profile "{self.name}" has decode times for batches of {_span(*self.range_batch)}, not of {batch:g}'
            )
        return self._decode.at(float(batch))

    def max_batch(self, step_limit_s: float) -> int:
        """BS_max: the largest batch up to which every step takes at most `step_limit_s`; 0 if already 1 is too slow.

        Never more than the largest batch measured, however generous the limit.

        Raises:
            ProfileError: this profile has no decode times.
            ProfileRangeError: the smallest batch measured is too slow and not 1, so the answer isn't known.
        """
        low, high = self.range_batch
        limit = step_limit_s * (1 + _LIMIT_TOLERANCE)
        best = 0
        for batch in range(math.ceil(low), math.floor(high) + 1):
            if self._decode.at(float(batch)) > limit:
                break
            best = batch
        if best == 0 and low > 1:
            raise ProfileRangeError(
                f'profile "{self.name}" has decode times for batches of {_span(low, high)}, and a step of {low:g} '
                f"takes {self._decode.at(low) * 1000:.3g} ms, over the limit of {step_limit_s * 1000:.3g} ms"
            )
        return best

    @property
    def _decode(self) -> Curve:
        if self.decode is None:
            raise ProfileError(
                f'profile "{self.name}" has no decode times, so its instances can only prefill'
            )
        return self.decode.curve

    def _outside(self, tokens: "float | NDArray[np.float64]") -> ProfileRangeError:
        low, high = self.range_tokens
        asked: float
        if isinstance(tokens, int | float):
            asked = tokens
        else:
            import numpy as np

            values = np.asarray(tokens, dtype=np.float64)
            asked = float(values[~((values >= low) & (values <= high))].flat[0])
        return ProfileRangeError(
            f'profile "{self.name}" has prefill times for {_span(low, high)} tokens, not for {_number(asked)}'
        )


def _span(low: float, high: float) -> str:
    return _number(low) if low == high else f"{_number(low)} to {_number(high)}"


def _number(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.6g}"
