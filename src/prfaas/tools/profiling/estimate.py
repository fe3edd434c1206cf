"""Profiles without a GPU: made by a roofline."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prfaas.core.extras import how_to_install
from prfaas.core.kv.config_fields import ConfigError
from prfaas.core.kv.dtypes import DEFAULT_DTYPES, CacheDtypes
from prfaas.core.kv.hf_config import read_config, text_fields
from prfaas.core.kv.published import published_models
from prfaas.core.latency.profile import Curve, DecodeCurve, Evidence, LatencyProfile, ProfileError
from prfaas.core.latency.roofline import DECODE_BAND, PREFILL_BAND, Roofline, gpu
from prfaas.core.latency.work import WEIGHT_FORMATS, WeightFormat, model_work

_LENGTHS = tuple(2**power for power in range(7, 18))
_BATCHES = tuple(2**power for power in range(9))
CONTEXT_TOKENS = 8192
"""Tokens of a request that decodes, if not said otherwise."""


@dataclass(frozen=True, slots=True)
class EstimatePlan:
    """What to estimate."""

    config: Path
    """A `config.json`, a directory with one, a published model's name, or one on the hub."""
    gpu: str
    ranks: int
    """GPUs that share every layer: tensor parallelism."""
    lengths: tuple[int, ...] | None = None
    """Tokens of prompts; None: powers of two from 128 to what the model takes, at most 131072."""
    batches: tuple[int, ...] | None = None
    """Requests that decode together; None: powers of two up to what memory has room for, at most 256."""
    context_tokens: int = CONTEXT_TOKENS
    weights: str | None = None
    """A name in `WEIGHT_FORMATS`; None: as the `config.json` says."""
    dtypes: CacheDtypes = DEFAULT_DTYPES
    """Of the engine's caches."""
    name: str | None = None
    """Of the profile; None: model-gpu."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimated profile, and what the user should know of it."""

    profile: LatencyProfile
    notes: tuple[str, ...]


def estimate(plan: EstimatePlan) -> Estimate:
    """The profile that `plan` asks for.

    Raises:
        ProfileError: an unknown GPU or format, a model that doesn't fit, or nothing can estimate it.
        ConfigError: the `config.json` can't be read, or the model is not known.
    """
    config, model = _config(plan.config)
    weights = _weights(plan.weights)
    try:
        work = model_work(config, model, weights, plan.dtypes)
    except ConfigError as error:
        raise ConfigError(f"--model {plan.config}: {error}") from None
    bound = Roofline(work, gpu(plan.gpu), plan.ranks)
    lengths = plan.lengths or _default_lengths(config)
    if len(lengths) < 2:
        raise ProfileError("an estimate needs at least two lengths")
    batches = _batches(plan, bound, model)
    notes = []
    if plan.ranks > bound.gpu.per_machine:
        notes.append(
            f"{plan.ranks} {bound.gpu.name} are more than the {bound.gpu.per_machine} of one machine; the network "
            "between machines is slower than the estimate, which has none"
        )
    kept_in = plan.dtypes.of_kv
    prefill, steps = _points(bound, lengths, batches, plan.context_tokens)
    return Estimate(
        LatencyProfile(
            name=plan.name or f"{model}-{bound.gpu.name}",
            hardware=bound.gpu.name,
            model=model,
            gpus_per_instance=plan.ranks,
            prefill=Curve.through_points(prefill, "monotone"),
            decode=DecodeCurve.through_points(
                steps, plan.context_tokens, Evidence("estimated", band=DECODE_BAND)
            ),
            source=(
                f"Estimated, not measured: the roofline of prfaas, with the peaks of {bound.gpu.source}; "
                f"{work.total_params / 1e9:.3g} billion parameters, "
                f"{work.active_params / 1e9:.3g} of them per token, {work.weights.name} weights"
                f"{'' if kept_in is None else f', KVCache in {kept_in}'}"
            ),
            evidence=Evidence("estimated", band=PREFILL_BAND),
        ),
        tuple(notes),
    )


def curves_of(profile: LatencyProfile) -> dict[str, tuple[Curve, tuple[float, float]]]:
    """Its curves, each with its error bar."""
    found = {"prefill": (profile.prefill, profile.evidence.band or (1.0, 1.0))}
    if profile.decode is not None:
        found["decode"] = profile.decode.curve, profile.decode.evidence.band or (1.0, 1.0)
    return found


