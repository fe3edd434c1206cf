"""The HTTP routes of the gateway, and the form of its errors."""

import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

from aiohttp import web

from prfaas.core.deployment import Deployment, is_loopback
from prfaas.core.kv import KvModel
from prfaas.serving.gateway.bodies import ApiError, Json, error_body
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.control_plane import ControlPlane
from prfaas.serving.gateway.generation import RECORD, Generation
from prfaas.serving.gateway.prompts import Endpoint
from prfaas.serving.gateway.request_log import RequestLog, explain

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)


class Routes:
    """Handlers of the gateway's routes. Any other path is a 404."""

    def __init__(
        self,
        deployment: Deployment,
        generation: Generation,
        inspection: "Inspection",
        context: GatewayContext,
    ) -> None:
        self._model = deployment.model
        self._generation = generation
        self._inspection = inspection
        self._plane = context.plane
        self._metrics = context.metrics
        self._max_body_bytes = context.options.max_body_bytes
        self._created_s = int(time.time())

    def application(self) -> web.Application:
        """The aiohttp application with the allowed paths."""
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[_errors])
        app.router.add_get("/v1/models", self._models, allow_head=False)
        app.router.add_get("/health", self._get_health, allow_head=False)
        app.router.add_get("/metrics", self._get_metrics, allow_head=False)
        app.router.add_post(Endpoint.COMPLETIONS.path, self._completions)
        app.router.add_post(Endpoint.CHAT.path, self._chat)
        self._inspection.add_routes(app)
        return app

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        return await self._generation.handle(http, Endpoint.COMPLETIONS)

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        return await self._generation.handle(http, Endpoint.CHAT)

    async def _models(self, _request: web.Request) -> web.Response:
        cards = [self._card(self._model.served_name, None)]
        cards += [self._card(name, self._model.served_name) for name in self._model.adapters]
        return web.json_response({"object": "list", "data": cards})

    def _card(self, name: str, parent: str | None) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "prfaas",
            "root": name,
            "parent": parent,
            "max_model_len": self._model.max_model_len,
        }

    async def _get_health(self, _request: web.Request) -> web.Response:
        instances = instances_of(self._plane.state())
        serving = any("decode" in i["role"] and i["healthy"] for i in instances.values())
        return web.json_response(
            {
                "status": "ok" if serving else "no decode instance answers",
                "instances": {name: "up" if i["healthy"] else "down" for name, i in instances.items()},
            },
            status=200 if serving else 503,
        )

    async def _get_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.exposition(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )


class Inspection:
    """For operators: `GET /prfaas/state` and `GET /prfaas/requests/{id}`."""

    def __init__(
        self, deployment: Deployment, kv_model: KvModel | None, plane: ControlPlane, log: RequestLog
    ) -> None:
        """`kv_model`: None where the size of the model's KV is unknown."""
        self._deployment = deployment
        self._kv_model = kv_model
        self._plane = plane
        self._log = log

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/prfaas/state", self._state, allow_head=False)
        app.router.add_get("/prfaas/requests/{request_id}", self._request, allow_head=False)

    async def _state(self, request: web.Request) -> web.Response:
        self._check_host(request)
        return web.json_response(self._plane.state())

    async def _request(self, request: web.Request) -> web.Response:
        self._check_host(request)
        request_id = request.match_info["request_id"]
        record = self._log.find(request_id)
        if record is None:
            raise ApiError(404, f"No request {request_id[:64]} is among the last {self._log.capacity}.")
        return web.json_response(explain(record, self._deployment, self._kv_model))

    def _check_host(self, request: web.Request) -> None:
        """Refuse a web page whose own name resolves to this address (DNS rebinding)."""
        if not may_ask(request.host, self._deployment.gateway.host):
            raise ApiError(403, "These pages answer only to the gateway's own host name and to localhost.")


def may_ask(host_header: str, configured_host: str) -> bool:
    """Whether a Host header names this machine itself or the host that the deployment file names.

    Behind a wildcard every address is one that it listens on; a name is not, since anybody may point one here.
    """
    host = _host(host_header).lower().rstrip(".")
    if is_loopback(host) or host == configured_host.lower():
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


def instances_of(state: Mapping[str, Any]) -> dict[str, Json]:
    """Every instance of a control plane's state, by name."""
    return {
        name: instance
        for cluster in state["clusters"].values()
        for name, instance in cluster["instances"].items()
    }


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error that aiohttp or a handler raises, in the form OpenAI clients read."""
    try:
        return await handler(request)
    except ApiError as error:
        return _refusal(request, error.status, error.body(), error.headers())
    except web.HTTPException as error:
        sentence = {
            404: f"There is no {request.method} {request.path[:200]} here.",
            405: f"{request.path[:200]} does not take {request.method}.",
            413: "The request body is too large.",
        }.get(error.status, f"{error.reason}.")
        return _refusal(request, error.status, error_body(error.status, sentence))
    except ConnectionResetError:
        raise
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        sentence = "The gateway failed on this request; its log says how."
        return _refusal(request, 500, error_body(500, sentence))


def _refusal(
    request: web.Request, status: int, body: bytes, more_headers: Mapping[str, str] = MappingProxyType({})
) -> web.Response:
    record = request.get(RECORD)
    headers = {**(record.headers() if record is not None else {}), **more_headers}
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)
