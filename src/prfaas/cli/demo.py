"""`prfaas demo`: the main job, shown and checked."""

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from prfaas.cli.common import ReadyTimeout
from prfaas.cli.completions import made_model_names

if TYPE_CHECKING:
    from rich.console import Console

    from prfaas.core.deployment import Deployment
    from prfaas.serving.engines.running import EngineProgress, RunningEngines
    from prfaas.tools.demo import DemoOutcome, DemoPrompt


def demo(
    deployment: Annotated[
        Path | None,
        typer.Argument(
            metavar="DEPLOYMENT", help="A one-machine deployment file; default: examples/local.yaml."
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Also write the findings to FILE ('-': stdout)."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="A model in place of the deployment's: words, smollm2, gemma3, qwen3-next, …",
            autocompletion=made_model_names,
        ),
    ] = None,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="Also kill and start every engine in between, and ask again: pools keep prefixes.",
        ),
    ] = False,
    ready_timeout_s: ReadyTimeout = None,
) -> None:
    """Send six prompts through two clusters on this machine, then through one plain vLLM, and compare.

    The pools of the deployment begin empty.
    Ends with 0 if no answer differs and at least five of six are exactly equal (the others up to a tie).

    Example: prfaas demo --model gpt-oss --json demo.json
    """
    from rich.console import Console

    from prfaas.cli.common import CliError, example_path
    from prfaas.cli.fetching import shown_fetch
    from prfaas.core.deployment import load_deployment
    from prfaas.serving.engines.preparation import ensure_model
    from prfaas.serving.engines.running import READY_TIMEOUT_S
    from prfaas.tools.demo import DemoError, run_demo
    from prfaas.tools.demo.display import DEMO_COLUMNS

    loaded = load_deployment(deployment or example_path("local.yaml"))
    if model is not None:
        loaded = _with_model(loaded, model)
    if loaded.model.source is not None and loaded.model.source.is_fetched:
        with shown_fetch() as report:
            ensure_model(loaded, report)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        shown = _Shown(Console(stderr=True))
        outcome = run_demo(loaded, shown, ready_timeout_s or READY_TIMEOUT_S, restart=restart)
    except DemoError as error:
        raise CliError(str(error)) from error
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from None
    to_stdout = json_file is not None and str(json_file) == "-"
    out = Console(stderr=to_stdout, highlight=False)
    out.width = min(out.width, DEMO_COLUMNS) if out.is_terminal else DEMO_COLUMNS
    print_outcome(out, outcome)
    if json_file is not None:
        document = json.dumps(outcome.to_json(), indent=2) + "\n"
        if to_stdout:
            typer.echo(document, nl=False)
        else:
            json_file.write_text(document)
    if not outcome.all_equal:
        raise typer.Exit(1)


def print_outcome(out: "Console", outcome: "DemoOutcome") -> None:
    """Write what a run found, and what to try next, to a console."""
    import shutil

    from prfaas.tools.demo.display import next_steps
    from prfaas.tools.demo.outcome import closing, footnotes, outcome_table
    from prfaas.tools.demo.second_act import SECOND_NOTE, second_closing, second_table

    out.print(outcome_table(outcome))
    for note in footnotes(outcome):
        out.print(note, style="dim")
    out.print()
    out.print(closing(outcome), style="bold")
    if outcome.second is not None:
        out.print()
        out.print(second_table(outcome.second))
        out.print(SECOND_NOTE, style="dim")
        out.print()
        out.print(second_closing(outcome.second), style="bold")
    out.print()
    for line in next_steps(is_on_path=shutil.which("prfaas") is not None):
        out.print(line, markup=False)


def _with_model(deployment: "Deployment", name: str) -> "Deployment":
    from prfaas.cli.common import CliError
    from prfaas.core.deployment.model import made_model, made_model_names

    source = made_model(name)
    if source is None:
        raise CliError(f"--model: there is no model {name!r}; choose one of {', '.join(made_model_names())}")
    model = replace(
        deployment.model,
        served_name=f"{name}-tiny" if source.kind == "tiny" else name,
        max_model_len=min(deployment.model.max_model_len, source.context_tokens or sys.maxsize),
        path=source.directory(deployment.state_dir, deployment.name),
        source=source,
    )
    return replace(deployment, model=model)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class _Shown:
    """Progress on stderr: moving lines on a terminal, one line per step elsewhere."""

    def __init__(self, console: "Console") -> None:
        self._console = console

    @contextlib.contextmanager
    def starting(self, engines: "RunningEngines") -> "Iterator[Callable[[EngineProgress], None]]":
        from prfaas.cli.up import shown_progress

        with shown_progress(engines) as lines:
            yield lines.show

    @contextlib.contextmanager
    def asking(self, whom: str, prompts: "Sequence[DemoPrompt]") -> Iterator[Callable[[], None]]:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, disable=not self._console.is_terminal) as progress:
            task = progress.add_task(f"{len(prompts)} prompts to {whom}", total=len(prompts))
            answered = 0

            def step() -> None:
                nonlocal answered
                answered += 1
                progress.advance(task)
                if not self._console.is_terminal:
                    self._console.print(f"{whom}: {answered} of {len(prompts)} prompts answered")

            yield step
