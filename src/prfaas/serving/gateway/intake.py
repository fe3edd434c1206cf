"""Requests as they come: taken on or refused, with a record, then read and parsed."""

import asyncio
import ipaddress
import re
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from aiohttp import web

from prfaas.core.deployment import Deployment
from prfaas.core.route_header import REQUEST_ID_HEADER
from prfaas.serving.gateway.admission import Admission, AdmittedRequest
from prfaas.serving.gateway.bodies import ApiError, Json, parse_body, strip_owned, unknown_model
from prfaas.serving.gateway.clients import CLIENT, Clients
from prfaas.serving.gateway.context import GatewayContext, GatewayOptions
from prfaas.serving.gateway.prompts.prompt import (
    Endpoint,
    Prompt,
    answers_of,
    can_resume,
    check_media,
    is_seeded,
    media_parts,
    prompt_of,
    samples_of,
)
from prfaas.serving.gateway.prompts.request import ServingRequest, Tenants, is_usual
from prfaas.serving.gateway.request_log import RECORD, RequestLog, RequestRecord, WaitsFor

_DESCRIPTORS_RETRY_S = 1.0
_JSON = "application/json"
# The only client headers that an engine sees, and only in this form.
_TRACE_HEADERS = {
    "traceparent": re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"),
    "tracestate": re.compile(r"[ -~]{1,512}"),
}


