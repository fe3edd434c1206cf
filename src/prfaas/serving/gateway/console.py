"""The console: one page on the operators' port, and what it reads there.

The page and its scripts hold no data, so they are given without a token; everything that they fetch needs it.
"""

import asyncio
from typing import Annotated, cast, get_args

import msgspec
import orjson
from aiohttp import web

from prfaas import __version__
from prfaas.core.deployment import Deployment
from prfaas.serving.console.history import StateHistory
from prfaas.serving.console.pages import HEADERS, KINDS, page_files
from prfaas.serving.control.plane import LivePlane
from prfaas.serving.gateway.bodies import ApiError
from prfaas.serving.gateway.request_log import RequestLog
from prfaas.serving.gateway.told_requests import scenario_of, summary
from prfaas.serving.running_deployment import RunningDeployment
from prfaas.serving.secret_files import LedgerFileError
from prfaas.serving.worth import By, told

PAGE_PATH = "/console"
_MOST_STREAMS = 16
# Who reads nothing for so long has no place among them.
_SLOWEST_S = 30.0
_MOST_REQUESTS, _USUAL_REQUESTS = 1000, 100


class Console:
    """Handlers of the page, of its histories, and of the threshold that it may set."""

    def __init__(
        self,
        running: RunningDeployment,
        plane: LivePlane,
        history: StateHistory,
        log: RequestLog,
        *,
        may_change: bool,
    ) -> None:
        """`may_change`: whether the page may drain instances and set thresholds: only where a token is asked for."""
        self._running = running
        self._plane = plane
        self._history = history
        self._log = log
        self._may_change = may_change
        self._files = page_files()
        self._open_streams = 0
        self._reading = asyncio.Lock()

    @property
    def _deployment(self) -> Deployment:
        return self._running.applied.said

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the console's routes."""
        router.add_get("/", self._to_page, allow_head=False)
        router.add_get(PAGE_PATH, self._file, allow_head=False)
        router.add_get(PAGE_PATH + "/{file:.+}", self._file, allow_head=False)
        router.add_get("/prfaas/console", self._facts, allow_head=False)
        router.add_get("/prfaas/history", self._get_history, allow_head=False)
        router.add_get("/prfaas/events", self._events, allow_head=False)
        router.add_get("/prfaas/requests", self._requests, allow_head=False)
        router.add_get("/prfaas/scenario", self._scenario, allow_head=False)
        router.add_get("/prfaas/worth", self._worth, allow_head=False)
        router.add_post("/prfaas/clusters/{name}/threshold", self._threshold)

    async def _to_page(self, _request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": PAGE_PATH})

    async def _file(self, request: web.Request) -> web.Response:
        name = request.match_info.get("file", "index.html")
        found = self._files.get(name)
        if found is None:
            raise ApiError(404, f"The console has no file {name[:64]}.")
        kind = KINDS[name[name.rindex(".") :]]
        return web.Response(body=found, content_type=kind, charset="utf-8", headers=HEADERS)

    async def _facts(self, _request: web.Request) -> web.Response:
        """What the page must know before it draws anything."""
        return web.json_response(
            {
                "version": __version__,
                "deployment": self._deployment.name,
                "model": self._deployment.model.served_name,
                "policy": self._deployment.routing.policy,
                "may_change": self._may_change,
                "kept_requests": self._log.capacity,
                "keeps_ledger": self._deployment.gateway.ledger is not None,
            }
        )

    async def _get_history(self, request: web.Request) -> web.Response:
        after, step = _whole(request, "after", 0, 0), _whole(request, "step", 1, 1)
        return web.Response(
            body=self._history.document(after=after, step=step),
            content_type="application/json",
            charset="utf-8",
        )

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Frames as server-sent events, from the one after `Last-Event-ID` (or `after`) on."""
        after = _whole(request, "after", self._history.newest, 0)
        last = request.headers.get("Last-Event-ID", "")
        if last.isascii() and last.isdigit():
            after = int(last[:18])
        if self._open_streams >= _MOST_STREAMS:
            raise ApiError(
                503, f"{_MOST_STREAMS} streams of events are open; close a console.", retry_after_s=5
            )
        self._open_streams += 1
        try:
            response = web.StreamResponse(
                headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}
            )
            await response.prepare(request)
            # A number of another run of the gateway would never come.
            async for entry in self._history.follow(min(after, self._history.newest)):
                async with asyncio.timeout(_SLOWEST_S):
                    await response.write(b"id: %d\nevent: frame\ndata: %b\n\n" % (entry.number, entry.data))
            return response
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("a console reads nothing") from None
        finally:
            self._open_streams -= 1

    async def _requests(self, request: web.Request) -> web.Response:
        limit = _whole(request, "limit", _USUAL_REQUESTS, 1)
        if limit > _MOST_REQUESTS:
            raise ApiError(400, f"limit must be at most {_MOST_REQUESTS}, not {limit}.", param="limit")
        return web.json_response({"requests": [summary(record) for record in self._log.latest(limit)]})

    async def _scenario(self, _request: web.Request) -> web.Response:
        records, state, deployment = (
            self._log.latest(self._log.capacity),
            self._plane.state(),
            self._deployment,
        )

        def made() -> bytes | None:
            scenario = scenario_of(records, state, deployment)
            return None if scenario is None else orjson.dumps(scenario)

        # In a thread: the trace of many long prompts has millions of blocks, and requests must not wait for it.
        body = await asyncio.to_thread(made)
        if body is None:
            raise ApiError(
                409, "No request has told the length of its prompt yet: there is nothing to simulate."
            )
        return web.Response(body=body, content_type="application/json", charset="utf-8")

    async def _worth(self, request: web.Request) -> web.Response:
        """What `prfaas worth` says of this gateway's own ledger."""
        by, hours = request.query.get("by", "length"), _whole(request, "hours", 24, 0)
        if by not in get_args(By):
            raise ApiError(400, f"by must be one of {', '.join(get_args(By))}, not {by[:32]!r}.", param="by")
        ledger = self._deployment.gateway.ledger
        if ledger is None:
            raise ApiError(409, "No ledger is kept; gateway.ledger in the deployment file names one.")
        # A ledger may have millions of rows: one question at a time, beside the requests.
        async with self._reading:
            try:
                found = await asyncio.to_thread(told, [ledger.file], cast(By, by), hours)
            except LedgerFileError as error:
                raise ApiError(409, f"{error}.") from None
        return web.json_response(found)

    async def _threshold(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        names = [cluster.name for cluster in self._deployment.pd_clusters]
        if name not in names:
            raise ApiError(404, f"No PD cluster is called {name[:64]}; there are {', '.join(names)}.")
        wanted = _wanted_tokens(await request.read())
        try:
            self._plane.thresholds.hold(name, wanted)
        except ValueError as error:
            raise ApiError(409, f"The threshold of {name} can't be set: {error}.") from None
        cluster = self._plane.state()["clusters"][name]
        return web.json_response(
            {"threshold_tokens": cluster["threshold_tokens"], "threshold_held": cluster["threshold_held"]}
        )


def _whole(request: web.Request, name: str, usual: int, least: int) -> int:
    """A whole number of the query. Raises ApiError."""
    text = request.query.get(name)
    if text is None:
        return usual
    if not (text.isascii() and text.isdigit() and len(text) <= 18 and int(text) >= least):
        raise ApiError(400, f"{name} must be a whole number from {least} on, not {text[:32]!r}.", param=name)
    return int(text)


class _Wanted(msgspec.Struct):
    """A body that sets a threshold."""

    tokens: Annotated[float, msgspec.Meta(ge=1, le=1e9)] | None


def _wanted_tokens(body: bytes) -> float | None:
    """The threshold that a body sets; None: it is to be searched again. Raises ApiError."""
    try:
        return msgspec.json.decode(body, type=_Wanted).tokens
    except (msgspec.DecodeError, UnicodeDecodeError):
        sentence = 'The body must be {"tokens": 8192}, any number from 1 to 1e9, or null for a searched one.'
        raise ApiError(400, sentence, param="tokens") from None
