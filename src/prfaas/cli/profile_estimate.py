"""`prfaas profile --estimate`: a profile without a GPU, and how far it is from a measured one."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prfaas.cli.cache_dtypes import KV_DTYPE_HELP, cache_dtypes
from prfaas.cli.common import CliError, console, print_json

if TYPE_CHECKING:
    from prfaas.core.latency import LatencyProfile
    from prfaas.tools.profiling.estimate import BesideMeasured, EstimatePlan


@dataclass(frozen=True, slots=True)
class EstimateOptions:
    """What an estimate is made of, beside the model."""

    gpu: Annotated[str | None, typer.Option(help="Estimate: the GPU, for example h200.")] = None
    tp: Annotated[int, typer.Option(min=1, help="Estimate: GPUs that share every layer.")] = 1
    weights: Annotated[
        str | None, typer.Option(help="Estimate: bf16, fp8, int4, nvfp4, …; default: as in config.json.")
    ] = None
    kv_dtype: Annotated[str | None, typer.Option(help=f"Estimate: {KV_DTYPE_HELP}")] = None
    estimator: Annotated[
        str, typer.Option(help="Estimate: auto, aiconfigurator (measured kernels) or roofline.")
    ] = "auto"
    beside: Annotated[
        str | None, typer.Option(metavar="PROFILE", help="Estimate: put it beside this measured profile.")
    ] = None

    def check_unused(self) -> None:
        """Raise CliError if one is given that says nothing about a server."""
        for field in ("gpu", "weights", "kv_dtype", "beside"):
            if getattr(self, field) is not None:
                option = f"--{field.replace('_', '-')}"
                raise CliError(f"{option} goes with --estimate; without it, a server is measured")

    def plan(
        self,
        model: str | None,
        lengths: tuple[int, ...] | None,
        batches: tuple[int, ...] | None,
        context: int | None,
        name: str | None,
    ) -> "EstimatePlan":
        """The estimate that is asked for. Raises CliError without a model or a GPU, and for an unknown estimator."""
        from typing import cast, get_args

        from prfaas.tools.profiling.estimate import CONTEXT_TOKENS, EstimatePlan, Estimator

        if model is None or self.gpu is None:
            raise CliError(
                "--estimate needs --model CONFIG (its config.json) and --gpu NAME (for example h200)"
            )
        known = get_args(Estimator)
        if self.estimator not in known:
            raise CliError(f'--estimator: must be one of {", ".join(known)}, not "{self.estimator}"')
        return EstimatePlan(
            Path(model),
            self.gpu,
            self.tp,
            lengths,
            batches,
            context_tokens=CONTEXT_TOKENS if context is None else context,
            weights=self.weights,
            dtypes=cache_dtypes(self.kv_dtype),
            estimator=cast("Estimator", self.estimator),
            name=name,
        )


def print_estimate(plan: "EstimatePlan", out: Path | None, beside: str | None, *, as_json: bool) -> None:
    """Estimate, then write and print what was asked for; `beside`: a measured profile, by its name or file."""
    from prfaas.core.latency import load_profile, profile_text, save_profile
    from prfaas.tools.profiling.estimate import differences, estimate

    measured = load_profile(beside) if beside is not None else None
    estimated = estimate(plan)
    for note in estimated.notes:
        typer.echo(f"prfaas: {note}", err=True)
    profile = estimated.profile
    both = differences(profile, measured) if measured is not None else ((), ())
    if out is not None:
        save_profile(profile, out)
    if as_json:
        print_json(_document(profile, out, beside, both))
    elif out is None and measured is None:
        typer.echo(profile_text(profile), nl=False)
    else:
        _print_tables(profile, measured, both)
        if out is not None:
            typer.echo(f"profile: {out}")


def _document(
    profile: "LatencyProfile",
    out: Path | None,
    beside: str | None,
    both: "tuple[tuple[BesideMeasured, ...], tuple[BesideMeasured, ...]]",
) -> dict[str, object]:
    decode = profile.decode
    return {
        "profile": profile.name,
        "file": None if out is None else str(out),
        "source": profile.source,
        "prefill": {
            "band": profile.evidence.band,
            "points": [{"tokens": tokens, "seconds": seconds} for tokens, seconds in profile.prefill.points],
        },
        "decode": None
        if decode is None
        else {
            "band": decode.evidence.band,
            "context_tokens": decode.context_tokens,
            "points": [{"batch": batch, "step_s": seconds} for batch, seconds in decode.curve.points],
        },
        "beside": None
        if beside is None
        else {
            "profile": beside,
            **{
                name: [asdict(each) | {"inside": each.inside} for each in rows]
                for name, rows in zip(("prefill", "decode"), both, strict=True)
            },
        },
    }


def _print_tables(
    profile: "LatencyProfile",
    measured: "LatencyProfile | None",
    both: "tuple[tuple[BesideMeasured, ...], tuple[BesideMeasured, ...]]",
) -> None:
    from rich import box
    from rich.table import Table

    from prfaas.core.units import format_s

    shown = console()
    shown.print(profile.source, soft_wrap=True)
    decode = profile.decode
    context = f"after {decode.context_tokens:g} tokens" if decode is not None else ""
    parts = [("prefill", "tokens", profile.prefill.points, profile.evidence.band, both[0])]
    if decode is not None:
        parts.append((f"decode step {context}", "batch", decode.curve.points, decode.evidence.band, both[1]))
    for title, unit, points, band, rows in parts:
        table = Table(box=box.SIMPLE_HEAD, title=f"{profile.model}: {title}", title_justify="left")
        columns = [unit, "estimated", "error bar"]
        if measured is not None:
            columns += [measured.name, "over estimated", ""]
        for column in columns:
            table.add_column(column, justify="right")
        low, high = band or (1.0, 1.0)
        beside = {row.at: row for row in rows}
        estimates = dict(points) | {row.at: row.estimated_s for row in rows}
        for at, seconds in sorted(estimates.items()):
            cells = [
                f"{at:.0f}",
                format_s(seconds),
                f"{format_s(low * seconds)} – {format_s(high * seconds)}",
            ]
            row = beside.get(at)
            if measured is not None and row is not None:
                inside = "" if row.inside else "outside"
                cells += [format_s(row.measured_s), f"{row.measured_s / row.estimated_s:.2f}", inside]
            table.add_row(*cells)
        shown.print(table)
