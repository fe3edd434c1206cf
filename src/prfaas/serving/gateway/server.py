"""Puts a deployment's gateway together and serves it.

aiohttp towards the clients, a pool of our own on httptools towards the engines (http_pool.py), uvloop below: measured
side by side by bench/gateway.py. An ASGI stack with a second HTTP library costs several times as much.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import EMPTY_PAYLOAD, StreamReader, web
from prometheus_client import CollectorRegistry, Gauge, ProcessCollector

from prfaas.core.deployment import GATEWAY, AppliedDeployment, Deployment, GatewayConfig
from prfaas.core.deployment.addresses import is_loopback
from prfaas.core.kv.model import KvModel
from prfaas.serving.certificates import CertificateFolder
from prfaas.serving.console.history import StateHistory
from prfaas.serving.console.served import Served
from prfaas.serving.control.plane import LivePlane
from prfaas.serving.descriptors import DescriptorBudget, raise_descriptor_limit
from prfaas.serving.gateway.admin import AdminRoutes
from prfaas.serving.gateway.admission import Admission
from prfaas.serving.gateway.answers.answering import Answering
from prfaas.serving.gateway.answers.shadow import Shadow
from prfaas.serving.gateway.bodies import error_body
from prfaas.serving.gateway.clients import Clients
from prfaas.serving.gateway.context import Draining, GatewayContext, GatewayOptions, ThreadOffload
from prfaas.serving.gateway.engine_client import EngineCallError, EngineClient
from prfaas.serving.gateway.generation import Generation
from prfaas.serving.gateway.http_pool import HttpPool, HttpTimes
from prfaas.serving.gateway.intake import Intake
from prfaas.serving.gateway.metrics import Metrics, StagingGauges
from prfaas.serving.gateway.prompts.request import Tenants
from prfaas.serving.gateway.prompts.tokenization import LocalTokenizer, Tokenization
from prfaas.serving.gateway.request_log import RequestLog, RequestRecord
from prfaas.serving.gateway.routes import Routes, http_logger
from prfaas.serving.gateway.told_requests import LedgerEntries, count_served
from prfaas.serving.gateway.ways.first_token import FirstTokenRules
from prfaas.serving.gateway.ways.hops import PrefillHops
from prfaas.serving.gateway.ways.kv_transfer import KvTransfers
from prfaas.serving.gateway.ways.prefix_moves import PrefixMoves
from prfaas.serving.gateway.ways.preparing import PrefillOrchestrator
from prfaas.serving.kv_ports import KvPorts
from prfaas.serving.ledger_file import Ledger
from prfaas.serving.pool.copier import PoolCopier
from prfaas.serving.reloading import Reloader
from prfaas.serving.running_deployment import RunningDeployment
from prfaas.serving.secret_files import load_key, load_token
from prfaas.serving.tasks import end_all
from prfaas.serving.tracing.collector import collector_of
from prfaas.serving.transport.io.tls_identity import TlsIdentity

if TYPE_CHECKING:
    from prfaas.serving.tracing.otel import OtelTracing

logger = logging.getLogger(__name__)

_INTRODUCTION_S = 1.0
_OWN_DESCRIPTORS = 64
_DESCRIPTORS_PER_RANK = 8
_IDLE_CLIENTS_S = 0.02
_LOOP_WATCH_S = 0.2
# Of one header, as long as the tokens of some proxies; and of all of a request together.
_MAX_HEADER_BYTES, _MAX_HEAD_BYTES = 64 << 10, 128 << 10
_HEAD_S = 10.0
_CONNECTION: dict[str, Any] = {
    "access_log": None,
    "logger": http_logger,
    # Compressed bodies would let a few bytes unfold into gigabytes.
    "auto_decompress": False,
    "max_line_size": _MAX_HEADER_BYTES,
    "max_field_size": _MAX_HEADER_BYTES,
    # What a client goes on to send after it was refused is read for so long, so that it reads why.
    "lingering_time": 2.0,
}
CERTIFICATES_S = 60.0
"""Between two looks at the certificates."""


async def watch_certificates(running: RunningDeployment, expires: Gauge) -> None:
    """Show until when the certificates on this machine are good, until cancelled: they are replaced meanwhile.

    `expires`: gets the Unix time of each certificate's end, by the name of its file.
    """
    while True:
        ends_s = await asyncio.to_thread(CertificateFolder(running.current).ends_s)
        expires.clear()
        for file, end_s in ends_s.items():
            expires.labels(file).set(end_s)
        await asyncio.sleep(CERTIFICATES_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayProcess:
    """What a gateway shares with its process."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    """What `GET /metrics` shows besides the gateway's own series."""
    draining: Draining = field(default_factory=Draining)
    """Lets the process end the gateway without cutting what is open."""
    tls: TlsIdentity | None = None
    """Who the gateway is, for instances that it speaks TLS with."""
    kv_model: KvModel | None = None
    """The model's KV; None where its size is unknown."""
    reloader: Reloader | None = None
    """Has the gateway follow the file; None: it stays as it is."""