class _AwaitedBody:
    """A body that has not come whole. It may take its time, and longer for what has come of it; then its task is ended.

    `asyncio.timeout` does the same for ten times as much.
    """

    def __init__(self, options: GatewayOptions, remote: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.network = _network_of(remote)
        self.size_bytes = 0
        self.is_given_up = False
        self._options, self._task, self._cancelling = options, task, task.cancelling()
        self._loop = asyncio.get_running_loop()
        self._begun_s = self._loop.time()
        self._timer = self._loop.call_later(options.body_grace_s, self._look)

    def give_up(self) -> None:
        """It is not waited for any longer."""
        self.is_given_up = True
        self._task.cancel()

    def end(self) -> None:
        """It has come, or nobody waits for it."""
        self._timer.cancel()

    def ended_alone(self) -> bool:
        """Of a task that was cancelled: only because its body was given up."""
        return self.is_given_up and self._task.uncancel() <= self._cancelling

    def _look(self) -> None:
        options = self._options
        due_s = self._begun_s + options.body_grace_s + self.size_bytes / options.least_body_bytes_per_s
        if self._loop.time() < due_s:
            self._timer = self._loop.call_at(due_s, self._look)
        else:
            self.give_up()


class BodyReader:
    """Reads bodies, each within its time, so that clients that send slowly hold nothing but their own connections.

    Where too many are awaited, one is given up: of the address that has most, the one that has been silent longest.
    """

    def __init__(self, context: GatewayContext) -> None:
        self._options = context.options
        self._running = context.running
        # The first is the one that has been silent longest.
        self._awaited: OrderedDict[_AwaitedBody, None] = OrderedDict()
        self._count_of: Counter[str] = Counter()

    async def read(self, http: web.Request, hold: Callable[[int], None]) -> bytes:
        """The body.

        Args:
            http: the request, its head read.
            hold: called with the bytes of every piece; raises ApiError when they are too many.

        Raises:
            ApiError: 408, it does not come in time; 415, it is in a form that is not read here.
            web.HTTPRequestEntityTooLarge: it is too large.
        """
        _check_form(http)
        if http.content.is_eof():
            return await self._pieces(http, hold, None)
        body = _AwaitedBody(self._options, http.remote or "")
        try:
            self._await(body)
            return await self._pieces(http, hold, body)
        except asyncio.CancelledError:
            if not body.ended_alone():
                raise
            sentence = "The request body does not come, or too slowly."
            raise ApiError(408, sentence, reason="slow-body") from None
        finally:
            body.end()
            self._forget(body)

    async def _pieces(
        self, http: web.Request, hold: Callable[[int], None], body: _AwaitedBody | None
    ) -> bytes:
        """`body`: where it says what has come of it; None: all of it has."""
        most_bytes, size_bytes = self._options.max_body_bytes, http.content_length or 0
        if size_bytes > most_bytes:
            raise web.HTTPRequestEntityTooLarge(most_bytes, size_bytes)
        pieces: list[bytes] = []
        size_bytes = 0
        while piece := await http.content.readany():
            size_bytes += len(piece)
            if size_bytes > most_bytes:
                raise web.HTTPRequestEntityTooLarge(most_bytes, size_bytes)
            hold(len(piece))
            pieces.append(piece)
            if body is not None and not body.is_given_up:
                body.size_bytes = size_bytes
                self._awaited.move_to_end(body)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _await(self, body: _AwaitedBody) -> None:
        self._awaited[body] = None
        self._count_of[body.network] += 1
        if len(self._awaited) > self._running.current.gateway.limits.requests:
            ((most, _),) = self._count_of.most_common(1)
            silent = next(each for each in self._awaited if each.network == most)
            self._forget(silent)
            silent.give_up()

    def _forget(self, body: _AwaitedBody) -> None:
        """Idempotent."""
        if body in self._awaited:
            del self._awaited[body]
            self._count_of[body.network] -= 1
            if not self._count_of[body.network]:
                del self._count_of[body.network]


def parsed_body(raw: bytes, endpoint: Endpoint, deployment: Deployment) -> tuple[Json, Prompt, bool]:
    """What is left of a body without what could steer an engine, its prompt, and whether that is more than text.

    Raises:
        ApiError: 4xx with one sentence for what the client got wrong.
    """
    body = parse_body(raw, deployment.gateway.limits.body_values)
    model = body.get("model")
    # As in vLLM, no name at all means the base model. What is no name is the decode engine's to refuse.
    if (
        isinstance(model, str)
        and model
        and model not in (deployment.model.served_name, *deployment.model.adapters)
    ):
        raise unknown_model(model, deployment.model)
    # vLLM's CPU backend (0.32) ends when a prompt with a seed is prefilled in more than one chunk.
    on_cpus = any(cluster.hardware == "cpu" for cluster in deployment.pd_clusters)
    sampling = body.get("sampling_params")
    if on_cpus and (is_seeded(body) or (isinstance(sampling, dict) and is_seeded(sampling))):
        raise ApiError(
            400,
            "`seed` is not taken here: vLLM's CPU backend ends when it prefills a seeded prompt in more than one "
            "step. Leave `seed` out, or set `temperature` to 0, where a seed changes nothing.",
            param="seed",
        )
    media = tuple(media_parts(endpoint, body))
    check_media(media, deployment.gateway.media_domains)
    prompt = prompt_of(endpoint, body, has_media=bool(media))
    stripped = strip_owned(body)
    if endpoint is Endpoint.RESPONSES:
        # No later request would find what one engine stores, and vLLM never drops it.
        stripped["store"] = False
    return stripped, prompt, bool(media)


def _engine_headers(received: Mapping[str, str], record: RequestRecord) -> dict[str, str]:
    headers = {"Content-Type": "application/json", REQUEST_ID_HEADER: record.request_id}
    if record.trace_headers is not None:
        return headers | dict(record.trace_headers)
    for name, form in _TRACE_HEADERS.items():
        value = received.get(name)
        if value is not None and form.fullmatch(value):
            headers[name] = value
    return headers


class Intake:
    """Takes requests on while the gateway has room for them."""

    def __init__(
        self,
        context: GatewayContext,
        *,
        tenants: Tenants,
        admission: Admission,
        log: RequestLog,
        clients: Clients | None,
    ) -> None:
        """`clients`: who may send; None: everybody."""
        self._context = context
        self._tenants = tenants
        self._admission = admission
        self._log = log
        self._clients = clients
        self._bodies = BodyReader(context)

    @asynccontextmanager
    async def taking(
        self, http: web.Request, endpoint: Endpoint
    ) -> AsyncIterator[tuple[ServingRequest, AdmittedRequest]]:
        """While a request is open, if the gateway can take it.

        It is refused before its body is read where that is known by then, and counts once the body is complete.

        Yields what the client wants, less what could steer an engine, and what it holds of the limits. Raises ApiError,
        and web.HTTPException for a body.
        """
        with self._log.recording(str(endpoint), http.headers) as record:
            http[RECORD] = record
            client = http.get(CLIENT)
            tenants = self._tenants
            if client is None:
                tenant, is_named = tenants.salt(http.headers), tenants.names(http.headers)
            else:
                tenant, is_named = tenants.of_client(client.name, client.share), True
            if is_named:
                record.tenant = tenants.shown(tenant) if client is None else client.name
            # A named tenant's numbers are about prefixes under its own salt: they tell nothing of others' prompts.
            tells_all = self._context.running.current.gateway.route_header == "full"
            record.tells_details = tells_all or is_named
            record.shares_unnamed = tenants.are_told_apart and not record.tells_details
            if client is not None and self._clients is not None:
                self._clients.count(client)
                if client.priority == "low":
                    self._admission.check_spare()
            with (
                self._context.draining.request(),
                self._admission.admitted(tenant, http.headers, http.content_length) as admitted,
            ):
                async with admitted.in_time():
                    raw = await self._bodies.read(http, admitted.hold)
                with self._context.descriptors.serving(http.protocol):
                    self._check_descriptors()
                    admitted.begin()
                    async with admitted.in_time():
                        request = await self._parsed(http.headers, raw, endpoint, record, tenant)
                    admitted.widen(request.answers)
                    yield request, admitted

    async def _parsed(
        self, headers: Mapping[str, str], raw: bytes, endpoint: Endpoint, record: RequestRecord, salt: str
    ) -> ServingRequest:
        """The request, its body checked. Raises ApiError."""
        deployment = self._context.running.current
        body, prompt, has_media = await self._context.json_threads.run(
            len(raw), parsed_body, raw, endpoint, deployment
        )
        model, base = body.get("model"), deployment.model.served_name
        adapter = model if isinstance(model, str) and model != base else ""
        record.model = adapter or base
        record.streamed = body.get("stream") is True
        record.since("read", record.began_s)
        record.waits_for = WaitsFor.TOKENS
        return ServingRequest(
            endpoint=endpoint,
            body=body,
            size_bytes=len(raw),
            prompt=prompt,
            samples=samples_of(endpoint, body),
            answers=answers_of(endpoint, body),
            has_media=has_media,
            resumes=can_resume(endpoint, body),
            is_usual=is_usual(body),
            model=record.model,
            adapter=adapter,
            salt=salt if endpoint.generates else "",
            headers=_engine_headers(headers, record),
            record=record,
        )

    def _check_descriptors(self) -> None:
        descriptors = self._context.descriptors
        if not descriptors.has_room(self._admission.open_requests + 1):
            sentence = (
                f"The gateway has no file descriptors left for another request (limit {descriptors.limit})."
            )
            raise ApiError(503, sentence, retry_after_s=_DESCRIPTORS_RETRY_S)


def _check_form(http: web.Request) -> None:
    """Raises ApiError 415 for a body that is not plain JSON."""
    # Any other type a browser would send to a server of another site without asking that first.
    if http.content_type != _JSON:
        raise ApiError(415, f"The request body must come as Content-Type: {_JSON}.")
    if http.headers.get("Content-Encoding", "identity") != "identity":
        raise ApiError(415, "The request body must come without a Content-Encoding.")


def _network_of(address: str) -> str:
    """The address; of IPv6 the /64, which one client may have to itself."""
    if ":" not in address:
        return address
    return str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))
