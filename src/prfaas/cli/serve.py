"""`prfaas serve`: the gateway and its control plane as a process's main job, until a signal."""

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING

import typer

from prfaas.cli.common import (
    DRAIN_TIMEOUT_S,
    CliError,
    DeploymentPath,
    DrainTimeout,
    LogFormatOption,
    LogLevelOption,
    log_settings,
    write_logs,
)

if TYPE_CHECKING:
    import asyncio

    from prfaas.core.deployment import Deployment, TracingConfig
    from prfaas.serving.engines.following import FollowingEngines
    from prfaas.serving.gateway import Draining
    from prfaas.serving.reloading import Reloader


def serve(
    deployment: DeploymentPath,
    drain_timeout_s: DrainTimeout = DRAIN_TIMEOUT_S,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
) -> None:
    """Run the gateway of a deployment whose engines are started elsewhere, until Ctrl-C.

    SIGTERM or Ctrl-C lets running requests end first; a second one ends them at once. SIGHUP takes the file on again,
    as `prfaas reload` does.

    Example: prfaas serve examples/local.yaml
    """
    from prfaas.cli.fetching import shown_fetch
    from prfaas.core.deployment import GATEWAY, load_deployment
    from prfaas.serving.engines.preparation import ensure_certificates, ensure_key, ensure_model

    loaded = load_deployment(deployment)
    write_logs(log_settings(log_format, log_level))
    if loaded.model.source is not None:
        with shown_fetch() as report:
            ensure_model(loaded, report, weights=False)
    ensure_key(loaded)
    ensure_certificates(loaded, [GATEWAY])
    run_gateway(
        loaded,
        ready=partial(tell_ready, loaded),
        drain_timeout_s=drain_timeout_s,
    )


def tell_ready(deployment: "Deployment", _port: int) -> None:
    """Say on stdout that clients can connect, and beside it where to look."""
    typer.echo(f"ready: {deployment.gateway.url}/v1")
    typer.echo(f"console: {deployment.gateway.admin.url}/console; prfaas status {deployment.path}", err=True)


def run_gateway(
    deployment: "Deployment",
    *,
    ready: Callable[[int], None] | None = None,
    beside: Sequence[Callable[[], Coroutine[None, None, None]]] = (),
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
    following: "FollowingEngines | None" = None,
) -> None:
    """Serve until SIGINT or SIGTERM, with `beside` running meanwhile. Returns normally after a signal.

    `ready` is called with the port once clients can connect. `following`: the engines that this process starts and
    ends by the file; None: others do. After the signal nothing new is taken, and what is open
    may go on for `drain_timeout_s`, unless a second signal comes.

    Raises:
        CliError: the gateway's address can't be listened on.
    """
    import uvloop

    check_gateway(deployment)
    uvloop.run(_serve(deployment, ready, beside, drain_timeout_s, following))


def check_gateway(deployment: "Deployment") -> None:
    """Refuse early what would fail late, after engines have taken a minute to start.

    Raises:
        CliError: an address of the gateway can't be listened on.
        AdminTokenError: the operators' token can't be read.
        ClientsFileError: the clients can't be.
        TraceHeadersError: the headers for the collector can't be.
        ModuleNotFoundError: OpenTelemetry is not installed.
        DeploymentError: there is no such policy, or it does not take the file's parameters.
    """
    from prfaas.serving.control.planning_inputs import policy_of
    from prfaas.serving.engines.preparation import port_problem
    from prfaas.serving.secret_files import load_token

    policy_of(deployment)
    gateway, admin = deployment.gateway, deployment.gateway.admin
    for host, port, field in ((gateway.host, gateway.port, "port"), (admin.host, admin.port, "admin.port")):
        problem = port_problem(host, port)
        if problem is not None:
            raise CliError(f"gateway of {deployment.path}: {problem}; free it or change gateway.{field}")
    if admin.token_file is not None:
        load_token(admin.token_file)
    if gateway.clients is not None:
        from prfaas.serving.gateway.clients import Clients

        Clients(gateway.clients)
    if gateway.tracing is not None:
        check_tracing(gateway.tracing)


def check_tracing(tracing: "TracingConfig") -> None:
    """Raises TraceHeadersError and ModuleNotFoundError for what would keep traces from being made."""
    import prfaas.serving.tracing.otel  # noqa: F401  # its packages are an extra
    from prfaas.serving.secret_files import load_headers

    if tracing.headers_file is not None:
        load_headers(tracing.headers_file)


async def _serve(
    deployment: "Deployment",
    ready: Callable[[int], None] | None,
    beside: Sequence[Callable[[], Coroutine[None, None, None]]],
    drain_timeout_s: float,
    following: "FollowingEngines | None",
) -> None:
    import asyncio
    import contextlib
    import gc
    import signal

    from prfaas.serving.gateway import Draining
    from prfaas.serving.live import serve_live
    from prfaas.serving.reloading import Reloader

    loop = asyncio.get_running_loop()
    draining = Draining()
    reloader = Reloader(deployment)
    if following is not None:
        reloader.check(following.check)
        reloader.follow(following)
        reloader.on_left(following.left)
        reloader.restart = following.restart
    gateway = asyncio.create_task(serve_live(deployment, ready=ready, draining=draining, reloader=reloader))
    # What the imports made stays: without it, a full collection would look at all of it, for a tenth of a second.
    gc.collect()
    gc.freeze()
    others = [asyncio.create_task(make()) for make in beside]

    def on_signal() -> None:
        if draining.active:
            gateway.cancel()
        else:
            draining.begin()
            others.append(asyncio.create_task(_end(gateway, draining, drain_timeout_s)))

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(
        signal.SIGHUP, lambda: others.append(asyncio.create_task(reload_and_tell(reloader)))
    )
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await gateway
    finally:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def reload_and_tell(reloader: "Reloader") -> None:
    """Take the file on again, and write into the log what became of it: the reloader itself writes each change."""
    import logging

    from prfaas.core.deployment import DeploymentError
    from prfaas.serving.reloading import ReloadRefusedError

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


async def _end(gateway: "asyncio.Task[None]", draining: "Draining", within_s: float) -> None:
    """End the gateway when what is open has ended, or after `within_s`."""
    count = draining.open_requests
    if count:
        what = "1 request is" if count == 1 else f"{count} requests are"
        typer.echo(f"draining: {what} open and may go on for {within_s:g} s; again to end at once", err=True)
    if not await draining.settled(within_s):
        typer.echo(f"requests cut after {within_s:g} s: {draining.open_requests}", err=True)
    gateway.cancel()
