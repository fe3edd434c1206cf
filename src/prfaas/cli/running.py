"""What `prfaas serve` and `prfaas up` run until a signal: the gateway, or what follows the file where there is none."""

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial

import typer
import uvloop

from prfaas.cli.common import CliError
from prfaas.core.deployment import Deployment, DeploymentError, TracingConfig
from prfaas.serving.control.planning_inputs import policy_of
from prfaas.serving.engines.following import FollowingEngines
from prfaas.serving.engines.preparation import port_problem
from prfaas.serving.gateway import Draining
from prfaas.serving.gateway.clients import Clients
from prfaas.serving.ledger_file import open_ledger
from prfaas.serving.live import serve_live
from prfaas.serving.reloading import Reloader, ReloadRefusedError
from prfaas.serving.secret_files import load_headers, load_token

Beside = Callable[[], Coroutine[None, None, None]]
"""Makes what runs beside the process's job."""


def _tell_ready(deployment: Deployment, _port: int) -> None:
    """Say on stdout that clients can connect, and beside it where to look."""
    typer.echo(f"ready: {deployment.gateway.url}/v1")
    typer.echo(f"console: {deployment.gateway.admin.url}/console; prfaas status {deployment.path}", err=True)


def run_gateway(
    deployment: Deployment,
    drain_timeout_s: float,
    *,
    beside: Sequence[Beside] = (),
    following: FollowingEngines | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, with `beside` running meanwhile. Returns normally after a signal.

    `following`: the engines that this process starts and ends by the file; None: others do. After the signal nothing
    new is taken, and what is open may go on for `drain_timeout_s`, unless a second signal comes.

    Raises:
        CliError: the gateway's address can't be listened on.
    """
    check_gateway(deployment)
    uvloop.run(_serve(deployment, drain_timeout_s, beside, following))


def check_gateway(deployment: Deployment) -> None:
    """Refuse early what would fail late, after engines have taken a minute to start.

    Raises:
        CliError: an address of the gateway can't be listened on.
        AdminTokenError: the operators' token can't be read.
        ClientsFileError: the clients can't be.
        LedgerFileError: the ledger can't be used.
        TraceHeadersError: the headers for the collector can't be.
        ModuleNotFoundError: OpenTelemetry is not installed.
        DeploymentError: there is no such policy, or it does not take the file's parameters.
    """
    policy_of(deployment)
    gateway, admin = deployment.gateway, deployment.gateway.admin
    for host, port, field in ((gateway.host, gateway.port, "port"), (admin.host, admin.port, "admin.port")):
        problem = port_problem(host, port)
        if problem is not None:
            raise CliError(f"gateway of {deployment.path}: {problem}; free it or change gateway.{field}")
    if admin.token_file is not None:
        load_token(admin.token_file)
    if gateway.clients is not None:
        Clients(gateway.clients)
    if gateway.ledger is not None:
        open_ledger(gateway.ledger.file).close()
    if gateway.tracing is not None:
        check_tracing(gateway.tracing)


def check_tracing(tracing: TracingConfig) -> None:
    """Raises TraceHeadersError and ModuleNotFoundError for what would keep traces from being made."""
    import prfaas.serving.tracing.otel  # noqa: F401  # its packages are an extra

    if tracing.headers_file is not None:
        load_headers(tracing.headers_file)


@contextlib.asynccontextmanager
async def _running(beside: Sequence[Beside], reload: Beside) -> "AsyncIterator[list[asyncio.Task[None]]]":
    """While the process does its job: the tasks beside it, which end with it. SIGHUP takes the file on again."""
    tasks = [asyncio.create_task(make()) for make in beside]
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGHUP, lambda: tasks.append(asyncio.create_task(reload()))
    )
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _on_end(call: Callable[[], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, call)


async def _serve(
    deployment: Deployment,
    drain_timeout_s: float,
    beside: Sequence[Beside],
    following: FollowingEngines | None,
) -> None:
    draining, reloader = Draining(), Reloader(deployment)
    if following is not None:
        reloader.check(following.check)
        reloader.follow(following)
        reloader.on_left(following.left)
        reloader.restart = following.restart
    ready = partial(_tell_ready, deployment)
    gateway = asyncio.create_task(serve_live(deployment, ready=ready, draining=draining, reloader=reloader))
    # What the imports made stays: without it, a full collection would look at all of it, for a tenth of a second.
    gc.collect()
    gc.freeze()
    async with _running(beside, partial(reload_and_tell, reloader)) as tasks:

        def on_signal() -> None:
            if draining.active:
                gateway.cancel()
            else:
                draining.begin()
                tasks.append(asyncio.create_task(_end(gateway, draining, drain_timeout_s)))

        _on_end(on_signal)
        with contextlib.suppress(asyncio.CancelledError):
            await gateway


async def follow_file(
    deployment: Deployment, following: FollowingEngines, beside: Sequence[Beside], ready: str
) -> None:
    """Run what is beside until SIGINT or SIGTERM. SIGHUP: start the engines that the file adds.

    `ready` is said once signals are heard: before that a SIGHUP would end the process.
    """
    reloader = Reloader(deployment)
    reloader.check(following.check)
    reloader.follow(following)

    async def reload() -> None:
        await reload_and_tell(reloader)
        for instance in filter(following.runs_here, reloader.applied.leaving):
            # Only the gateway knows when its work has ended.
            gone = f"engine {instance.name} is not in the file any more; it goes on until this command ends"
            typer.echo(gone, err=True)

    ended = asyncio.Event()
    _on_end(ended.set)
    async with _running(beside, reload):
        typer.echo(ready)
        await ended.wait()


async def reload_and_tell(reloader: Reloader) -> None:
    """Take the file on again, and write into the log what became of it: the reloader itself writes each change."""
    logger = logging.getLogger(__name__)
    try:
        outcome = await reloader.reload()
    except (DeploymentError, ReloadRefusedError) as error:
        logger.error("not reloaded: %s", error)
    except Exception:
        # Nobody waits for this task: the old file would go on without a word.
        logger.exception("not reloaded, which is a fault of prfaas")
    else:
        if not outcome.difference:
            logger.info("reloaded: nothing has changed")


async def _end(gateway: asyncio.Task[None], draining: Draining, within_s: float) -> None:
    """End the gateway when what is open has ended, or after `within_s`."""
    count = draining.open_requests
    if count:
        what = "1 request is" if count == 1 else f"{count} requests are"
        typer.echo(f"draining: {what} open and may go on for {within_s:g} s; again to end at once", err=True)
    if not await draining.settled(within_s):
        typer.echo(f"requests cut after {within_s:g} s: {draining.open_requests}", err=True)
    gateway.cancel()
