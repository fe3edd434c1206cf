"""The HTTP routes: what a client may ask, and how its answer is relayed."""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping

import aiohttp
from aiohttp import web

from prfaas.gateway.bodies import Json, decode_body, parse_body, strip_owned, without_transfer_params
from prfaas.gateway.driver import Driver
from prfaas.gateway.engine_client import EngineClient, EngineError
from prfaas.gateway.errors import ApiError, error_body
from prfaas.gateway.health import HealthWatch
from prfaas.gateway.instances import InstancePool
from prfaas.gateway.journey import Journey
from prfaas.gateway.metrics import Metrics
from prfaas.gateway.offloop import OffLoop
from prfaas.gateway.options import GatewayOptions
from prfaas.gateway.prompts import Endpoint, Prompt, prompt_of, samples_of
from prfaas.scheduling import NoDecodeInstanceError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)

ROUTE_HEADER = "x-prfaas-route"
REQUEST_ID_HEADER = "X-Request-Id"
# The only client headers an engine sees, and only in this form.
_TRACE_HEADERS = {
    "traceparent": re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"),
    "tracestate": re.compile(r"[ -~]{1,512}"),
}


class Service:
    """Handlers of the gateway's routes. Anything not listed in `routes` is a 404."""

    def __init__(
        self,
        *,
        model: str,
        max_model_len: int,
        driver: Driver,
        client: EngineClient,
        pool: InstancePool,
        health: HealthWatch,
        metrics: Metrics,
        offloop: OffLoop,
        options: GatewayOptions,
    ) -> None:
        self._model = model
        self._max_model_len = max_model_len
        self._driver = driver
        self._client = client
        self._pool = pool
        self._health = health
        self._metrics = metrics
        self._offloop = offloop
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
        return app

    async def _models(self, _request: web.Request) -> web.Response:
        card = {
            "id": self._model,
            "object": "model",
            "created": self._created_s,
            "owned_by": "prfaas",
            "root": self._model,
            "parent": None,
            "max_model_len": self._max_model_len,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def _get_health(self, _request: web.Request) -> web.Response:
        view = self._pool.view()
        serving = any(i.decodes and i.healthy for i in view.instances)
        instances = {i.name: "up" if i.healthy else "down" for i in view.instances}
        return web.json_response(
            {"status": "ok" if serving else "no decode instance answers", "instances": instances},
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
        outcome, route = "engine_error", "none"
        self._metrics.in_flight_requests.inc()
        try:
            arrived_s = asyncio.get_running_loop().time()
            raw = await request.read()
            stripped, prompt, samples = await self._offloop.run(len(raw), self._understood, raw, endpoint)
            headers = _engine_headers(request)
            journey = await self._driver.prepare(prompt, samples, headers)
            route = str(journey.route)
            if journey.uncached_tokens is not None:
                self._metrics.uncached_tokens.labels(route).inc(journey.uncached_tokens)
            response = await self._decode(request, endpoint, stripped, len(raw), journey, headers, arrived_s)
            outcome = (
                "ok" if response.status < 400 else "client_error" if response.status < 500 else "engine_error"
            )
            return response
        except ApiError as error:
            outcome = "client_error" if error.status < 500 else "engine_error"
            raise
        except NoDecodeInstanceError:
            raise ApiError(503, "No decode instance is available.") from None
        except (asyncio.CancelledError, ConnectionResetError):
            outcome = "cancelled"
            raise
        finally:
            self._metrics.in_flight_requests.dec()
            self._metrics.requests.labels(str(endpoint), route, outcome).inc()

    def _understood(self, raw: bytes, endpoint: Endpoint) -> tuple[Json, Prompt, int]:
        body = parse_body(raw)
        model = body.get("model")
        if model is not None and model != self._model:
            name = str(model)[:200]
            raise ApiError(
                404, f"The model `{name}` does not exist; this one is `{self._model}`.", param="model"
            )
        prompt = prompt_of(endpoint, body)
        return strip_owned(body), prompt, samples_of(body) or 1

    async def _decode(
        self,
        request: web.Request,
        endpoint: Endpoint,
        stripped: Json,
        size_bytes: int,
        journey: Journey,
        headers: Mapping[str, str],
        arrived_s: float,
    ) -> web.StreamResponse:
        """Ask the journey's decode instance, or another one while none has answered, and relay what it
        says."""
        failed: set[str] = set()
        ended_well = False
        while True:
            size_bytes += 5 * len(journey.reuse_ids or ())
            body = await self._offloop.run(
                size_bytes, decode_body, stripped, journey.sealed, journey.reuse_ids
            )
            try:
                with self._pool.busy(journey.decode):
                    answer = await self._client.open(self._pool[journey.decode], endpoint.path, body, headers)
                    try:
                        if answer.status == 200:
                            self._driver.delivered(journey)
                        response = await self._relay(request, answer, journey, headers, arrived_s)
                        ended_well = answer.status == 200
                        return response
                    finally:
                        # Closing an unfinished answer is what makes vLLM abort the request.
                        answer.close()
            except EngineError as error:
                self._health.suspect(journey.decode, str(error), lost_cache=True)
                failed.add(journey.decode)
                other = self._driver.redirect(journey, failed)
                if other is None:
                    raise ApiError(503, f"The decode instance {journey.decode} does not answer.") from error
            finally:
                # The engine frees what it has taken; anything else would wait for its time to live.
                if not ended_well:
                    self._driver.abandon(journey, "the decode request did not end well")
            journey = other

    async def _relay(
        self,
        request: web.Request,
        answer: aiohttp.ClientResponse,
        journey: Journey,
        headers: Mapping[str, str],
        arrived_s: float,
    ) -> web.StreamResponse:
        kept = {
            "Content-Type": answer.headers.get("Content-Type", "application/json"),
            ROUTE_HEADER: journey.header(),
            REQUEST_ID_HEADER: headers[REQUEST_ID_HEADER],
        }
        if not kept["Content-Type"].startswith("text/event-stream"):
            try:
                whole = await answer.read()
            except (aiohttp.ClientError, OSError) as error:
                raise ApiError(502, f"The decode instance {journey.decode} died while answering.") from error
            self._observe_first_byte(journey, arrived_s)
            return web.Response(status=answer.status, body=without_transfer_params(whole), headers=kept)
        response = web.StreamResponse(status=answer.status, headers=kept | {"Cache-Control": "no-cache"})
        await response.prepare(request)
        first = True
        try:
            while chunk := await answer.content.readany():
                if first:
                    self._observe_first_byte(journey, arrived_s)
                    first = False
                await response.write(chunk)
        except aiohttp.ClientPayloadError as error:
            logger.warning("%s died in the middle of an answer: %s", journey.decode, error)
            self._health.suspect(journey.decode, str(error), lost_cache=True)
            sentence = f"The decode instance {journey.decode} died while answering."
            await response.write(b"\n\ndata: " + error_body(502, sentence) + b"\n\n")
        await response.write_eof()
        return response

    def _observe_first_byte(self, journey: Journey, arrived_s: float) -> None:
        now_s = asyncio.get_running_loop().time()
        self._metrics.ttft_seconds.labels(str(journey.route)).observe(now_s - arrived_s)


def _engine_headers(request: web.Request) -> dict[str, str]:
    headers = {"Content-Type": "application/json", REQUEST_ID_HEADER: uuid.uuid4().hex}
    for name, form in _TRACE_HEADERS.items():
        value = request.headers.get(name)
        if value is not None and form.fullmatch(value):
            headers[name] = value
    return headers


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error that aiohttp or a handler raises, in the form OpenAI clients read."""
    try:
        return await handler(request)
    except ApiError as error:
        return web.Response(status=error.status, body=error.body(), content_type="application/json")
    except web.HTTPException as error:
        sentence = {
            404: f"There is no {request.method} {request.path[:200]} here.",
            405: f"{request.path[:200]} does not take {request.method}.",
            413: "The request body is too large.",
        }.get(error.status, f"{error.reason}.")
        return web.Response(
            status=error.status, body=error_body(error.status, sentence), content_type="application/json"
        )
    except ConnectionResetError:
        raise
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        return web.Response(
            status=500,
            body=error_body(500, "The gateway failed on this request; its log says how."),
            content_type="application/json",
        )
