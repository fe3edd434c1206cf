"""The shape of a profile file, field by field. Only `files.py` uses it: everything else sees `LatencyProfile`."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from prfaas.profiles.pieces import Interpolation

Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Pair = tuple[Positive, Positive]
Text = Annotated[str, Field(min_length=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=False, frozen=True)


class PrefillSection(_Section):
    """`points` with `interpolation`, or `polynomial` with `range_tokens`."""

    points: Annotated[list[Pair], Field(min_length=2)] | None = None
    interpolation: Interpolation | None = None
    polynomial: Annotated[list[Number], Field(min_length=1, max_length=4)] | None = None
    range_tokens: Pair | None = None
    range_reason: str = ""


class DecodeSection(_Section):
    """`points` of (batch, seconds), lines between them unless `interpolation` says otherwise."""

    points: Annotated[list[Pair], Field(min_length=1)]
    interpolation: Interpolation = "linear"
    context_tokens: Positive | None = None


class ProfileFile(_Section):
    """A whole profile file."""

    name: Text
    model: Text
    hardware: Text
    gpus_per_instance: Annotated[int, Field(gt=0)]
    source: Text
    prefill: PrefillSection
    decode: DecodeSection | None = None