def beside(estimated: LatencyProfile, measured: LatencyProfile | None) -> dict[str, list[dict[str, float]]]:
    """By curve, the estimate's times with their error bars, and beside them the measured ones where both are known."""
    others = {} if measured is None else curves_of(measured)
    found: dict[str, list[dict[str, float]]] = {}
    for part, (curve, (low, high)) in curves_of(estimated).items():
        other = others[part][0] if part in others else None
        more = other.points if other is not None and part == "decode" else ()
        for at in sorted({x for x, _ in (*curve.points, *more) if curve.covers(x)}):
            seconds = curve.at(at)
            row = {"at": at, "estimated_s": seconds, "low_s": low * seconds, "high_s": high * seconds}
            row |= {"measured_s": other.at(at)} if other is not None and other.covers(at) else {}
            found.setdefault(part, []).append(row)
    return found


_Curve = tuple[tuple[float, float], ...]


def _batches(plan: EstimatePlan, bound: Roofline, model: str) -> tuple[int, ...]:
    """What was asked for, or all that there is memory for."""
    room = bound.max_batch(plan.context_tokens)
    if plan.batches is None:
        return tuple(batch for batch in _BATCHES if batch <= room)
    if plan.batches and plan.batches[-1] > room:
        raise ProfileError(
            f"{model} on {plan.ranks} {bound.gpu.name} has memory for {room} requests of {plan.context_tokens} tokens, "
            f"not for a batch of {plan.batches[-1]}"
        )
    return plan.batches


def _points(
    times: Roofline, lengths: Sequence[int], batches: Sequence[int], context_tokens: int
) -> tuple[_Curve, _Curve]:
    # Four digits: more would only look exact.
    prefill = [(float(tokens), float(f"{times.prefill_s(tokens):.4g}")) for tokens in lengths]
    steps = [(float(batch), float(f"{times.decode_step_s(batch, context_tokens):.4g}")) for batch in batches]
    return tuple(prefill), tuple(steps)


def _config(path: Path) -> tuple[Mapping[str, Any], str]:
    """What the file holds, and the model's name: that of its directory."""
    file, own = path / "config.json" if path.is_dir() else path, ""
    if not file.exists() and re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", str(path)) and path.suffix != ".json":
        file, own = _brought(str(path))
    try:
        config = read_config(file)
    except ConfigError as error:
        raise ProfileError(f"--model {error}") from error
    return config, own or (file.stem if file.stem != "config" else file.absolute().parent.name)


def _brought(name: str) -> tuple[Path, str]:
    """The file of a model that is named, and its name here."""
    published = {each.name: each for each in published_models()}.get(name.lower())
    hubs = [name]
    if published is not None:
        hubs = _HUB.findall(" ".join(source.origin for source in published.sources))
    found = next((file for hub in hubs if (file := _brought_config(hub)) is not None), None)
    if found is None:
        raise ProfileError(
            f"--model {name}: its config.json is needed and does not come with aiconfigurator-core "
            f"({how_to_install('estimate')}); fetch it from the hub, and give the file"
        )
    return found, published.name if published is not None else name.rpartition("/")[2].lower()


def _brought_config(name: str) -> Path | None:
    """The `config.json` that aiconfigurator-core brings of a model, by its name on the hub or the part behind the "/".

    Returns:
        None where it has none, or is not installed.
    """
    found = find_spec("aiconfigurator_core")
    for folder in (found.submodule_search_locations if found is not None else None) or ():
        for file in sorted(Path(folder, "model_configs").glob("*_config.json")):
            hub = file.name.removesuffix("_config.json").replace("--", "/", 1).lower()
            if name.replace("--", "/", 1).lower() in (hub, hub.partition("/")[2]):
                return file
    return None


# Of the sources of a published model: "aiconfigurator, ORG--NAME_config.json" or "config.json of ORG/NAME".
_HUB = re.compile(r"(?:aiconfigurator, |config\.json of )([\w.-]+(?:/|--)[\w.-]+?)(?:_config\.json|[\s,;]|$)")


def _weights(name: str | None) -> WeightFormat | None:
    if name is None:
        return None
    if name not in WEIGHT_FORMATS:
        raise ProfileError(f'--weights: must be one of {", ".join(WEIGHT_FORMATS)}, not "{name}"')
    return WEIGHT_FORMATS[name]


def _default_lengths(config: Mapping[str, Any]) -> tuple[int, ...]:
    longest = text_fields(config).get("max_position_embeddings") or _LENGTHS[-1]
    return tuple(length for length in _LENGTHS if length <= longest) or (1, int(longest))
