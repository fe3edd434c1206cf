"""Shadow requests: a small share of the transferred prompts is computed once more on a plain path, and compared.

A corrupt KV cache gives fluent text and no error. Page digests catch it on the way; this catches it wherever it is.
"""

import asyncio
import logging
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from prfaas.serving.gateway.answers.transcript import NotPlainError, stream_text, whole_text
from prfaas.serving.gateway.bodies import Json
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.dialects import END_OF_EVENT
from prfaas.serving.gateway.engine_client import EngineCallError
from prfaas.serving.gateway.prompts.prompt import Endpoint
from prfaas.serving.gateway.prompts.request import ServingRequest
from prfaas.serving.gateway.ways.first_token_rules import is_plain, sampling_fields
from prfaas.serving.gateway.ways.ready_requests import DecidedRequest, ReadyRequest

logger = logging.getLogger(__name__)

# Among so many of the likeliest tokens the client's is looked for where the two texts part.
_TOP_LOGPROBS = 5
_TIMEOUT_S = 600.0
# A client's request at the same engine ends a shadow within this time.
_YIELD_S = 0.05


@dataclass(frozen=True, slots=True)
class ShadowOptions:
    """What counts as equal."""

    tie_nats: float = 0.25
    """How much likelier the plain path's token may be than the client's: two bf16 steps at a logit of 16 to 32."""


@dataclass(frozen=True, slots=True)
class GivenAnswer:
    """What a client was told."""

    request_id: str
    model: str
    prompt_ids: Sequence[int]
    body: Json
    """The client's request, less what the gateway owns."""
    text: str
    num_tokens: int
    """Tokens of the answer, or some more where the stream did not say."""
    is_counted: bool
    """Whether `num_tokens` is what the engine said."""
    prefill: str
    decode: str


