"""The HTTP routes: what a client may ask, and how a request becomes an order.

Which tenant a request belongs to, as the salt that keeps prefix caches apart.

Read-only pages for operators: the deployment's state, and one request explained.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from aiohttp import web

from prfaas.core.deployment import Deployment, ModelRef, is_loopback
from prfaas.core.kv import KvModel
from prfaas.core.scheduling import NoDecodeInstanceError
from prfaas.serving.gateway.bodies import ApiError, Json, error_body, parse_body, strip_owned
from prfaas.serving.gateway.control_plane import ControlPlane
from prfaas.serving.gateway.decode import Decoding
from prfaas.serving.gateway.metrics import Metrics
from prfaas.serving.gateway.options import GatewayOptions, ThreadOffload
from prfaas.serving.gateway.orchestrator import PrefillOrchestrator
from prfaas.serving.gateway.prompts import Endpoint, Prompt, prompt_of, samples_of
from prfaas.serving.gateway.request import ServingRequest
from prfaas.serving.gateway.request_log import RequestLog, RequestRecord, explained
from prfaas.serving.gateway.stream import REQUEST_ID_HEADER, route_headers

_PURPOSE = b"prfaas tenant\x00"
_SALT_BYTES = 16


class Headers(Protocol):
    """The headers of a request; names are compared without case."""

    def getall(self, key: str, default: list[str]) -> list[str]: ...


class Tenants:
    """Derives salts with the deployment's key, so that no client can guess or choose another's."""

    def __init__(self, key: bytes, header: str | None) -> None:
        """`header`: what names a tenant; None: everybody is the same one and shares prefixes."""
        self._key = key
        self._header = header

    def salt(self, headers: Headers) -> str:
        """32 hex digits, or "" when tenants are not told apart. A request without the header is the tenant "".

        Raises ApiError 400 for a header given twice: which of the two counts must not depend on who reads it.
        """
        if self._header is None:
            return ""
        values = headers.getall(self._header, [])
        if len(values) > 1:
            raise ApiError(400, f"The header {self._header} must not be given more than once.")
        value = values[0].encode("utf-8", "surrogateescape") if values else b""
        return hmac.digest(self._key, _PURPOSE + value, hashlib.sha256)[:_SALT_BYTES].hex()


class Inspection:
    """`GET /prfaas/state` and `GET /prfaas/requests/{id}`."""

    def __init__(
        self, deployment: Deployment, model: KvModel | None, plane: ControlPlane, records: RequestLog
    ) -> None:
        self._deployment = deployment
        self._model = model
        self._plane = plane
        self._records = records

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/prfaas/state", self._state, allow_head=False)
        app.router.add_get("/prfaas/requests/{request_id}", self._request, allow_head=False)

    async def _state(self, request: web.Request) -> web.Response:
        self._check_host(request)
        return web.json_response(self._plane.state())

    async def _request(self, request: web.Request) -> web.Response:
        self._check_host(request)
        request_id = request.match_info["request_id"]
        record = self._records.find(request_id)
        if record is None:
            raise ApiError(404, f"No request {request_id[:64]} is among the last {self._records.capacity}.")
        return web.json_response(explained(record, self._deployment, self._model))

    def _check_host(self, request: web.Request) -> None:
        """Refuse what a web page could ask by letting its own name point here (DNS rebinding)."""
        if not may_ask(request.host, self._deployment.gateway.host):
            raise ApiError(403, "These pages answer only to the gateway's own host name and to localhost.")


def may_ask(host_header: str, configured_host: str) -> bool:
    """Whether a Host header names this machine itself or the host that the gateway was told to listen on.

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


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)

# The only client headers an engine sees, and only in this form.
_TRACE_HEADERS = {
    "traceparent": re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"),
    "tracestate": re.compile(r"[ -~]{1,512}"),
}
_RECORD = web.RequestKey("prfaas_record", RequestRecord)


