"""The HTTP routes that clients reach."""

import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from prfaas import __version__
from prfaas.core.deployment import Deployment, is_loopback
from prfaas.serving.gateway.bodies import FAILED, ApiError, Json, error_body, unknown_model
from prfaas.serving.gateway.clients import Clients
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.dialects import dialect_of
from prfaas.serving.gateway.prompts.prompt import Endpoint
from prfaas.serving.gateway.request_log import RECORD, RequestRecord
from prfaas.serving.logs import PEER

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

access_logger = logging.getLogger("prfaas.access")
logger = logging.getLogger(__name__)

_SHOWN_CHARACTERS = 200


class _ClientsFaults(logging.Filter):
    """aiohttp logs what its peers do with tracebacks as of errors.

    Of what it can't parse, which the traceback quotes, only the kind of mistake is kept. A client that has left, which
    the request may learn only when it writes, has a line of its own (`access`).
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, ConnectionResetError):
            return False
        if isinstance(error, HttpProcessingError):
            record.levelno, record.levelname = logging.INFO, "INFO"
            record.msg, record.args = (
                f"what came from %s is no HTTP request ({type(error).__name__})",
                record.args,
            )
            record.exc_info = record.exc_text = None
        return True


http_logger = logging.getLogger("prfaas.http")
"""For aiohttp's server."""
http_logger.addFilter(_ClientsFaults())


@web.middleware
async def access(request: web.Request, handler: Handler) -> web.StreamResponse:
    """One line per request when it has ended. It holds nothing of the query, the headers or the body."""
    began_s = time.perf_counter()
    peer = PEER.set(request.remote)
    status: int | None = None
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        if access_logger.isEnabledFor(logging.INFO):
            _write_line(request, status, time.perf_counter() - began_s)
        PEER.reset(peer)


