"""`prfaas demo`: the main job, shown and checked."""

import contextlib
import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from prfaas.cli.common import CliError, ReadyTimeout, check_target, counted_progress
from prfaas.cli.completions import made_model_names
from prfaas.cli.option_groups import argument, option, with_options

if TYPE_CHECKING:
    from prfaas.core.deployment import Deployment
    from prfaas.serving.engines.child_processes import StartProgress
    from prfaas.serving.engines.running import RunningEngines
    from prfaas.tools.demo import DemoPrompt

Act = Literal["exactness", "pays"]
"""A part of the demo."""


@with_options
def demo(
    deployment: Path | None = argument(
        None, "A one-machine deployment file; default: examples/local.yaml.", metavar="DEPLOYMENT"
    ),
    act: Act | None = option(None, "Only this part: exactness, or when it pays. Default: both.", "--act"),
    json_file: Path | None = option(
        None, "Also write the findings to FILE ('-': stdout).", "--json", metavar="FILE"
    ),
    model: str | None = option(
        None,
        "A model in place of the deployment's: words, smollm2, gemma3, qwen3-next, …",
        "--model",
        autocompletion=made_model_names,
    ),
    restart: bool = option(
        False, "Also kill and start every engine in between, and ask again: pools keep prefixes.", "--restart"
    ),
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

    from prfaas.cli.fetching import fetch_model
    from prfaas.core.deployment import load_deployment
    from prfaas.core.shipped import example_path
    from prfaas.serving.engines.child_processes import READY_TIMEOUT_S
    from prfaas.tools.demo import DemoError, run_demo
    from prfaas.tools.demo.display import DEMO_COLUMNS, next_steps, print_outcome
    from prfaas.tools.demo.pays import run_burst
    from prfaas.tools.demo.pays.chart import print_burst

    check_target(json_file, "--json")
    loaded = load_deployment(deployment or example_path("local.yaml"))
    if model is not None:
        loaded = _with_model(loaded, model)
    if act != "pays" and loaded.model.source is not None and loaded.model.source.is_fetched:
        fetch_model(loaded)
    to_stdout = json_file is not None and str(json_file) == "-"
    out = Console(stderr=to_stdout, highlight=False)
    out.width = min(out.width, DEMO_COLUMNS) if out.is_terminal else DEMO_COLUMNS
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    shown = _Shown()
    outcome, burst = None, None
    try:
        if act != "pays":
            outcome = run_demo(loaded, shown, ready_timeout_s or READY_TIMEOUT_S, restart=restart)
            print_outcome(out, outcome)
        if act != "exactness":
            burst = run_burst(shown.bursting)
            print_burst(out, burst)
    except DemoError as error:
        raise CliError(str(error)) from error
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from None
    for line in next_steps(is_on_path=shutil.which("prfaas") is not None):
        out.print(line, markup=False)
    if json_file is not None:
        found = {} if outcome is None else outcome.to_json()
        document = json.dumps(found | {"burst": None if burst is None else burst.to_json()}, indent=2) + "\n"
        if to_stdout:
            typer.echo(document, nl=False)
        else:
            json_file.write_text(document)
    if outcome is not None and not outcome.all_equal:
        raise typer.Exit(1)


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


class _Shown:
    """Progress on stderr: moving lines on a terminal, one line per step elsewhere."""

    def starting(
        self, engines: "RunningEngines"
    ) -> "contextlib.AbstractContextManager[Callable[[StartProgress], None]]":
        from prfaas.cli.up import shown_progress

        return shown_progress(engines)

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
