"""The request to a decode engine, from its body to the end of its answer."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prfaas.serving.gateway.bodies import decode_body
from prfaas.serving.gateway.control_plane import ControlPlane
from prfaas.serving.gateway.engine_client import EngineCallError, EngineClient
from prfaas.serving.gateway.http_pool import EngineResponse
from prfaas.serving.gateway.metrics import Metrics
from prfaas.serving.gateway.options import ThreadOffload
from prfaas.serving.gateway.orchestrator import PrefillOrchestrator
from prfaas.serving.gateway.prefill_hop import JSON_BYTES_PER_TOKEN
from prfaas.serving.gateway.request import PreparedRequest, ServingRequest
from prfaas.serving.gateway.stream import DecodeFailedError

logger = logging.getLogger(__name__)


class DecodeHop:
    """Opens requests at decode engines, and judges those that failed."""

    def __init__(
        self,
        *,
        plane: ControlPlane,
        driver: PrefillOrchestrator,
        client: EngineClient,
        metrics: Metrics,
        thread_offload: ThreadOffload,
    ) -> None:
        self._plane = plane
        self._driver = driver
        self._client = client
        self._metrics = metrics
        self._offloop = thread_offload

    @asynccontextmanager
    async def open(self, order: ServingRequest, journey: PreparedRequest) -> AsyncIterator[EngineResponse]:
        """The answer of the journey's decode engine, its headers read. Raises DecodeFailedError if there is none.

        What is still staged there is freed unless the answer has status 200 and the body ends without an exception.
        """
        reuse_ids = journey.look.token_ids if journey.look is not None and journey.look.takes_ids else None
        ended_well = False
        try:
            body = await self._offloop.run(
                order.size_bytes + JSON_BYTES_PER_TOKEN * len(reuse_ids or ()),
                decode_body,
                order.body,
                journey.sealed,
                reuse_ids,
                order.salt,
            )
            with self._plane.decoding(journey.decode, journey.own_prefill_tokens):
                answer = await self._answer(order, journey, body)
                try:
                    if answer.status == 200:
                        self._driver.delivered(journey)
                    yield answer
                    ended_well = answer.status == 200
                finally:
                    # Closing an unfinished answer is what makes vLLM abort the request.
                    answer.close()
        finally:
            # The engine frees what it has taken; anything else would wait for its time to live.
            if not ended_well:
                self._driver.abandon(journey, "the decode request did not end well")

    def judge(self, order: ServingRequest, journey: PreparedRequest, failure: DecodeFailedError) -> None:
        """Say everywhere what a failure says about the decode engine."""
        logger.warning("decode instance failed: %s", failure)
        self._metrics.decode_failures.labels(failure.reason).inc()
        order.record.note(f"{journey.decode} failed: {failure.reason}")
        # An error that an engine answers may be the request's own: engines must not be that easy to take out.
        if failure.lost:
            self._plane.suspect(journey.decode, str(failure), lost_cache=True)

    async def _answer(self, order: ServingRequest, journey: PreparedRequest, body: bytes) -> EngineResponse:
        instance = self._plane.instance(journey.decode)
        try:
            return await self._client.open(instance, order.endpoint.path, body, order.headers)
        except EngineCallError as error:
            raise DecodeFailedError(error.reason, str(error), lost=True) from error
