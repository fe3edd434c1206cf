"""Requests as they come: taken on or refused, with a record, then read and parsed."""

from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from prfaas.serving.gateway.admission import Admission, AdmittedRequest
from prfaas.serving.gateway.bodies import ApiError
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.prompts.prompt import Endpoint
from prfaas.serving.gateway.prompts.request import RequestParser, ServingRequest, Tenants
from prfaas.serving.gateway.request_log import RECORD, RequestLog, RequestRecord

_DESCRIPTORS_RETRY_S = 1.0


class Intake:
    """Takes requests on while the gateway has room for them."""

    def __init__(
        self, context: GatewayContext, *, tenants: Tenants, admission: Admission, log: RequestLog
    ) -> None:
        self._context = context
        self._tenants = tenants
        self._admission = admission
        self._log = log
        self._parser = RequestParser(context)

    @contextmanager
    def taking(
        self, http: web.Request, endpoint: Endpoint
    ) -> Iterator[tuple[RequestRecord, AdmittedRequest]]:
        """While a request is open, if the gateway can take it: refused before its body is read. Raises ApiError."""
        with self._log.recording(str(endpoint), http.headers) as record:
            http[RECORD] = record
            tenant = self._tenants.salt(http.headers)
            # A named tenant's numbers are about prefixes under its own salt: they tell nothing of others' prompts.
            tells_all = self._context.running.current.gateway.route_header == "full"
            record.tells_details = tells_all or self._tenants.names(http.headers)
            draining, descriptors = self._context.draining, self._context.descriptors
            with draining.request(), descriptors.serving(http.protocol):
                if not descriptors.has_room(draining.open_requests):
                    raise ApiError(
                        503,
                        f"The gateway has no file descriptors left for another request (limit {descriptors.limit}).",
                        retry_after_s=_DESCRIPTORS_RETRY_S,
                    )
                with self._admission.admitted(tenant, http.headers, http.content_length) as admitted:
                    yield record, admitted

    async def parse(
        self, http: web.Request, endpoint: Endpoint, record: RequestRecord, admitted: AdmittedRequest
    ) -> ServingRequest:
        """What the client wants, less what could steer an engine. Raises ApiError and web.HTTPException."""
        return await self._parser.parse(http, endpoint, record, admitted.tenant, admitted.hold)