class Service:
    """Handlers of the gateway's routes. Anything not listed in `application` is a 404."""

    def __init__(
        self,
        model: ModelRef,
        *,
        plane: ControlPlane,
        driver: PrefillOrchestrator,
        decoding: Decoding,
        tenants: Tenants,
        records: RequestLog,
        inspection: Inspection,
        metrics: Metrics,
        thread_offload: ThreadOffload,
        options: GatewayOptions,
    ) -> None:
        self._model = model
        self._plane = plane
        self._driver = driver
        self._decoding = decoding
        self._tenants = tenants
        self._records = records
        self._inspection = inspection
        self._metrics = metrics
        self._offloop = thread_offload
        self._options = options
        self._created_s = int(time.time())

    def application(self) -> web.Application:
        """The aiohttp application with the allowed paths."""
        app = web.Application(client_max_size=self._options.max_body_bytes, middlewares=[_errors])
        app.router.add_get("/v1/models", self._models, allow_head=False)
        app.router.add_get("/health", self._get_health, allow_head=False)
        app.router.add_get("/metrics", self._get_metrics, allow_head=False)
        app.router.add_post(Endpoint.COMPLETIONS.path, self._completions)
        app.router.add_post(Endpoint.CHAT.path, self._chat)
        self._inspection.add_routes(app)
        return app

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

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, Endpoint.COMPLETIONS)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, Endpoint.CHAT)

    async def _generate(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        record = RequestRecord(uuid.uuid4().hex, str(endpoint), time.time(), time.perf_counter())
        request[_RECORD] = record
        self._records.add(record)
        self._metrics.in_flight_requests.inc()
        try:
            order = await self._order(request, endpoint, record)
            record.since("read", record.began_s)
            journey = await self._driver.prepare(order)
            if journey.uncached_tokens is not None:
                self._metrics.uncached_tokens.labels(str(journey.route)).inc(journey.uncached_tokens)
            response = await self._decoding.answer(request, order, journey)
            record.status = response.status
            record.outcome = "engine_error" if record.broken else _outcome(response.status)
            return response
        except ApiError as error:
            record.status, record.outcome = error.status, _outcome(error.status)
            raise
        except web.HTTPException as error:
            # The body is too large, or came in a way that aiohttp refuses.
            record.status, record.outcome = error.status, _outcome(error.status)
            raise
        except NoDecodeInstanceError:
            record.status, record.outcome = 503, "engine_error"
            raise ApiError(503, "No decode instance is available.") from None
        except (asyncio.CancelledError, ConnectionResetError):
            record.outcome = "cancelled"
            raise
        except Exception:
            record.status, record.outcome = 500, "engine_error"
            raise
        finally:
            record.since("total", record.began_s)
            self._metrics.in_flight_requests.dec()
            self._metrics.requests.labels(record.endpoint, record.route, record.outcome).inc()

    async def _order(self, request: web.Request, endpoint: Endpoint, record: RequestRecord) -> ServingRequest:
        """What the client wants. Raises ApiError."""
        salt = self._tenants.salt(request.headers)
        raw = await request.read()
        body, prompt = await self._offloop.run(len(raw), self._understood, raw, endpoint)
        adapter = str(body.get("model") or "")
        if adapter == self._model.served_name:
            adapter = ""
        record.model = adapter or self._model.served_name
        record.streamed = body.get("stream") is True
        return ServingRequest(
            endpoint=endpoint,
            body=body,
            size_bytes=len(raw),
            prompt=prompt,
            samples=samples_of(body) or 1,
            model=record.model,
            adapter=adapter,
            salt=salt,
            headers=_engine_headers(request.headers, record.request_id),
            record=record,
        )

    def _understood(self, raw: bytes, endpoint: Endpoint) -> tuple[Json, Prompt]:
        body = parse_body(raw)
        model = body.get("model")
        names = (self._model.served_name, *self._model.adapters)
        if model is not None and model not in names:
            known = ", ".join(f"`{name}`" for name in names)
            raise ApiError(
                404, f"The model `{str(model)[:200]}` does not exist; there is {known}.", param="model"
            )
        prompt = prompt_of(endpoint, body)
        return strip_owned(body), prompt


def instances_of(state: Mapping[str, Any]) -> dict[str, Json]:
    """Every instance of a control plane's state, by name."""
    return {
        name: instance
        for cluster in state["clusters"].values()
        for name, instance in cluster["instances"].items()
    }


def _outcome(status: int) -> str:
    return "ok" if status < 400 else "client_error" if status < 500 else "engine_error"


def _engine_headers(received: Mapping[str, str], request_id: str) -> dict[str, str]:
    headers = {"Content-Type": "application/json", REQUEST_ID_HEADER: request_id}
    for name, form in _TRACE_HEADERS.items():
        value = received.get(name)
        if value is not None and form.fullmatch(value):
            headers[name] = value
    return headers


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error that aiohttp or a handler raises, in the form OpenAI clients read."""
    try:
        return await handler(request)
    except ApiError as error:
        return _refusal(request, error.status, error.body())
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


def _refusal(request: web.Request, status: int, body: bytes) -> web.Response:
    record = request.get(_RECORD)
    headers = route_headers(record) if record is not None else {}
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)
