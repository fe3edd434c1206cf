"""Shadow requests: a small share of the transferred prompts is computed once more on a plain path, and compared.

A corrupt KV cache gives fluent text and no error. Page digests catch it on the way; this catches it wherever it is.
"""

import asyncio
import logging
import random
import secrets
from collections.abc import Sequence

import orjson

from prfaas.serving.gateway.bodies import Json
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.engine_client import EngineCallError
from prfaas.serving.gateway.prompts.prompt import Endpoint, can_resume
from prfaas.serving.gateway.ways.ready_requests import DecidedRequest, ReadyRequest
from prfaas.serving.tasks import end_all

logger = logging.getLogger(__name__)

# Among so many of the likeliest tokens the client's is looked for where the two answers part.
_TOP_LOGPROBS = 5
_TIMEOUT_S = 600.0
# A client's request at the same engine ends a shadow within this time.
_YIELD_S = 0.05
# How much likelier the plain path's token may be than the client's: two bf16 steps at a logit of 16 to 32.
_TIE_NATS = 0.25
# These change which token is the likeliest, and the plain path is asked without.
_CHANGING_LOGITS = (
    "logit_bias",
    "repetition_penalty",
    "allowed_token_ids",
    "min_tokens",
    "thinking_token_budget",
    "watermarking",
)


class Shadow:
    """Compares answers with the plain path's, one at a time, on engines that have nothing else to do."""

    def __init__(self, context: GatewayContext, *, draw: random.Random | None = None) -> None:
        """`draw`: decides who is compared."""
        self._context = context
        self._plane = context.plane
        self._draw = draw or random.Random()
        self._running: asyncio.Task[None] | None = None

    def wants(self, ready: ReadyRequest) -> bool:
        """Whether the answer to a request is to be kept for `compare`. Asked once per request."""
        request, share = ready.request, self._context.running.current.gateway.shadow
        if not share or not ready.moves_kv or request.has_media or self._draw.random() >= share:
            return False
        return is_comparable(request.endpoint, request.body)

    def compare(self, ready: ReadyRequest, token_ids: Sequence[int]) -> None:
        """Compute the request again in the background. `token_ids`: the whole answer; empty where it is not known."""
        is_busy = self._running is not None and not self._running.done()
        engine = None if is_busy else self._plane.cluster_state.idle_decode_instance()
        if not token_ids or engine is None or not isinstance(ready, DecidedRequest):
            self._count("skipped")
            return
        self._running = asyncio.create_task(self._compare(ready, token_ids, engine), name="prfaas-shadow")

    async def close(self) -> None:
        """End the comparison under way."""
        if self._running is not None:
            await end_all(self._running)

    async def _compare(self, ready: DecidedRequest, token_ids: Sequence[int], engine: str) -> None:
        asked = asyncio.create_task(self._plain_answer(ready, len(token_ids), engine))
        try:
            while not asked.done():
                await asyncio.wait((asked,), timeout=_YIELD_S)
                if not asked.done() and self._plane.cluster_state.is_used(engine):
                    self._count("yielded")
                    return
            outcome = compared(token_ids, asked.result(), _TIE_NATS)
        except (EngineCallError, KeyError, IndexError, TypeError, ValueError) as error:
            logger.info("a shadow request at %s failed: %s", engine, type(error).__name__)
            outcome = "failed"
        finally:
            await end_all(asked)
        self._count(outcome)
        if outcome == "mismatch":
            logger.error(
                "request %s, prefilled by %s and decoded by %s, has another answer than %s gives by itself",
                ready.request.record.request_id,
                ready.decision.prefill,
                ready.decode,
                engine,
            )

    async def _plain_answer(self, ready: DecidedRequest, num_tokens: int, engine: str) -> Json:
        body = {
            "model": ready.request.model,
            "prompt": ready.prompt.token_ids,
            "max_tokens": num_tokens,
            "temperature": 0,
            # What ended the client's answer is its last token, and what would have is in its place.
            "ignore_eos": True,
            "logprobs": _TOP_LOGPROBS,
            "return_tokens_as_token_ids": True,
            # Nobody else has it: no cached block is reused, and none is left to be.
            "cache_salt": secrets.token_hex(16),
        }
        answer = await self._context.client.call(
            self._plane.members.instance(engine),
            Endpoint.COMPLETIONS.path,
            orjson.dumps(body, default=list),
            {"Content-Type": "application/json"},
            _TIMEOUT_S,
        )
        choice: Json = orjson.loads(answer)["choices"][0]
        return choice

    def _count(self, outcome: str) -> None:
        self._context.metrics.shadows.labels(outcome).inc()


def is_comparable(endpoint: Endpoint, body: Json) -> bool:
    """Whether the same prompt has the same answer each time: greedy, and one token as good as another."""
    is_greedy = body.get("temperature") == 0 and not any(body.get(field) for field in _CHANGING_LOGITS)
    return is_greedy and can_resume(endpoint, {**body, "stream": True})


def compared(token_ids: Sequence[int], choice: Json, tie_nats: float) -> str:
    """How a client's answer compares with the plain path's.

    Args:
        token_ids: the client's.
        choice: the plain path's, with its logprobs, in which tokens are named by their ids.
        tie_nats: how much likelier the plain path's token may be than the client's.

    Returns:
        "match"; "tie": where they part, the plain path found the client's token almost as likely as its own;
        "mismatch".

    Raises:
        KeyError, IndexError, TypeError: the answer lacks its logprobs.
    """
    logprobs = choice["logprobs"]
    for place, token in enumerate(token_ids):
        own, name = logprobs["tokens"][place], f"token_id:{token}"
        if own != name:
            likely: dict[str, float] = logprobs["top_logprobs"][place]
            return "tie" if name in likely and likely[own] - likely[name] <= tie_nats else "mismatch"
    return "match"
