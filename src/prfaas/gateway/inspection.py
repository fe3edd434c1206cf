"""Read-only pages for operators: the deployment's state, and one request explained."""

import ipaddress

from aiohttp import web

from prfaas.deployment import Deployment, is_loopback
from prfaas.gateway.errors import ApiError
from prfaas.gateway.explanation import explained
from prfaas.gateway.plane import ControlPlane
from prfaas.gateway.records import Records
from prfaas.kvmodel import KvModel


class Inspection:
    """`GET /prfaas/state` and `GET /prfaas/requests/{id}`."""

    def __init__(
        self, deployment: Deployment, model: KvModel | None, plane: ControlPlane, records: Records
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
