"""`prfaas profile`: measure how fast a live server is, or estimate it."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from prfaas.cli.cache_dtypes import KV_DTYPE_HELP, cache_dtypes
from prfaas.cli.common import AsJson, CliError, check_target, counted_progress, print_json
from prfaas.cli.completions import gpu_names, profile_names
from prfaas.cli.option_groups import argument, option, with_options

if TYPE_CHECKING:
    from prfaas.tools.profiling.endpoint import ProfiledEndpoint
    from prfaas.tools.profiling.estimate import EstimatePlan
    from prfaas.tools.profiling.measure import Measurement, MeasurePlan


_DEFAULT_BATCHES = (1, 2, 4, 8, 16, 32)
_LONGEST_BY_DEFAULT = 131072
_LONGEST_IF_UNTOLD = 8192
_CONTEXT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class EstimateOptions:
    """What an estimate is made of, beside the model."""

    gpu: str | None = option(None, "Estimate: the GPU, for example h200.", autocompletion=gpu_names)
    tp: int = option(1, "Estimate: GPUs that share every layer.", min=1)
    weights: str | None = option(None, "Estimate: bf16, fp8, int4, nvfp4, …; default: as in config.json.")
    kv_dtype: str | None = option(None, f"Estimate: {KV_DTYPE_HELP}")
    beside: str | None = option(
        None,
        "Estimate: put it beside this measured profile.",
        metavar="PROFILE",
        autocompletion=profile_names,
    )

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
        """The estimate that is asked for. Raises CliError without a model or a GPU."""
        from prfaas.tools.profiling.estimate import CONTEXT_TOKENS, EstimatePlan

        if model is None or self.gpu is None:
            raise CliError(
                "--estimate needs --model NAME (or its config.json) and --gpu NAME (for example h200)"
            )
        return EstimatePlan(
            Path(model),
            self.gpu,
            self.tp,
            lengths,
            batches,
            context_tokens=CONTEXT_TOKENS if context is None else context,
            weights=self.weights,
            dtypes=cache_dtypes(self.kv_dtype),
            name=name,
        )


@with_options
def profile(
    url: str | None = argument(
        None, "A vLLM server or gateway, for example http://127.0.0.1:8000.", metavar="[URL]"
    ),
    out: Path | None = option(None, "Write the profile there; default: stdout.", metavar="FILE"),
    lengths: str | None = option(
        None, "Prompt lengths in tokens; default: powers of two from 128 to the longest.", metavar="A,B,…"
    ),
    batches: str | None = option(
        None, 'Decode batches; default: 1,2,4,8,16,32; "none": prefill only.', metavar="A,B,…"
    ),
    repeats: int = option(3, "Measurements of each; the median counts.", min=1),
    warmups: int = option(1, "Measurements before them that don't count.", min=0),
    context: int | None = option(
        None, "Prompt length of decode steps, tokens; default: 512, estimated: 8192.", min=1
    ),
    model: str | None = option(
        None,
        "The served model; default: the first in the server's list. Estimated: its name, or config.json.",
    ),
    name: str | None = option(None, "The profile's name; default: model-hardware."),
    hardware: str = option("unknown", "What the server runs on, in your words: h200, h20."),
    gpus: int = option(1, "GPUs of the server.", min=1),
    estimate: bool = option(False, "Measure nothing: estimate from --model, --gpu and --tp.", "--estimate"),
    *,
    estimated: EstimateOptions,
    as_json: AsJson = False,
) -> None:
    """Measure prefill times over lengths and decode step times over batch sizes, and write a profile file.

    The server should have nothing else to do. Every prompt is new, so that no prefix cache helps. With --estimate, no
    server is needed: the times are estimated, and the file says so.

    Examples: prfaas profile http://127.0.0.1:8000 --hardware h20 --gpus 8 --out h20.yaml;
    prfaas profile --estimate --model config.json --gpu h200 --tp 8 --out h200.yaml
    """
    import asyncio
    import datetime

    from prfaas.core.latency.files import profile_text, save_profile

    check_target(out, "--out")
    wanted = _numbers(lengths, "--lengths") if lengths is not None else None
    if wanted is not None and len(wanted) < 2:
        raise CliError("--lengths: give at least two, for example 1024,8192")
    given = None if batches is None else _numbers(batches, "--batches")
    if estimate:
        from prfaas.cli.profile_estimate import print_estimate

        if url is not None:
            raise CliError(
                f"--estimate asks no server; leave {url} out, or leave --estimate out to measure it"
            )
        plan = estimated.plan(model, wanted, given, context, name)
        print_estimate(plan, out, estimated.beside, as_json=as_json)
        return
    estimated.check_unused()
    if url is None:
        raise CliError("give the URL of a server to measure, or --estimate with --model and --gpu")
    batch_sizes = _DEFAULT_BATCHES if given is None else given

    def plan_for(endpoint: "ProfiledEndpoint") -> "MeasurePlan":
        from prfaas.tools.profiling.measure import MeasurePlan

        return MeasurePlan(
            wanted or _default_lengths(endpoint.max_model_len),
            batch_sizes,
            repeats,
            warmups,
            context or _CONTEXT_TOKENS,
        )

    try:
        measured = asyncio.run(_run(url, model, plan_for))
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from None
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    made = measured.profile(
        name=name or f"{measured.model.rstrip('/').rpartition('/')[2]}-{hardware}",
        hardware=hardware,
        gpus_per_instance=gpus,
        source=f"prfaas profile {measured.url}, {day}: medians of {repeats} after {warmups} warm-up",
    )
    for note in measured.notes:
        typer.echo(f"prfaas: {note}", err=True)
    if out is not None:
        save_profile(made, out)
    if as_json:
        print_json(_document(made.name, measured, out))
    elif out is None:
        typer.echo(profile_text(made), nl=False)
    else:
        _print_table(measured)
        typer.echo(f"profile: {out}")


async def _run(
    url: str, model: str | None, plan_for: "Callable[[ProfiledEndpoint], MeasurePlan]"
) -> "Measurement":
    from prfaas.tools.profiling.endpoint import ProfiledEndpoint
    from prfaas.tools.profiling.measure import measure

    async with ProfiledEndpoint(url, model) as endpoint:
        plan = plan_for(endpoint)
        with _progress(plan.runs) as step:
            return await measure(endpoint, plan, step)


def _numbers(text: str, option: str) -> tuple[int, ...]:
    if option == "--batches" and text.strip() == "none":
        return ()
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise CliError(f'{option}: must be whole numbers above 0 with commas between, not "{text}"')
    return tuple(numbers)


def _default_lengths(max_model_len: int | None) -> tuple[int, ...]:
    # One token must be left for the answer, so the last length is just short of a power of two on most servers.
    longest = _LONGEST_IF_UNTOLD if max_model_len is None else min(max_model_len - 1, _LONGEST_BY_DEFAULT)
    powers = [2**n for n in range(7, 18) if 2**n < longest]
    return (*powers, longest) if powers else tuple(sorted({max(1, longest // 2), longest}))


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """Progress on stderr: a moving bar on a terminal, one line per thing measured elsewhere."""
    with counted_progress() as bar:
        task = bar.add_task("", total=total)
        begun, last = 0, ""

        def step(what: str) -> None:
            nonlocal begun, last
            bar.update(task, completed=begun, description=what)
            begun += 1
            if not bar.console.is_terminal and what != last:
                bar.console.print(f"{what} ({begun} of {total})")
                last = what

        yield step


def _document(name: str, measured: "Measurement", out: Path | None) -> dict[str, object]:
    return {
        "profile": name,
        "file": None if out is None else str(out),
        "url": measured.url,
        "model": measured.model,
        "context_tokens": measured.plan.context_tokens,
        "prefill": [
            {"tokens": sample.at, "median_s": sample.median_s, "seconds": sample.seconds}
            for sample in measured.prefill
        ],
        "decode": [
            {"batch": sample.at, "median_step_s": sample.median_s, "step_seconds": sample.seconds}
            for sample in measured.decode
        ],
        "notes": measured.notes,
    }


def _print_table(measured: "Measurement") -> None:
    from prfaas.cli.profile_estimate import print_times
    from prfaas.core.units import format_s

    for title, unit, samples in (
        (f"{measured.model}: prefill", "tokens", measured.prefill),
        (f"decode step after {measured.plan.context_tokens} tokens", "batch", measured.decode),
    ):
        rows = [
            (str(each.at), *map(format_s, (each.median_s, min(each.seconds), max(each.seconds))))
            for each in samples
        ]
        print_times(title, (unit, "median", "fastest", "slowest"), rows)