class Gateway:
    """Everything behind the HTTP routes of one deployment. Made inside a running event loop."""

    def __init__(
        self, deployment: Deployment, plane: LivePlane, options: GatewayOptions, process: GatewayProcess
    ) -> None:
        """
        Raises:
            KeyFileError, ClientsFileError, AdminTokenError, TraceHeadersError, LedgerFileError: a file can't be used.
        """
        self._plane = plane
        self._reloader = reloader = process.reloader
        tls, config = process.tls, deployment.gateway
        self._running = running = RunningDeployment(deployment) if reloader is None else reloader.running
        key = load_key(deployment.security.key_file)
        json_threads = ThreadOffload(1, options.inline_json_bytes)
        tokenizer_threads = ThreadOffload(options.tokenizer_threads, options.inline_text_chars)
        self._threads = (json_threads, tokenizer_threads)
        # Standard series: CPU time, memory, file descriptors.
        ProcessCollector(registry=process.registry)
        self._http = HttpPool(_http_times(options, config), clock=plane.loop_clock, tls=tls)
        self._client = EngineClient(self._http)
        silence_s, clock = deployment.transfer.silence_s, plane.loop_clock
        self._kv_ports = KvPorts(GATEWAY, key, tls, silence_s, clock)
        self._transfers = KvTransfers({}, clock, options.abandon_timeout_s)
        self._transfers.follow(deployment.instances, self._kv_ports.of_ranks)
        self._metrics = Metrics(process.registry)
        self._metrics.background_tasks.set_function(lambda: len(self._transfers.abandoning))
        self.descriptors = DescriptorBudget(raise_descriptor_limit(), _reserved_descriptors(deployment))
        logger.info("file descriptors: %d at most", self.descriptors.limit)
        context = GatewayContext(
            running=running,
            plane=plane,
            client=self._client,
            metrics=self._metrics,
            options=options,
            json_threads=json_threads,
            max_model_len=deployment.model.max_model_len,
            draining=process.draining,
            descriptors=self.descriptors,
        )
        local = LocalTokenizer.of_model(deployment.model, tokenizer_threads)
        self._tokenization = Tokenization(local, deployment.model.served_name, context)
        self.clients = None if config.clients is None else Clients(config.clients)
        self._tenants = Tenants(key, deployment.security.tenant_header, deployment.security.tenant_weights)
        self._copier = PoolCopier(running, key, KvPorts(GATEWAY, key, tls, silence_s).of_pools(deployment))
        self._first_tokens = FirstTokenRules(context)
        prefill = self._prefills(key, context)
        self._shadow = Shadow(context)
        self._tracing = _tracing(deployment, self._metrics)
        ledger = config.ledger
        self._ledger = None if ledger is None else Ledger(ledger, self._metrics.ledger_lost.inc)
        self._served = Served()
        self._entries = LedgerEntries(running, plane.cluster_state.view, plane.experiment)
        log = RequestLog(options.kept_records, self._metrics, self._tracing, self._keep)
        admission = Admission(running, plane.waits)
        self._metrics.queue_wait_seconds.set_function(plane.waits.least)
        self._metrics.queue_limit_seconds.set_function(lambda: running.current.gateway.limits.queue_s)
        plane.listeners.told.append(StagingGauges(self._metrics, plane.loop_clock).told)
        generation = Generation(
            context,
            intake=Intake(context, tenants=self._tenants, admission=admission, log=log, clients=self.clients),
            tokenization=self._tokenization,
            prefill=prefill,
            answers=Answering(context, tokenization=self._tokenization, prefill=prefill, shadow=self._shadow),
        )
        self.routes = Routes(deployment, generation.handle, context, self.clients)
        self._history = StateHistory(lambda: plane.state() | {"served": self._served.told()})
        token_file = config.admin.token_file
        token = None if token_file is None else load_token(token_file)
        self.admin_routes = AdminRoutes(process.kv_model, log, context, self._history, token, reloader)
        if reloader is not None:
            reloader.follow(self)

    def _prefills(self, key: bytes, context: GatewayContext) -> PrefillOrchestrator:
        """The ways of KV."""
        plane = self._plane
        plane.listeners.frozen.append(
            lambda name, reason: self._client.bar(plane.members.instance(name), reason)
        )
        hops = PrefillHops(key, self._transfers, self._tenants, context)
        prefixes = PrefixMoves(hops, self._copier, self._tenants, context)
        return PrefillOrchestrator(hops, prefixes, self._first_tokens, context)

    def _keep(self, record: RequestRecord, total_s: float) -> None:
        """A request has ended after so many seconds: it is counted, and gets its row where there is a ledger."""
        count_served(self._served, record)
        row = None if self._ledger is None else self._entries.of(record, total_s)
        if self._ledger is not None and row is not None:
            self._ledger.add(row)
            self._plane.experiment.hear(row)

    def follow(self, _before: AppliedDeployment, applied: AppliedDeployment) -> None:
        """Serve another deployment from now on. What is open goes on."""
        running, config = applied.running, applied.said.gateway
        self._http.times = replace(self._http.times, first_byte_s=config.first_byte_s, idle_s=config.idle_s)
        self._transfers.follow(running.instances, self._kv_ports.of_ranks)
        self.descriptors.reserved = _reserved_descriptors(running)
        self._tenants.adopt(running.security.tenant_header, running.security.tenant_weights)
        self._first_tokens.follow()

    def loops(self, server: web.Server) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        """By name what is to run while the gateway serves. `server`: has the clients' connections."""
        self.descriptors.connections = lambda: len(server.connections)
        loops: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "LivePlane": self._plane.run,
            "introduction": self._introduce,
            "event loop": self._watch_loop,
            "StateHistory": self._history.run,
            "CertificateWatch": partial(watch_certificates, self._running, self._metrics.certificate_expires),
            "idle clients": partial(_close_idle_clients, server, self.descriptors),
        }
        if self._reloader is not None:
            loops["Reloader"] = self._reloader.run
        if self.clients is not None:
            loops["Clients"] = self.clients.watch
        return loops

    async def _introduce(self) -> None:
        """Ask every process that may decode how it makes token ids, until cancelled."""
        members = self._plane.members
        while True:
            for name in self._plane.router.decoders():
                with contextlib.suppress(EngineCallError):
                    await self._tokenization.learn(members.instance(name))
            await asyncio.sleep(_INTRODUCTION_S)

    async def _watch_loop(self) -> None:
        """Measure how late the event loop is, until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            due_s = clock() + _LOOP_WATCH_S
            await asyncio.sleep(_LOOP_WATCH_S)
            self._metrics.loop_lag_seconds.observe(max(clock() - due_s, 0.0))

    async def close(self) -> None:
        """Wait for the abandonments under way, and end connections and threads."""
        await self._shadow.close()
        await self._copier.close()
        await self._transfers.close()
        await self._client.close()
        if self._tracing is not None:
            await self._tracing.close()
        if self._ledger is not None:
            await asyncio.to_thread(self._ledger.close)
        for threads in self._threads:
            threads.close()


def _tracing(deployment: Deployment, metrics: Metrics) -> "OtelTracing | None":
    """What makes traces, where there is a collector for them. Raises TraceHeadersError and ModuleNotFoundError."""
    collector = collector_of(deployment.gateway.tracing)
    if collector is None:
        return None
    try:
        # Here, so that a gateway without traces neither needs nor loads OpenTelemetry.
        from prfaas.serving.tracing.otel import OtelTracing
    except ModuleNotFoundError as error:
        if collector.is_demanded:
            raise
        logger.warning("no traces, whatever OTEL_* variables say: %s is not installed", error.name)
        return None
    logger.info("traces go to %s", collector.endpoint)
    for outcome in ("sent", "failed", "dropped"):
        metrics.trace_spans.labels(outcome)
    return OtelTracing(
        collector, deployment.name, lambda outcome, spans: metrics.trace_spans.labels(outcome).inc(spans)
    )


def _http_times(options: GatewayOptions, config: GatewayConfig) -> HttpTimes:
    return HttpTimes(
        connect_s=options.connect_timeout_s,
        keepalive_s=options.engine_keepalive_s,
        tls_keepalive_s=options.tls_engine_keepalive_s,
        first_byte_s=config.first_byte_s,
        idle_s=config.idle_s,
    )


def _reserved_descriptors(deployment: Deployment) -> int:
    """What is open however few requests there are: files, and per rank observers, probes and event sockets."""
    ranks = sum(instance.kv_ranks for instance in deployment.instances)
    return _OWN_DESCRIPTORS + _DESCRIPTORS_PER_RANK * ranks


async def serve_gateway(
    deployment: Deployment,
    plane: LivePlane,
    process: GatewayProcess | None = None,
    *,
    ready: Callable[[int], None] | None = None,
    admin_ready: Callable[[int], None] | None = None,
    options: GatewayOptions | None = None,
) -> None:
    """Serve `deployment`'s gateway until cancelled. Engines may be started before or after.

    Args:
        plane: its loops run meanwhile; it is closed at the end.
        process: what the gateway shares with it; None: nothing.
        ready: called with the bound port once clients can connect.
        admin_ready: called with the operators' bound port before.

    Raises what `Gateway` does, and OSError where an address can't be bound.
    """
    process, config = process or GatewayProcess(), deployment.gateway
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(plane.close)
        gateway = Gateway(deployment, plane, options or GatewayOptions(), process)
        stack.push_async_callback(gateway.close)
        admin = _listening(gateway.admin_routes.application(), config.admin.host, config.admin.port)
        _, port = await stack.enter_async_context(admin)
        if admin_ready is not None:
            admin_ready(port)
        clients = _listening(gateway.routes.application(), config.host, config.port)
        server, port = await stack.enter_async_context(clients)
        if gateway.clients is None and not is_loopback(config.host):
            logger.warning("gateway.clients is left out: whoever reaches port %d may send prompts", port)
        # Serving goes on without what a loop fails to do; only a failure to start ends the process.
        background = [
            asyncio.create_task(plane.loop_failures.keep(loop, run))
            for loop, run in gateway.loops(server).items()
        ]
        stack.push_async_callback(end_all, *background)
        if ready is not None:
            ready(port)
        await asyncio.gather(*background, asyncio.Event().wait())


async def _close_idle_clients(server: web.Server, descriptors: DescriptorBudget) -> None:
    """Until cancelled. Clients that say nothing would leave no descriptor for those that ask: the kernel would accept
    their connections, and the loop could only reset them."""
    while True:
        await asyncio.sleep(_IDLE_CLIENTS_S)
        surplus = descriptors.too_idle(server.connections)
        if surplus:
            logger.warning(
                "%d idle connections of clients closed: file descriptors are short (limit %d)",
                len(surplus),
                descriptors.limit,
            )
        for connection in surplus:
            connection.force_close()


class _Connection(web.RequestHandler):
    """One connection of a client. aiohttp bounds each header; this one bounds a request's head, and its time."""

    __slots__ = ("_body", "_head_bytes", "_head_timer")

    def __init__(self, server: web.Server) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **_CONNECTION)
        self._body: StreamReader = EMPTY_PAYLOAD
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        before, in_body = self._request_count, not self._body.is_eof()
        super().data_received(data)
        if self._request_count != before:
            self._body = self._messages[-1][1]
            self._end_head()
        elif not in_body and data.strip():
            if self._head_timer is None:
                self._head_timer = self._loop.call_later(_HEAD_S, self.force_close)
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """In the API's form. aiohttp's quotes what came, which may be a key."""
        response = super().handle_error(request, status, exc, message)
        body = error_body(status, "What came is no HTTP request that is read here.")
        answer = web.Response(status=response.status, body=body, content_type="application/json")
        answer.force_close()
        return answer

    def connection_lost(self, exc: BaseException | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def _end_head(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


@contextlib.asynccontextmanager
async def _listening(app: web.Application, host: str, port: int) -> AsyncIterator[tuple[web.Server, int]]:
    """Serve at an address; its port is the bound one. Raises OSError."""
    # A client that leaves cancels its handler, and with it both hops.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    server, loop = runner.server, asyncio.get_running_loop()
    assert server is not None
    try:
        listening = await loop.create_server(lambda: _Connection(server), host, port, backlog=1024)
        try:
            yield server, int(listening.sockets[0].getsockname()[1])
        finally:
            listening.close()
    finally:
        await runner.cleanup()
