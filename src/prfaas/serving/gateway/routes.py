"""The HTTP routes that clients reach."""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from aiohttp import web

from prfaas import __version__
from prfaas.core.deployment import Deployment
from prfaas.serving.gateway.bodies import ApiError, Json
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.generation import Generation
from prfaas.serving.gateway.middleware import access, errors
from prfaas.serving.gateway.prompts import Endpoint


class Routes:
    """Handlers of the clients' routes. Any other path is a 404; operators' pages are on a port of their own."""

    def __init__(self, deployment: Deployment, generation: Generation, context: GatewayContext) -> None:
        self._model = deployment.model
        self._generation = generation
        self._plane = context.plane
        self._draining = context.draining
        self._max_body_bytes = context.options.max_body_bytes
        self._created_s = int(time.time())

    def application(self) -> web.Application:
        """The aiohttp application with the allowed paths."""
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[access, errors])
        app.router.add_get("/v1/models", self._models, allow_head=False)
        # Names of models have slashes.
        app.router.add_get("/v1/models/{model:.+}", self._model_card, allow_head=False)
        app.router.add_get("/health", self._get_health)
        app.router.add_get("/ready", self._get_ready)
        app.router.add_get("/version", self._get_version, allow_head=False)
        for endpoint in Endpoint:
            app.router.add_post(endpoint.path, partial(self._generation.handle, endpoint=endpoint))
        return app

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self._cards()})

    async def _model_card(self, request: web.Request) -> web.Response:
        wanted = request.match_info["model"]
        cards = self._cards()
        for card in cards:
            if card["id"] == wanted:
                return web.json_response(card)
        known = ", ".join(f"`{card['id']}`" for card in cards)
        raise ApiError(404, f"The model `{wanted[:200]}` does not exist; there is {known}.", param="model")

    def _cards(self) -> list[Json]:
        """The model, then its adapters."""
        base = self._model.served_name
        return [self._card(base, None), *(self._card(name, base) for name in self._model.adapters)]

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
        if self._draining.active:
            return web.json_response({"status": "draining"}, status=503)
        if not _can_decode(instances_of(self._plane.state())):
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
