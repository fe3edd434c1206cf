"""Profiles as files: those that come with prfaas, and the user's own. All else sees `LatencyProfile`."""

import difflib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prfaas.core.bounded_file import WRITTEN_BYTES, file_text
from prfaas.core.latency.profile import (
    Curve,
    DecodeCurve,
    Evidence,
    Interpolation,
    LatencyProfile,
    Origin,
    ProfileError,
)
from prfaas.core.yaml_source import FileError, YamlSource, yaml_source

Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Pair = tuple[Positive, Positive]
Text = Annotated[str, Field(min_length=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=False, frozen=True)


class _TimesSection(_Section):
    """What both curves say of themselves."""

    origin: Origin | None = None
    source: str = ""
    band: Pair | None = None


class PrefillSection(_TimesSection):
    """`points` with `interpolation`, or `polynomial` with `range_tokens`."""

    points: Annotated[list[Pair], Field(min_length=2)] | None = None
    interpolation: Interpolation | None = None
    polynomial: Annotated[list[Number], Field(min_length=1, max_length=4)] | None = None
    range_tokens: Pair | None = None
    range_reason: str = ""


class DecodeSection(_TimesSection):
    """`points` of (batch, seconds), lines between them unless `interpolation` says otherwise."""

    points: Annotated[list[Pair], Field(min_length=1)]
    interpolation: Interpolation = "linear"
    context_tokens: Positive | None = None
    context_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class ProfileFile(_Section):
    """A whole profile file."""

    name: Text
    model: Text
    hardware: Text
    gpus_per_instance: Annotated[int, Field(gt=0)]
    source: Text
    prefill: PrefillSection
    decode: DecodeSection | None = None


_SUFFIXES = (".yaml", ".yml")


def profile_names() -> tuple[str, ...]:
    """The profiles that come with prfaas, sorted."""
    files = (resources.files(__package__) / "data").iterdir()
    return tuple(sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml")))


def load_profile(name_or_path: str | Path, relative_to: Path | None = None) -> LatencyProfile:
    """The profile of this name, or the one in the file `name_or_path` (relative to the directory `relative_to`).

    What ends in .yaml or .yml or holds a "/" is a path, anything else a name.

    Raises:
        ProfileError: there is no such profile, or its file has a mistake; one sentence with file, line and field.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or "/" in text or text.endswith(_SUFFIXES):
        path = Path(name_or_path).expanduser()
        path = path if relative_to is None else relative_to / path
        try:
            content = file_text(path, WRITTEN_BYTES)
        except FileNotFoundError:
            raise ProfileError(f"{path}: there is no such profile file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(f"{path}: can't be read as a profile ({error})") from error
        return parse_profile(content, str(path))
    names = profile_names()
    if text not in names:
        near = difflib.get_close_matches(text, names, n=1)
        hint = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(names)}, or give a .yaml file"
        raise ProfileError(f'there is no profile "{text}"; {hint}')
    return _packaged(text)


@cache
def _packaged(name: str) -> LatencyProfile:
    data = resources.files(__package__) / "data" / f"{name}.yaml"
    return parse_profile(data.read_text(encoding="utf-8"), f"{name}.yaml")


def parse_profile(content: str, where: str) -> LatencyProfile:
    """The profile in the YAML text `content`; `where` names the file in errors."""
    try:
        source = yaml_source(Path(where), content)
        if not isinstance(source.values, dict):
            raise source.error((), 'must be a mapping with "name:", "model:", "prefill:" and so on')
        return _profile(source)
    except FileError as error:
        raise ProfileError(str(error)) from None


def _profile(source: YamlSource) -> LatencyProfile:
    try:
        file = ProfileFile.model_validate(source.values)
    except ValidationError as error:
        details = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        raise source.error(details["loc"], _sentence(details["type"], details["msg"])) from None
    section = "prefill"
    try:
        prefill = _prefill_curve(file.prefill)
        evidence = _evidence(file.prefill)
        section = "decode"
        decode = _decode_curve(file.decode) if file.decode is not None else None
    except ProfileError as error:
        raise source.error((section,), str(error)) from None
    return LatencyProfile(
        name=file.name,
        hardware=file.hardware,
        model=file.model,
        gpus_per_instance=file.gpus_per_instance,
        prefill=prefill,
        decode=decode,
        source=" ".join(file.source.split()),
        evidence=evidence,
    )


def save_profile(profile: LatencyProfile, path: Path) -> None:
    """Write `profile` to `path`, from where `load_profile` reads the same again."""
    path.write_text(profile_text(profile), encoding="utf-8")


def profile_text(profile: LatencyProfile) -> str:
    """`profile` as the text of a profile file."""
    document: dict[str, Any] = {
        "name": profile.name,
        "model": profile.model,
        "hardware": profile.hardware,
        "gpus_per_instance": profile.gpus_per_instance,
        "source": profile.source,
        "prefill": _evidence_fields(profile.evidence) | _curve_fields(profile.prefill),
    }
    if profile.decode is not None:
        document["decode"] = _evidence_fields(profile.decode.evidence) | {
            "points": _rows(profile.decode.curve.points),
            "interpolation": profile.decode.curve.interpolation,
        }
        if profile.decode.context_tokens is not None:
            document["decode"]["context_tokens"] = _plain(profile.decode.context_tokens)
        if profile.decode.context_s:
            document["decode"]["context_s"] = profile.decode.context_s
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100, default_flow_style=None)


def _evidence_fields(evidence: Evidence) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if evidence.origin is not None:
        fields["origin"] = evidence.origin
    if evidence.source:
        fields["source"] = evidence.source
    if evidence.band is not None:
        fields["band"] = list(evidence.band)
    return fields


def _curve_fields(curve: Curve) -> dict[str, Any]:
    fields: dict[str, Any]
    if curve.points:
        fields = {"points": _rows(curve.points), "interpolation": curve.interpolation}
    else:
        fields = {"polynomial": list(curve.coefficients)}
    fields["range_tokens"] = [_plain(curve.low), _plain(curve.high)]
    if curve.range_reason:
        fields["range_reason"] = curve.range_reason
    return fields


def _rows(points: tuple[tuple[float, float], ...]) -> list[list[float]]:
    return [[_plain(x), seconds] for x, seconds in points]


def _plain(number: float) -> float:
    return int(number) if float(number).is_integer() else number


def _prefill_curve(section: PrefillSection) -> Curve:
    reason = " ".join(section.range_reason.split())
    if (section.points is None) == (section.polynomial is None):
        raise ProfileError("give either points or polynomial")
    if section.points is not None:
        if section.interpolation is None:
            raise ProfileError('interpolation is missing; give "linear", "cubic" or "monotone"')
        return Curve.through_points(
            tuple(section.points), section.interpolation, valid=section.range_tokens, range_reason=reason
        )
    if section.interpolation is not None:
        raise ProfileError("interpolation goes with points, not with polynomial")
    if section.range_tokens is None:
        raise ProfileError("range_tokens is missing; a polynomial holds on the lengths it was fitted to")
    low, high = section.range_tokens
    return Curve(low, high, coefficients=tuple(section.polynomial or ()), range_reason=reason)


def _decode_curve(section: DecodeSection) -> DecodeCurve:
    return DecodeCurve(
        Curve.through_points(tuple(section.points), section.interpolation),
        section.context_tokens,
        section.context_s,
        _evidence(section),
    )


def _evidence(section: _TimesSection) -> Evidence:
    return Evidence(section.origin, " ".join(section.source.split()), section.band)


def _sentence(kind: str, message: str) -> str:
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        return "is no known field"
    return message[:1].lower() + message[1:]