def _write_line(request: web.Request, status: int | None, duration_s: float) -> None:
    fields: dict[str, object] = {
        "method": request.method[:_SHOWN_CHARACTERS],
        "path": request.rel_url.raw_path[:_SHOWN_CHARACTERS],
        "status": status,
    }
    record: RequestRecord | None = request.get(RECORD)
    if record is not None:
        ttft_s = record.steps_s.get("first_byte")
        fields |= {
            "route": record.route,
            "outcome": record.outcome,
            "prompt_tokens": record.prompt_tokens,
            "answer_tokens": record.answer_tokens,
            "ttft_s": None if ttft_s is None else round(ttft_s, 6),
            "request_id": record.request_id,
        }
        if record.trace_id is not None:
            fields["trace_id"] = record.trace_id
    fields["duration_s"] = round(duration_s, 6)
    access_logger.info("answered" if status is not None else "left by its client", extra={"fields": fields})


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error that aiohttp or a handler raises, in the form that clients of the path read."""
    try:
        return await handler(request)
    except ApiError as error:
        return _refusal(request, error.status, error.body(), error.headers())
    except web.HTTPException as error:
        sentence = {
            404: f"There is no {request.method} {request.path[:_SHOWN_CHARACTERS]} here.",
            405: f"{request.path[:_SHOWN_CHARACTERS]} does not take {request.method}.",
            413: "The request body is too large.",
        }.get(error.status, f"{error.reason}.")
        return _refusal(request, error.status, error_body(error.status, sentence))
    except (HttpProcessingError, web.RequestPayloadError):
        return _refusal(request, 400, error_body(400, "The request body does not come as its headers say."))
    except ConnectionResetError:
        raise
    except Exception:
        resource = request.match_info.route.resource
        logger.exception("a request for %s failed", resource.canonical if resource is not None else "nothing")
        return _refusal(request, 500, error_body(500, FAILED))


def _refusal(
    request: web.Request, status: int, body: bytes, more_headers: Mapping[str, str] | None = None
) -> web.Response:
    record = request.get(RECORD)
    headers = (record.headers() if record is not None else {}) | dict(more_headers or {})
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = dialect_of(request.path).refusal(body)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


class Routes:
    """Handlers of the clients' routes. Any other path is a 404; operators' pages are on a port of their own."""

    def __init__(
        self,
        deployment: Deployment,
        generate: Callable[[Endpoint, web.Request], Awaitable[web.StreamResponse]],
        context: GatewayContext,
        clients: Clients | None,
    ) -> None:
        """`generate`: serves what engines answer. `clients`: who may send; None: everybody."""
        self._model = deployment.model
        self._generate = generate
        self._context = context
        self._created_s = int(time.time())
        self._clients = clients

    def application(self) -> web.Application:
        """The aiohttp application with the allowed paths."""
        ask = self._no_web_pages if self._clients is None else self._clients.ask
        app = web.Application(
            client_max_size=self._context.options.max_body_bytes, middlewares=[access, errors, ask]
        )
        app.router.add_get("/v1/models", self._models, allow_head=False)
        # Names of models have slashes.
        app.router.add_get("/v1/models/{model:.+}", self._model_card, allow_head=False)
        app.router.add_get("/health", self._get_health)
        app.router.add_get("/ready", self._get_ready)
        app.router.add_get("/version", self._get_version, allow_head=False)
        for endpoint in Endpoint:
            app.router.add_post(endpoint.path, partial(self._generate, endpoint))
        return app

    @web.middleware
    async def _no_web_pages(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse what a browser sends for a page whose name was pointed at this address: it has no key to show."""
        gateway = self._context.running.current.gateway
        for origin in request.headers.getall("Origin", ()):
            if not may_ask(origin.partition("://")[2], gateway.host, gateway.hosts):
                raise ApiError(
                    403, "Web pages may ask here from this machine and from the names in gateway.hosts."
                )
        return await handler(request)

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self._cards()})

    async def _model_card(self, request: web.Request) -> web.Response:
        wanted, cards = request.match_info["model"], self._cards()
        card = next((card for card in cards if card["id"] == wanted), None)
        if card is None:
            raise unknown_model(wanted, self._model)
        return web.json_response(card)

    def _cards(self) -> list[Json]:
        """The model, then its adapters."""
        base = self._model.served_name
        return [
            {
                "id": name,
                "object": "model",
                "created": self._created_s,
                "owned_by": "prfaas",
                "root": name,
                "parent": None if name == base else base,
                "max_model_len": self._model.max_model_len,
            }
            for name in (base, *self._model.adapters)
        ]

    async def _get_health(self, _request: web.Request) -> web.Response:
        instances = instances_of(self._context.plane.state())
        serving = _can_decode(instances)
        return web.json_response(
            {
                "status": "ok" if serving else "no decode instance answers",
                "instances": {name: "up" if i["healthy"] else "down" for name, i in instances.items()},
            },
            status=200 if serving else 503,
        )

    async def _get_ready(self, _request: web.Request) -> web.Response:
        """Whether new clients should be sent here."""
        if self._context.draining.active:
            return web.json_response({"status": "draining"}, status=503)
        if not _can_decode(instances_of(self._context.plane.state())):
            return web.json_response({"status": "no decode instance answers"}, status=503)
        return web.json_response({"status": "ready"})

    async def _get_version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": __version__})


def _can_decode(instances: Mapping[str, Json]) -> bool:
    return any(
        "decode" in instance["role"] and instance["healthy"] and instance["drain"] is None
        for instance in instances.values()
    )


def instances_of(state: Mapping[str, Any]) -> dict[str, Json]:
    """Every instance of a control plane's state, by name."""
    return {
        name: instance
        for cluster in state["clusters"].values()
        for name, instance in cluster["instances"].items()
    }


def may_ask(host_header: str, configured_host: str, further_hosts: Collection[str] = ()) -> bool:
    """Whether a Host header names this machine itself or a host that the deployment file names.

    Behind a wildcard every address is one that it listens on; a name is not, since anybody may point one here.
    """
    host = _host(host_header).lower().rstrip(".")
    if is_loopback(host) or host == configured_host.lower() or host in further_hosts:
        return True
    try:
        address = ipaddress.ip_address(host)
        return ipaddress.ip_address(configured_host).is_unspecified and not address.is_unspecified
    except ValueError:
        return False


def _host(host_header: str) -> str:
    """`[::1]:80`, `::1` → `::1`; `name:80` → `name`."""
    if host_header.startswith("["):
        return host_header[1:].partition("]")[0]
    return host_header if host_header.count(":") > 1 else host_header.partition(":")[0]
