"""`prfaas up`: a whole deployment on this machine."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import typer

from prfaas.cli.common import (
    DRAIN_TIMEOUT_S,
    DeploymentPath,
    DrainTimeout,
    LogsAsked,
    ReadyTimeout,
    progress_bar,
)
from prfaas.cli.option_groups import option, with_options

if TYPE_CHECKING:
    from prfaas.serving.engines.child_processes import StartProgress
    from prfaas.serving.engines.running import RunningEngines


@with_options
def up(
    deployment: DeploymentPath,
    ready_timeout_s: ReadyTimeout = None,
    restarts: int = option(
        5, "Start an engine or a pool that ends again, at most so often in a row.", metavar="N", min=0
    ),
    drain_timeout_s: DrainTimeout = DRAIN_TIMEOUT_S,
    site: str | None = option(
        None, "Start only what runs at this cluster, on this machine.", "--site", metavar="NAME"
    ),
    with_gateway: bool = option(
        True, "With --site: whether the gateway runs here if the site has it.", "--gateway/--no-gateway"
    ),
    *,
    logs: LogsAsked,
) -> None:
    """Start the pools, the engines and the gateway of a one-machine deployment; Ctrl-C ends everything.

    With --site: those of one cluster whose hosts are this machine's, and the gateway if it is in that cluster.

    Each engine's and pool's output is in a log of its own, whose place is shown. "ready: URL" on stdout says that
    clients can connect. What ends is started again after 1 s, 2 s, 4 s and so on. SIGTERM or Ctrl-C lets running
    requests end first; a second one ends them at once. SIGHUP takes the file on again, as `prfaas reload` does:
    engines that it adds are started, and those that it lacks end when their work has. At a site without the gateway
    it only starts those that the file adds.

    Examples: prfaas up examples/local.yaml; prfaas up examples/two-datacenters.yaml --site east
    """
    import asyncio

    from prfaas.cli.fetching import fetch_model
    from prfaas.cli.running import check_gateway, follow_file, run_gateway
    from prfaas.cli.site_share import runs_here, share_of
    from prfaas.core.deployment import load_deployment
    from prfaas.serving.descriptors import raise_descriptor_limit
    from prfaas.serving.engines.child_processes import READY_TIMEOUT_S
    from prfaas.serving.engines.engine_units import RunningUnits, units_of
    from prfaas.serving.engines.following import FollowingEngines
    from prfaas.serving.engines.running import RunningEngines
    from prfaas.serving.engines.supervisor import RestartLimits, Supervisor
    from prfaas.serving.pool.running import RunningPools

    loaded = load_deployment(deployment)
    share = share_of(loaded, site, with_gateway)
    if share.has_gateway:
        check_gateway(loaded)
    if loaded.model.source is not None and loaded.model.source.is_fetched and share.instance_names:
        fetch_model(loaded)
    open_files = raise_descriptor_limit()
    timeout_s = ready_timeout_s or READY_TIMEOUT_S
    logs.write()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with (
            RunningPools(loaded, share.pool_names) as pools,
            RunningEngines(loaded, share.instance_names) as engines,
        ):
            typer.echo(f"logs: {loaded.logs_dir}; open files: {open_files:,} at most", err=True)
            with shown_progress(engines) as show:
                engines.wait_ready(timeout_s, on_progress=show)
            for node in share.pools:
                if not pools.answers(node.name):
                    _tell(
                        f"pool {node.name} does not answer; engines go on without it: {pools.log_path(node.name)}"
                    )
            limits = RestartLimits(most=restarts, ready_timeout_s=timeout_s)
            here = partial(runs_here, site)
            units = units_of(share.instances)
            engine_supervisor = Supervisor(RunningUnits(engines, here), units, limits, _tell)
            pool_supervisor = Supervisor(pools, share.pool_names, limits, _tell, kind="pool")
            following = FollowingEngines(engines, engine_supervisor, _tell, here)
            beside = [following.run, pool_supervisor.run]
            if share.has_gateway:
                run_gateway(loaded, drain_timeout_s, beside=beside, following=following)
            else:
                ready = f"ready: site {site} without gateway"
                asyncio.run(follow_file(loaded, following, beside, ready))
            typer.echo("stopping", err=True)
    except KeyboardInterrupt:
        typer.echo("stopped before it was ready", err=True)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _tell(sentence: str) -> None:
    typer.echo(sentence, err=True)


@contextmanager
def shown_progress(engines: "RunningEngines") -> "Iterator[Callable[[StartProgress], None]]":
    """What to call with each step of a start; on stderr one line per engine.

    On terminals it has a spinner that becomes a mark, elsewhere it is plain text once the engine is ready.
    """
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.description}"),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with progress_bar(*columns) as progress:
        tasks = {name: progress.add_task(name, total=1, state="starting") for name in engines.names}

        def show(step: "StartProgress") -> None:
            if step.state != "ready":
                return
            progress.update(tasks[step.name], completed=1, state="ready")
            if not progress.console.is_terminal:
                progress.console.print(f"{step.name}: ready after {step.elapsed_s:.0f} s")

        yield show
