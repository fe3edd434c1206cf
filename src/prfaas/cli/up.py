"""`prfaas up`: a whole deployment on this machine."""

import asyncio
import signal
from types import FrameType
from typing import TYPE_CHECKING

import typer

from prfaas.cli.options import DeploymentPath, StartTimeout

if TYPE_CHECKING:
    from prfaas.engines.running import RunningEngines

_WATCH_S = 1.0


def up(deployment: DeploymentPath, start_timeout_s: StartTimeout = None) -> None:
    """Start the engines and the gateway of a one-machine deployment; Ctrl-C ends everything.

    Each engine's output is in a log of its own, whose place is shown. "ready: URL" on stdout says that clients can
    connect.

    Example: prfaas up examples/local.yaml
    """
    from prfaas.cli.engine_progress import shown_progress
    from prfaas.cli.gateway_process import check_gateway_port, run_gateway
    from prfaas.deployment import load_deployment
    from prfaas.engines.running import READY_TIMEOUT_S, RunningEngines

    loaded = load_deployment(deployment)
    check_gateway_port(loaded)
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
