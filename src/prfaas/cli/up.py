"""`prfaas up`: a whole deployment on this machine."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from prfaas.cli.common import (
    DRAIN_TIMEOUT_S,
    DeploymentPath,
    DrainTimeout,
    LogFormatOption,
    LogLevelOption,
    ReadyTimeout,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from prfaas.serving.engines.running import EngineProgress, RunningEngines


def up(
    deployment: DeploymentPath,
    ready_timeout_s: ReadyTimeout = None,
    restarts: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Start an engine or a pool that ends again, at most so often in a row."
        ),
    ] = 5,
    drain_timeout_s: DrainTimeout = DRAIN_TIMEOUT_S,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
) -> None:
    """Start the pools, the engines and the gateway of a one-machine deployment; Ctrl-C ends everything.

    Each engine's and pool's output is in a log of its own, whose place is shown. "ready: URL" on stdout says that
    clients can connect. What ends is started again after 1 s, 2 s, 4 s and so on. SIGTERM or Ctrl-C lets running
    requests end first; a second one ends them at once. SIGHUP takes the file on again, as `prfaas reload` does:
    engines that it adds are started, and those that it lacks end when their work has.

    Example: prfaas up examples/local.yaml
    """
    from prfaas.cli.common import log_settings, write_logs
    from prfaas.cli.serve import check_gateway, run_gateway
    from prfaas.core.deployment import load_deployment
    from prfaas.serving.descriptors import raise_descriptor_limit
    from prfaas.serving.engines.following import FollowingEngines
    from prfaas.serving.engines.running import READY_TIMEOUT_S, RunningEngines
    from prfaas.serving.engines.supervisor import RestartLimits, Supervisor
    from prfaas.serving.pool.running import RunningPools

    loaded = load_deployment(deployment)
    check_gateway(loaded)
    open_files = raise_descriptor_limit()
    timeout_s = ready_timeout_s or READY_TIMEOUT_S
    write_logs(log_settings(log_format, log_level))
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with RunningPools(loaded) as pools, RunningEngines(loaded) as engines:
            typer.echo(f"logs: {loaded.logs_dir}; open files: {open_files:,} at most", err=True)
            with shown_progress(engines) as lines:
                engines.wait_ready(timeout_s, on_progress=lines.show)
            for node in loaded.pools:
                if not pools.answers_health(node):
                    _tell(
                        f"pool {node.name} does not answer; engines go on without it: {pools.log_path(node.name)}"
                    )
            limits = RestartLimits(most=restarts, ready_timeout_s=timeout_s)
            following = FollowingEngines(engines, Supervisor(engines, loaded.instances, limits, _tell), _tell)
            pool_supervisor = Supervisor(pools, loaded.pools, limits, _tell, kind="pool")
            run_gateway(
                loaded,
                ready=lambda _port: typer.echo(f"ready: {loaded.gateway.url}/v1"),
                beside=[following.run, pool_supervisor.run],
                following=following,
                drain_timeout_s=drain_timeout_s,
            )
            typer.echo("stopping", err=True)
    except KeyboardInterrupt:
        typer.echo("stopped before it was ready", err=True)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _tell(sentence: str) -> None:
    typer.echo(sentence, err=True)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


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
