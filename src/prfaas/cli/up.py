"""`prfaas up`: a whole deployment on this machine."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import typer

from prfaas.cli.common import DeploymentPath, LogFormatOption, LogLevelOption, StartTimeout

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from prfaas.serving.engines.running import EngineProgress, RunningEngines

_WATCH_S = 1.0


def up(
    deployment: DeploymentPath,
    start_timeout_s: StartTimeout = None,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
) -> None:
    """Start the engines and the gateway of a one-machine deployment; Ctrl-C ends everything.

    Each engine's output is in a log of its own, whose place is shown. "ready: URL" on stdout says that clients can
    connect.

    Example: prfaas up examples/local.yaml
    """
    from prfaas.cli.common import log_settings, write_logs
    from prfaas.cli.serve import check_gateway_port, run_gateway
    from prfaas.core.deployment import load_deployment
    from prfaas.serving.engines.running import READY_TIMEOUT_S, RunningEngines

    loaded = load_deployment(deployment)
    check_gateway_port(loaded)
    write_logs(log_settings(log_format, log_level))
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with RunningEngines(loaded) as engines:
            typer.echo(f"logs: {loaded.logs_dir}", err=True)
            with shown_progress(engines) as lines:
                engines.wait_ready(start_timeout_s or READY_TIMEOUT_S, on_progress=lines.show)
            run_gateway(
                loaded,
                ready=lambda _port: typer.echo(f"ready: {loaded.gateway.url}/v1"),
                beside=[lambda: _report_deaths(engines)],
            )
            typer.echo("stopping", err=True)
    except KeyboardInterrupt:
        typer.echo("stopped before it was ready", err=True)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


async def _report_deaths(engines: "RunningEngines") -> None:
    import asyncio

    alive = set(engines.names)
    while alive:
        await asyncio.sleep(_WATCH_S)
        for name in sorted(alive):
            if not engines.is_running(name):
                alive.remove(name)
                typer.echo(
                    f"engine {name} has ended ({engines.exit_status(name)}), the others go on without it; "
                    f"see {engines.log_path(name)}",
                    err=True,
                )


class _Lines:
    """One line per engine: a spinner that becomes a mark on terminals, plain text once it is ready elsewhere."""

    def __init__(self, console: "Console", progress: "Progress", names: tuple[str, ...]) -> None:
        self._console = console
        self._progress = progress
        self._tasks: dict[str, TaskID] = {
            name: progress.add_task(name, total=1, state="starting") for name in names
        }

    def show(self, step: "EngineProgress") -> None:
        if step.state != "ready":
            return
        self._progress.update(self._tasks[step.name], completed=1, state="ready")
        if not self._console.is_terminal:
            self._console.print(f"{step.name}: ready after {step.elapsed_s:.0f} s")


@contextmanager
def shown_progress(engines: "RunningEngines") -> Iterator[_Lines]:
    """Progress on stderr; pass `.show` to `RunningEngines.wait_ready`."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.description}"),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield _Lines(console, progress, tuple(engines.names))
