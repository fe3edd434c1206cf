"""The operators' port: metrics, the deployment's state, and what became of each request.

A page is added in `AdminRoutes.application`; the checks of who may ask stand before all of them.
"""

import hashlib
import hmac
from collections import deque
from dataclasses import replace

from aiohttp import web

from prfaas.core.deployment import DeploymentError, Instance
from prfaas.core.explanation import sentences
from prfaas.core.kv.model import KvModel
from prfaas.serving.console.history import StateHistory
from prfaas.serving.gateway.bodies import ApiError
from prfaas.serving.gateway.console import PAGE_PATH, Console
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.request_log import RequestLog
from prfaas.serving.gateway.routes import Handler, access, errors, instances_of, may_ask
from prfaas.serving.gateway.told_requests import explain
from prfaas.serving.reloading import Reloader, ReloadRefusedError

_SAFE_METHODS = ("GET", "HEAD")
_MOST_LEFT = 1024
_MOST_NOTICE_S = 3600.0


class AdminRoutes:
    """Handlers of the operators' port. Any other path is a 404."""

    def __init__(
        self,
        kv_model: KvModel | None,
        log: RequestLog,
        context: GatewayContext,
        history: StateHistory,
        token: str | None,
        reloader: Reloader | None = None,
    ) -> None:
        """`kv_model`: None where the size of the model's KV is unknown. `token`: None: none is asked for. `reloader`:
        None: the deployment does not change."""
        self._running = running = context.running
        # Records of requests outlive the instances that they name.
        self._left: deque[Instance] = deque(maxlen=_MOST_LEFT)
        self._reloader = reloader
        if reloader is not None:
            reloader.on_left(self._left.append)
        self._kv_model = kv_model
        self._context = context
        self._plane = context.plane
        self._log = log
        self._host = running.current.gateway.admin.host
        self._console = Console(running, context.plane, history, log, may_change=token is not None)
        self._token_hash = None if token is None else _hashed(token.encode())

    def application(self) -> web.Application:
        """The aiohttp application with the operators' pages."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            self._check(request)
            return await handler(request)

        app = web.Application(middlewares=[access, errors, guard])
        app.router.add_get("/metrics", self._get_metrics, allow_head=False)
        app.router.add_get("/prfaas/state", self._state, allow_head=False)
        app.router.add_get("/prfaas/requests/{request_id}", self._request, allow_head=False)
        app.router.add_post("/prfaas/reload", self._reload)
        app.router.add_post("/prfaas/instances/{name}/drain", self._drain)
        app.router.add_post("/prfaas/instances/{name}/undrain", self._undrain)
        app.router.add_post("/prfaas/instances/{name}/restart", self._restart)
        self._console.add_to(app.router)
        return app

    def _check(self, request: web.Request) -> None:
        """Raise ApiError for a request that must not be answered: 403 or 401."""
        # A web page whose own name resolves to this address (DNS rebinding) could read what a browser may reach.
        gateway = self._running.applied.said.gateway
        if not may_ask(request.host, self._host, (*gateway.hosts, gateway.host)):
            raise ApiError(
                403,
                "These pages answer only to addresses of this machine and to the names in gateway.host, "
                "gateway.admin.host and gateway.hosts.",
            )
        # A web page may send what changes something without being able to read the answer. Only the console may, and
        # only with the token, which no other page can know.
        if (
            request.method not in _SAFE_METHODS
            and "Origin" in request.headers
            and not self._is_console(request)
        ):
            raise ApiError(
                403,
                "A web page must not change the deployment. The console may where gateway.admin.token_file is set.",
            )
        if request.method in _SAFE_METHODS and (
            request.path == "/" or f"{request.path}/".startswith(f"{PAGE_PATH}/")
        ):
            return
        if self._token_hash is not None and not self._has_token(request):
            raise ApiError(
                401,
                "These pages need the header `Authorization: Bearer TOKEN` with the token in the file that "
                "gateway.admin.token_file names.",
            )

    def _is_console(self, request: web.Request) -> bool:
        host = request.host.lower()
        given = [origin.lower() for origin in request.headers.getall("Origin")]
        return self._token_hash is not None and given in ([f"http://{host}"], [f"https://{host}"])

    def _has_token(self, request: web.Request) -> bool:
        given = request.headers.getall("Authorization", [])
        scheme, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        if scheme.lower() != "bearer" or self._token_hash is None:
            return False
        # Of equal length and compared in a time that does not depend on where they differ.
        return hmac.compare_digest(
            _hashed(token.strip().encode("utf-8", "surrogateescape")), self._token_hash
        )

    async def _get_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(
            body=self._context.metrics.exposition(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _state(self, _request: web.Request) -> web.Response:
        return web.json_response(self._plane.state())

    async def _reload(self, request: web.Request) -> web.Response:
        if self._reloader is None:
            raise ApiError(409, "This gateway was started without a file that it could read again.")
        try:
            outcome = await self._reloader.reload(
                apply=request.query.get("check") != "true", expected=request.query.get("digest")
            )
        except DeploymentError as error:
            raise ApiError(400, f"{error}; nothing was changed") from None
        except ReloadRefusedError as error:
            raise ApiError(409, str(error)) from None
        return web.json_response(outcome.to_json())

    async def _drain(self, request: web.Request) -> web.Response:
        name = self._changeable(request)
        notice = request.query.get("notice_s")
        if notice is None:
            self._plane.drains.drain(name, wanted=True)
        else:
            self._plane.drains.give_notice(name, self._notice_s(name, notice))
        return web.json_response(instances_of(self._plane.state())[name])

    async def _undrain(self, request: web.Request) -> web.Response:
        name = self._changeable(request)
        self._plane.drains.drain(name, wanted=False)
        return web.json_response(instances_of(self._plane.state())[name])

    async def _restart(self, request: web.Request) -> web.Response:
        name = self._changeable(request)
        if self._reloader is None or not self._reloader.restart(name):
            raise ApiError(
                409,
                f"{name} is not started by this gateway's process; restart it as it was started (--command).",
            )
        return web.json_response(instances_of(self._plane.state())[name])

    def _notice_s(self, name: str, notice: str) -> float:
        """Seconds of a notice that is given to an instance. Raises ApiError."""
        running = self._running.current
        cluster = running.cluster_of(running.instance(name))
        if not cluster.preemptible:
            raise ApiError(
                409,
                f"Only preemptible instances are given notice; write `preemptible: true` at cluster {cluster.name}.",
            )
        try:
            notice_s = float(notice)
        except ValueError:
            notice_s = 0.0
        if not 0 < notice_s <= _MOST_NOTICE_S:
            raise ApiError(
                400, f"notice_s is {notice[:64]!r}; give the seconds until the instance is gone, up to 3600."
            )
        return notice_s

    def _changeable(self, request: web.Request) -> str:
        """The instance that a request names. Raises ApiError."""
        name = request.match_info["name"]
        names = [instance.name for instance in self._running.current.instances]
        if name not in names:
            raise ApiError(404, f"No instance is called {name[:64]}; there are {', '.join(names)}.")
        if any(name == instance.name for instance in self._running.applied.leaving):
            raise ApiError(409, f"{name} is about to leave; put it back into the deployment file and reload.")
        return name

    async def _request(self, request: web.Request) -> web.Response:
        request_id = request.match_info["request_id"]
        record = self._log.find(request_id)
        if record is None:
            raise ApiError(404, f"No request {request_id[:64]} is among the last {self._log.capacity}.")
        known = {each.name: each for each in (*self._left, *self._running.applied.leaving)}
        for instance in self._running.applied.said.instances:
            known.pop(instance.name, None)
        remembered = replace(self._running.applied, leaving=tuple(known.values())).running
        told = explain(record, remembered, self._kv_model)
        return web.json_response(told | {"text": list(sentences(told))})


def _hashed(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
