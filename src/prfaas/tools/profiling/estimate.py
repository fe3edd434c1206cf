"""Profiles without a GPU: made of AIConfigurator's measurements, or of a roofline where it has none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from prfaas.core.kv import DEFAULT_DTYPES, CacheDtypes, ConfigError
from prfaas.core.kv.hf_config import read_config, text_fields
from prfaas.core.latency import roofline
from prfaas.core.latency.profile import Curve, DecodeCurve, Evidence, LatencyProfile, ProfileError
from prfaas.core.latency.roofline import Roofline, gpu
from prfaas.core.latency.work import WEIGHT_FORMATS, WeightFormat, model_work
from prfaas.tools.profiling import aiconfigurator
from prfaas.tools.profiling.aiconfigurator import AiconfiguratorTimes, EstimatorGap

Estimator = Literal["auto", "aiconfigurator", "roofline"]

_LENGTHS = tuple(2**power for power in range(7, 18))
_BATCHES = tuple(2**power for power in range(9))
CONTEXT_TOKENS = 8192
"""Tokens of a request that decodes, if not said otherwise."""


class EngineTimes(Protocol):
    """Anything that says how long an instance takes."""

    def prefill_s(self, tokens: float) -> float:
        """Seconds of a prefill of `tokens` tokens."""

    def decode_step_s(self, batch: float, context_tokens: float) -> float:
        """Seconds of a decode step of `batch` requests with `context_tokens` tokens each."""


@dataclass(frozen=True, slots=True)
class EstimatePlan:
    """What to estimate."""

    config: Path
    """A `config.json`, or a directory with one."""
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
    estimator: Estimator = "auto"
    """"auto": AIConfigurator where it can, else the roofline."""
    name: str | None = None
    """Of the profile; None: model-gpu."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimated profile, and what the user should know of it."""

    profile: LatencyProfile
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BesideMeasured:
    """One time of an estimate beside the measured one."""

    at: float
    """Tokens of the prompt, or requests of the batch."""
    estimated_s: float
    low_s: float
    high_s: float
    """The ends of the error bar."""
    measured_s: float

    @property
    def inside(self) -> bool:
        """Whether the measured time is on the error bar."""
        return self.low_s <= self.measured_s <= self.high_s


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
    points: tuple[_Curve, _Curve] | None = None
    if plan.estimator != "roofline":
        try:
            if plan.dtypes != DEFAULT_DTYPES:
                raise EstimatorGap("aiconfigurator is only asked about caches of the engine's own dtype")
            times = AiconfiguratorTimes(config, bound.gpu.name, plan.ranks, weights)
            points = _points(times, lengths, batches, plan.context_tokens)
            source = f"aiconfigurator-core {aiconfigurator.version()}, vLLM on {bound.gpu.name}"
            bands = (aiconfigurator.PREFILL_BAND, aiconfigurator.DECODE_BAND)
        except EstimatorGap as gap:
            if plan.estimator == "aiconfigurator":
                raise
            notes.append(f"{gap}; estimated by the roofline")
    if points is None:
        points = _points(bound, lengths, batches, plan.context_tokens)
        source = f"the roofline of prfaas, with the peaks of {bound.gpu.source}"
        bands = (roofline.PREFILL_BAND, roofline.DECODE_BAND)
    prefill, steps = points
    return Estimate(
        LatencyProfile(
            name=plan.name or f"{model}-{bound.gpu.name}",
            hardware=bound.gpu.name,
            model=model,
            gpus_per_instance=plan.ranks,
            prefill=Curve.through_points(prefill, "monotone"),
            decode=DecodeCurve(
                Curve.through_points(steps, "linear"),
                float(plan.context_tokens),
                evidence=Evidence("estimated", band=bands[1]),
            )
            if steps
            else None,
            source=(
                f"Estimated, not measured: {source}; {work.total_params / 1e9:.3g} billion parameters, "
                f"{work.active_params / 1e9:.3g} of them per token, {work.weights.name} weights"
                f"{'' if kept_in is None else f', KVCache in {kept_in}'}"
            ),
            evidence=Evidence("estimated", band=bands[0]),
        ),
        tuple(notes),
    )


def differences(
    estimated: LatencyProfile, measured: LatencyProfile
) -> tuple[tuple[BesideMeasured, ...], tuple[BesideMeasured, ...]]:
    """(prefill, decode) of an estimate beside a measured profile, at the estimate's points that both cover."""
    prefill = _differences(estimated.prefill, measured.prefill, estimated.evidence)
    if estimated.decode is None or measured.decode is None:
        return prefill, ()
    return prefill, _differences(
        estimated.decode.curve, measured.decode.curve, estimated.decode.evidence, also_measured=True
    )


def _differences(
    estimated: Curve, measured: Curve, evidence: Evidence, also_measured: bool = False
) -> tuple[BesideMeasured, ...]:
    low, high = evidence.band or (1.0, 1.0)
    places = {x for x, _ in estimated.points}
    if also_measured:
        places |= {x for x, _ in measured.points}
    return tuple(
        BesideMeasured(x, estimated.at(x), low * estimated.at(x), high * estimated.at(x), measured.at(x))
        for x in sorted(places)
        if estimated.covers(x) and measured.covers(x)
    )


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
    times: EngineTimes, lengths: Sequence[int], batches: Sequence[int], context_tokens: int
) -> tuple[_Curve, _Curve]:
    # Four digits: more would only look exact.
    prefill = [(float(tokens), float(f"{times.prefill_s(tokens):.4g}")) for tokens in lengths]
    steps = [(float(batch), float(f"{times.decode_step_s(batch, context_tokens):.4g}")) for batch in batches]
    return tuple(prefill), tuple(steps)


def _config(path: Path) -> tuple[Mapping[str, Any], str]:
    """What the file holds, and the model's name: that of its directory."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = read_config(file)
    except ConfigError as error:
        raise ProfileError(f"--model {error}") from error
    own = file.stem if file.stem != "config" else file.absolute().parent.name
    return config, own


def _weights(name: str | None) -> WeightFormat | None:
    if name is None:
        return None
    if name not in WEIGHT_FORMATS:
        raise ProfileError(f'--weights: must be one of {", ".join(WEIGHT_FORMATS)}, not "{name}"')
    return WEIGHT_FORMATS[name]


def _default_lengths(config: Mapping[str, Any]) -> tuple[int, ...]:
    longest = text_fields(config).get("max_position_embeddings") or _LENGTHS[-1]
    return tuple(length for length in _LENGTHS if length <= longest) or (1, int(longest))
