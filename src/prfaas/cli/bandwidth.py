"""`prfaas bandwidth`: the egress that a prefill cluster needs."""

from typing import TYPE_CHECKING

import typer

from prfaas.cli.cache_dtypes import KV_DTYPE_HELP, cache_dtypes, named_model
from prfaas.cli.common import AsJson, CliError, print_json
from prfaas.cli.completions import model_names, profile_names
from prfaas.cli.option_groups import argument, option, with_options
from prfaas.cli.trace_options import TraceAsked, beyond

if TYPE_CHECKING:
    from prfaas.core.latency.profile import LatencyProfile
    from prfaas.core.workload.lengths import LengthDistribution


@with_options
def bandwidth(
    model: str = argument(
        ...,
        "A published model (`prfaas models`), or a config.json.",
        metavar="MODEL",
        autocompletion=model_names,
    ),
    gpus: int = option(..., "GPUs of the prefill cluster.", min=1),
    profile: str | None = option(
        None,
        "How fast an instance is; default: MODEL-h200, where there is one.",
        metavar="NAME|FILE",
        autocompletion=profile_names,
    ),
    length: float | None = option(None, "Uncached length of every request, tokens. Default: 32768.", min=1),
    lognormal: str | None = option(
        None, "Log-normal lengths within limits instead.", metavar="MU,SIGMA,LOW,HIGH"
    ),
    *,
    asked_trace: TraceAsked,
    kv_dtype: str | None = option(None, KV_DTYPE_HELP),
    as_json: AsJson = False,
) -> None:
    """Say what bandwidth N GPUs fill with KVCache if they prefill without a pause (the paper's equation 2).

    Examples: prfaas bandwidth ring-2.5-1t --gpus 512 --length 32768 --kv-dtype fp8;
    prfaas bandwidth internal-1t --gpus 32 --lognormal 9.9,1,19400,131072
    """
    from prfaas.core.latency.files import load_profile, profile_names
    from prfaas.core.planner import egress
    from prfaas.core.units import format_bits_per_s

    kv_model, _ = named_model(model, cache_dtypes(kv_dtype))
    if profile is None and f"{model}-h200" not in profile_names():
        speed = _estimated(model)
    else:
        speed = load_profile(profile or f"{model}-h200")
    lengths = _lengths(length, lognormal, asked_trace)
    if asked_trace.trace is None:
        speed.require_range(lengths.low, lengths.high)
    for note in beyond(lengths, speed.range_tokens):
        typer.echo(note, err=True)
    result = egress(gpus, speed.gpus_per_instance, kv_model.kv_bytes, speed.extended_prefill_s, lengths)
    if as_json:
        document = {
            "model": kv_model.name,
            "profile": speed.name,
            "profile_model": speed.model,
            "gpus": gpus,
            "gpus_per_instance": speed.gpus_per_instance,
            "instances": result.instances,
            "mean_tokens": result.mean_tokens,
            "egress_bits_per_s": result.by_length_bits_per_s,
            "egress_at_mean_bits_per_s": result.at_mean_bits_per_s,
        }
        print_json(document)
        return
    rate = format_bits_per_s(result.by_length_bits_per_s)
    typer.echo(
        f"{gpus} GPUs prefilling {kv_model.name} ({result.instances:g} × {speed.gpus_per_instance} GPUs as fast as "
        f"{speed.name}, prompts of {result.mean_tokens:,.0f} tokens on average) fill {rate}."
    )
    if lengths.low < lengths.high:
        at_mean = format_bits_per_s(result.at_mean_bits_per_s)
        typer.echo(f"If all had the mean length it would be {at_mean} (the paper's approximation).")
    if speed.model != kv_model.name:
        typer.echo(f"Mind that {speed.name} was measured with {speed.model}.", err=True)


def _estimated(model: str) -> "LatencyProfile":
    """8 H200 by the roofline, where no profile comes with prfaas. Raises ProfileError."""
    from pathlib import Path

    from prfaas.tools.profiling.estimate import EstimatePlan, estimate

    speed = estimate(EstimatePlan(Path(model), "h200", 8, batches=())).profile
    low, high = speed.evidence.band or (1.0, 1.0)
    typer.echo(
        f"No profile comes with prfaas: estimated; measured times are {low:g} to {high:g} times these.",
        err=True,
    )
    return speed


def _lengths(length: float | None, lognormal: str | None, asked: TraceAsked) -> "LengthDistribution":
    from prfaas.core.workload.empirical import fixed
    from prfaas.core.workload.lengths import TruncatedLogNormal

    given = [option is not None for option in (length, lognormal, asked.trace)]
    if sum(given) > 1:
        raise CliError("give only one of --length, --lognormal and --trace")
    if (trace := asked.read()) is not None:
        return trace.uncached
    if lognormal is not None:
        try:
            mu, sigma, low, high = (float(part) for part in lognormal.split(","))
        except ValueError:
            raise CliError(
                f'--lognormal: must be four numbers MU,SIGMA,LOW,HIGH, for example 9.9,1,128,131072, not "{lognormal}"'
            ) from None
        return TruncatedLogNormal(mu, sigma, low, high)
    return fixed(32768 if length is None else length)
