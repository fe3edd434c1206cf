"""`prfaas profile --estimate`: a profile without a GPU, and how far it is from a measured one."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from prfaas.cli.cache_dtypes import KV_DTYPE_HELP, cache_dtypes
from prfaas.cli.common import CliError, console, print_json
from prfaas.cli.option_groups import option

if TYPE_CHECKING:
    from prfaas.tools.profiling.estimate import EstimatePlan


@dataclass(frozen=True, slots=True)
class EstimateOptions:
    """What an estimate is made of, beside the model."""

    gpu: str | None = option(None, "Estimate: the GPU, for example h200.")
    tp: int = option(1, "Estimate: GPUs that share every layer.", min=1)
    weights: str | None = option(None, "Estimate: bf16, fp8, int4, nvfp4, …; default: as in config.json.")
    kv_dtype: str | None = option(None, f"Estimate: {KV_DTYPE_HELP}")
    estimator: str = option("auto", "Estimate: auto, aiconfigurator (measured kernels) or roofline.")
    beside: str | None = option(None, "Estimate: put it beside this measured profile.", metavar="PROFILE")

    def check_unused(self) -> None:
        """Raise CliError if one is given that says nothing about a server."""
        for field in ("gpu", "weights", "kv_dtype", "beside"):
            if getattr(self, field) is not None:
                name = f"--{field.replace('_', '-')}"
                raise CliError(f"{name} goes with --estimate; without it, a server is measured")

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
                "--estimate needs --model NAME (or its config.json) and --gpu NAME (for example h200)"
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


def print_estimate(
    plan: "EstimatePlan", out: Path | None, measured_name: str | None, *, as_json: bool
) -> None:
    """Estimate, then write and print what was asked for, beside a measured profile, by its name or file."""
    from prfaas.core.latency.files import load_profile, profile_text, save_profile
    from prfaas.tools.profiling.estimate import beside, estimate

    measured = load_profile(measured_name) if measured_name is not None else None
    estimated = estimate(plan)
    for note in estimated.notes:
        typer.echo(f"prfaas: {note}", err=True)
    profile = estimated.profile
    rows = beside(profile, measured)
    if out is not None:
        save_profile(profile, out)
    if as_json:
        facts = {"profile": profile.name, "file": out and str(out), "source": profile.source}
        print_json(facts | {"context_tokens": plan.context_tokens, "beside": measured_name} | rows)
    elif out is None and measured is None:
        typer.echo(profile_text(profile), nl=False)
    else:
        console().print(profile.source, soft_wrap=True)
        for part, unit in (
            ("prefill", "tokens"),
            (f"decode step after {plan.context_tokens} tokens", "batch"),
        ):
            columns = (
                unit,
                "estimated",
                "error bar",
                *((measured.name, "over estimated") if measured else ()),
            )
            times = [_cells(row) for row in rows.get(part.split()[0], [])]
            print_times(f"{profile.model}: {part}", columns, times)
        if out is not None:
            typer.echo(f"profile: {out}")


def _cells(row: dict[str, float]) -> tuple[str, ...]:
    from prfaas.core.units import format_s

    bar = f"{format_s(row['low_s'])} – {format_s(row['high_s'])}"
    other_s = row.get("measured_s")
    if other_s is None:
        return f"{row['at']:.0f}", format_s(row["estimated_s"]), bar
    outside = "" if row["low_s"] <= other_s <= row["high_s"] else " outside"
    over = f"{other_s / row['estimated_s']:.2f}{outside}"
    return f"{row['at']:.0f}", format_s(row["estimated_s"]), bar, format_s(other_s), over


def print_times(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """A table of times, if there are any."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    if rows:
        console().print(table)