class Shadow:
    """Compares answers with the plain path's, one at a time, on engines that have nothing else to do."""

    def __init__(
        self, options: ShadowOptions, context: GatewayContext, *, draw: random.Random | None = None
    ) -> None:
        """`draw`: decides who is compared."""
        self._options = options
        self._context = context
        self._plane = context.plane
        self._client = context.client
        self._metrics = context.metrics
        self._draw = draw or random.Random()
        self._running: asyncio.Task[None] | None = None

    def wants(self, request: ServingRequest, ready: ReadyRequest) -> bool:
        """Whether the answer to this request is to be kept for `compare`. Asked once per request."""
        share = self._context.running.current.gateway.shadow
        if not share or not ready.moves_kv or self._draw.random() >= share:
            return False
        return is_comparable(request.endpoint, request.body)

    def compare(self, request: ServingRequest, ready: ReadyRequest, written: bytes | None) -> None:
        """Compute the request again in the background. `written`: the whole answer; None: it was not kept."""
        if self._running is not None and not self._running.done():
            self._count("skipped")
            return
        given = _given(request, ready, written)
        engine = self._plane.cluster_state.idle_decode_instance() if given is not None else None
        if given is None or engine is None:
            self._count("skipped")
            return
        self._running = asyncio.create_task(self._compare(given, engine), name="prfaas-shadow")

    async def close(self) -> None:
        """End the comparison under way."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _compare(self, given: GivenAnswer, engine: str) -> None:
        asked = asyncio.create_task(self._plain_answer(given, engine))
        try:
            while not asked.done():
                await asyncio.wait((asked,), timeout=_YIELD_S)
                if not asked.done() and self._plane.cluster_state.is_used(engine):
                    self._count("yielded")
                    return
            outcome = compared(
                given.text, asked.result(), self._options.tie_nats, same_length=given.is_counted
            )
        except (EngineCallError, KeyError, IndexError, TypeError, ValueError) as error:
            logger.info("a shadow request at %s failed: %s", engine, type(error).__name__)
            outcome = "failed"
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        self._count(outcome)
        if outcome == "mismatch":
            logger.error(
                "request %s, prefilled by %s and decoded by %s, has another answer than %s gives by itself",
                given.request_id,
                given.prefill,
                given.decode,
                engine,
            )

    async def _plain_answer(self, given: GivenAnswer, engine: str) -> Json:
        sampling = sampling_fields(given.body)
        if given.body.get("min_tokens") is not None:
            sampling["min_tokens"] = given.body["min_tokens"]
        body = sampling | {
            "model": given.model,
            "prompt": given.prompt_ids,
            "max_tokens": given.num_tokens,
            "logprobs": _TOP_LOGPROBS,
            # Nobody else has it: no cached block is reused, and none is left to be.
            "cache_salt": secrets.token_hex(16),
        }
        answer = await self._client.call(
            self._plane.members.instance(engine),
            Endpoint.COMPLETIONS.path,
            orjson.dumps(body, default=list),
            {"Content-Type": "application/json"},
            _TIMEOUT_S,
        )
        choice: Json = orjson.loads(answer)["choices"][0]
        return choice

    def _count(self, outcome: str) -> None:
        self._metrics.shadows.labels(outcome).inc()


def is_comparable(endpoint: Endpoint, body: Json) -> bool:
    """Whether the same request has the same answer each time: greedy, one choice, text alone."""
    return body.get("temperature") == 0 and is_plain(endpoint, body)


def compared(text: str, choice: Json, tie_nats: float, *, same_length: bool) -> str:
    """How a client's text compares with the plain path's answer.

    Args:
        text: what the client was told.
        choice: the plain path's, with its logprobs.
        tie_nats: as in `ShadowOptions`.
        same_length: both had the same number of tokens to say. Else one may go on where the other ends.

    Returns:
        "match"; "tie": where they part, the plain path found the client's token almost as likely as its own;
        "mismatch".

    Raises:
        KeyError, IndexError, TypeError: the answer lacks its logprobs.
    """
    plain: str = choice["text"]
    if plain == text or (not same_length and (plain.startswith(text) or text.startswith(plain))):
        return "match"
    logprobs = choice["logprobs"]
    offsets: list[int] = logprobs["text_offset"]
    shorter = min(len(plain), len(text))
    parting = next((at for at in range(shorter) if plain[at] != text[at]), shorter)
    # Offsets count from the answer's beginning, or from the prompt's where an engine counts so.
    base = offsets[0]
    place = max((i for i, offset in enumerate(offsets) if offset - base <= parting), default=0)
    if parting == len(plain) and offsets[place] - base < parting:
        # The plain answer ends there, and does not say how likely an end was.
        return "mismatch"
    rest = text[offsets[place] - base :]
    likely: dict[str, float] = logprobs["top_logprobs"][place]
    own = logprobs["token_logprobs"][place]
    candidates = [value for token, value in likely.items() if token and rest.startswith(token)]
    if not rest:
        # The client's answer ends here: its last token is one that has no text.
        candidates = [value for token, value in likely.items() if not token or token.startswith("<")]
    return "tie" if any(own - value <= tie_nats for value in candidates) else "mismatch"


def _given(request: ServingRequest, ready: ReadyRequest, written: bytes | None) -> GivenAnswer | None:
    """The answer to a request; None where it is not known, or is more than text."""
    num_tokens = request.record.answer_tokens
    if written is None or not isinstance(ready, DecidedRequest):
        return None
    try:
        is_stream = request.body.get("stream") is True
        text = stream_text(written) if is_stream else whole_text(orjson.loads(written))
    except (NotPlainError, orjson.JSONDecodeError):
        return None
    return GivenAnswer(
        request_id=request.record.request_id,
        model=request.model,
        prompt_ids=ready.prompt.token_ids,
        body=request.body,
        text=text,
        # No event has less than a token.
        num_tokens=num_tokens or written.count(END_OF_EVENT),
        is_counted=num_tokens is not None,
        prefill=ready.decision.prefill,
        decode=ready.decode,
    )
