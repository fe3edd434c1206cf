"""`prfaas demo`: the main job, shown and checked."""

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prfaas.cli.common import CliError, ReadyTimeout, counted_progress
from prfaas.cli.completions import made_model_names

if TYPE_CHECKING:
    from rich.console import Console

    from prfaas.core.deployment import Deployment
    from prfaas.serving.engines.child_processes import StartProgress
    from prfaas.serving.engines.running import RunningEngines
    from prfaas.tools.demo import DemoOutcome, DemoPrompt
    from prfaas.tools.demo.pays import BurstOutcome


class Act(StrEnum):
    """A part of the demo."""

    EXACTNESS = "exactness"
    PAYS = "pays"


def demo(
    deployment: Annotated[
        Path | None,
        typer.Argument(
            metavar="DEPLOYMENT", help="A one-machine deployment file; default: examples/local.yaml."
        ),
    ] = None,
    act: Annotated[
        Act | None,
        typer.Option("--act", help="Only this part: exactness, or when it pays. Default: both."),
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
    """Show that answers stay the same, and when PrfaaS pays.

    Exactness: six prompts through two clusters on this machine, then through one plain vLLM, and compared. The line
    between the clusters gets a bandwidth that fits machine and model, the pools of the deployment begin empty.

    When it pays: a burst of requests to stand-ins with and without PrfaaS, live and simulated.

    Ends with 0 if no answer differs and at least five of six are exactly equal (the others up to a tie).

    Examples: prfaas demo --model gpt-oss --json demo.json; prfaas demo --act pays
    """
    from rich.console import Console

    from prfaas.cli.fetching import shown_fetch
    from prfaas.core.deployment import load_deployment
    from prfaas.core.deployment.examples import example_path
    from prfaas.serving.engines.child_processes import READY_TIMEOUT_S
    from prfaas.serving.engines.preparation import ensure_model
    from prfaas.tools.demo import DemoError, run_demo
    from prfaas.tools.demo.display import DEMO_COLUMNS
    from prfaas.tools.demo.pays import run_burst

    loaded = load_deployment(deployment or example_path("local.yaml"))
    if model is not None:
        loaded = _with_model(loaded, model)
    if act is not Act.PAYS and loaded.model.source is not None and loaded.model.source.is_fetched:
        with shown_fetch() as report:
            ensure_model(loaded, report)
    to_stdout = json_file is not None and str(json_file) == "-"
    out = Console(stderr=to_stdout, highlight=False)
    out.width = min(out.width, DEMO_COLUMNS) if out.is_terminal else DEMO_COLUMNS
    signal.signal(signal.SIGTERM, _interrupt)
    shown = _Shown()
    outcome, burst = None, None
    try:
        if act is not Act.PAYS:
            outcome = run_demo(loaded, shown, ready_timeout_s or READY_TIMEOUT_S, restart=restart)
            print_outcome(out, outcome)
        if act is not Act.EXACTNESS:
            burst = run_burst(shown)
            print_burst(out, burst)
    except DemoError as error:
        raise CliError(str(error)) from error
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from None
    print_next_steps(out)
    if json_file is not None:
        found = {} if outcome is None else outcome.to_json()
        document = json.dumps(found | {"burst": None if burst is None else burst.to_json()}, indent=2) + "\n"
        if to_stdout:
            typer.echo(document, nl=False)
        else:
            json_file.write_text(document)
    if outcome is not None and not outcome.all_equal:
        raise typer.Exit(1)


def print_outcome(out: "Console", outcome: "DemoOutcome") -> None:
    """Write whether answers stayed the same to a console."""
    from prfaas.tools.demo.answers import NOISE, answers_table
    from prfaas.tools.demo.outcome import closing, footnotes, outcome_table
    from prfaas.tools.demo.second_act import SECOND_NOTE, second_closing, second_table

    out.print(outcome_table(outcome))
    for note in footnotes(outcome):
        out.print(note, style="dim")
    out.print()
    if outcome.writes_words:
        out.print(answers_table(outcome))
    else:
        out.print(NOISE, style="dim")
    out.print()
    out.print(closing(outcome), style="bold")
    out.print()
    if outcome.second is not None:
        out.print(second_table(outcome.second))
        out.print(SECOND_NOTE, style="dim")
        out.print()
        out.print(second_closing(outcome.second), style="bold")
        out.print()


def print_burst(out: "Console", burst: "BurstOutcome") -> None:
    """Write when it pays to a console."""
    from prfaas.tools.demo.pays.chart import burst_closing, burst_notes, burst_table, when_not

    out.print(burst_table(burst))
    for note in burst_notes(burst):
        out.print(note, style="dim")
    out.print()
    out.print(burst_closing(burst), style="bold")
    out.print(when_not(burst.limits))
    out.print()


def print_next_steps(out: "Console") -> None:
    """Write what to try next to a console."""
    import shutil

    from prfaas.tools.demo.display import next_steps

    for line in next_steps(is_on_path=shutil.which("prfaas") is not None):
        out.print(line, markup=False)


def _with_model(deployment: "Deployment", name: str) -> "Deployment":
    from prfaas.core.deployment.model import made_model, made_model_names

    source = made_model(name)
    if source is None:
        raise CliError(f"--model: there is no model {name!r}; choose one of {', '.join(made_model_names())}")
    made: dict[str, Any] = dict.fromkeys(("tiny", "trained", "hub", "revision")) | {source.kind: source.name}
    model = replace(
        deployment.model,
        **made,
        served_name=f"{name}-tiny" if source.kind == "tiny" else name,
        max_model_len=min(deployment.model.max_model_len, source.context_tokens or sys.maxsize),
        path=source.directory(deployment.state_dir, deployment.name),
    )
    return replace(deployment, model=model)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class _Shown:
    """Progress on stderr: moving lines on a terminal, one line per step elsewhere."""

    @contextlib.contextmanager
    def starting(self, engines: "RunningEngines") -> "Iterator[Callable[[StartProgress], None]]":
        from prfaas.cli.up import shown_progress

        with shown_progress(engines) as lines:
            yield lines.show

    def asking(
        self, whom: str, prompts: "Sequence[DemoPrompt]"
    ) -> contextlib.AbstractContextManager[Callable[[], None]]:
        return self._counting(
            f"{len(prompts)} prompts to {whom}",
            f"{whom}: {{}} of {len(prompts)} prompts answered",
            len(prompts),
        )

    def bursting(self, requests: int) -> contextlib.AbstractContextManager[Callable[[], None]]:
        told = f"burst: {{}} of {requests} requests answered"
        return self._counting(f"{requests} requests in a burst, half with PrfaaS", told, requests, each=100)

    @contextlib.contextmanager
    def _counting(self, task_text: str, told: str, total: int, each: int = 1) -> Iterator[Callable[[], None]]:
        """A bar on a terminal, elsewhere the sentence `told` with the number of answers, after `each` of them."""
        with counted_progress() as progress:
            task = progress.add_task(task_text, total=total)
            answered = 0

            def step() -> None:
                nonlocal answered
                answered += 1
                progress.advance(task)
                if not progress.console.is_terminal and answered % each == 0:
                    progress.console.print(told.format(answered))

            yield step
