"""The rest of a chat in which tools have been called.

Another engine's chat endpoint can't give it: its parser would not know that a call has begun, and would count calls
from the first one on. So an engine is asked for tokens, and what these say to the client comes from vLLM's `/derender`
(0.32), which reads the whole answer again each time. Before each such question is a pause, in which tokens gather.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import orjson

from prfaas.serving.gateway.answers.transcript import (
    AnswerRest,
    BegunAnswer,
    CannotResumeError,
    events,
    plain,
)
from prfaas.serving.gateway.bodies import Json, dump_body, ids_json
from prfaas.serving.gateway.context import GatewayContext
from prfaas.serving.gateway.engine_client import Blame, EngineCallError
from prfaas.serving.gateway.prompts.prompt import Endpoint, stop_strings, wants_usage
from prfaas.serving.gateway.prompts.tokenization import Tokenization

_PAUSE_S = 0.1
_IN_CALL = "in-call"
_CHUNK = "chat.completion.chunk"


class _Choice(msgspec.Struct):
    delta: dict[str, Any]


class _Chunk(msgspec.Struct):
    choices: tuple[_Choice]


class _State(msgspec.Struct):
    last_tool_call_ids: list[str]


class _Derendered(msgspec.Struct):
    """What is used of an answer of `/derender`."""

    chunk: _Chunk
    stream_state: _State


class CalledAnswers:
    """Continues answers in which tools have been called."""

    def __init__(self, tokenization: Tokenization, context: GatewayContext) -> None:
        self._tokenization = tokenization
        self._context = context

    async def in_tokens(self, begun: BegunAnswer, rest: AnswerRest) -> AnswerRest:
        """The rest of a chat as a request for tokens, sampled as the chat would be.

        Raises CannotResumeError and NoDecodeInstanceError.
        """
        request, body = rest.request, rest.request.body
        # What comes as tokens is searched for no stop string, and its log probabilities are not told on.
        if body.get("logprobs") or stop_strings(begun.request.body):
            raise CannotResumeError(_IN_CALL)
        try:
            (rendered,) = await self._tokenization.rendered(request)
        except EngineCallError:
            raise CannotResumeError(_IN_CALL) from None
        sampling = rendered.sampling_params or {}
        if sampling.get("structured_outputs"):
            raise CannotResumeError(_IN_CALL)
        asked: Json = {
            "model": request.model,
            "token_ids": rest.token_ids,
            "sampling_params": sampling,
            "stream": True,
            "stream_options": {"include_usage": wants_usage(body)},
        }
        return replace(rest, request=replace(request, endpoint=Endpoint.GENERATE, body=asked, resumes=False))

    async def told(self, chunk: bytes, begun: BegunAnswer, engine: str) -> Sequence[Json | None]:
        """What some events of an engine's tokens say, as events of a chat; None is the mark at the end.

        The ids are the answer's then. Raises EngineCallError, NotPlainError and CannotResumeError.
        """
        ids: list[int] = []
        last: Json = {}
        behind: list[Json | None] = []
        with plain():
            for event in events(chunk):
                if event is None or event.get("usage"):
                    behind.append(event and {"object": _CHUNK, "choices": [], "usage": event["usage"]})
                    continue
                for last in event["choices"]:
                    ids += map(int, last["token_ids"] or ())
        if not ids and not last.get("finish_reason"):
            return behind
        await asyncio.sleep(_PAUSE_S)
        choice = await self._derendered(ids, last, begun, engine)
        with plain():
            begun.ids.keep(ids)
        return [{"object": _CHUNK, "choices": [choice]}, *behind]

    async def _derendered(self, ids: list[int], last: Json, begun: BegunAnswer, engine: str) -> Json:
        """The choice of a chat's event with these ids. `last`: that of the tokens' event."""
        request, taken = begun.request, begun.ids
        ended = {name: last.get(name) for name in ("finish_reason", "stop_reason")}
        by_itself = ended["finish_reason"] == "stop"
        # What ended the answer is none of its text.
        spoken = ids[:-1] if by_itself and not begun.includes_stop else ids
        asked: Json = {
            "stream": True,
            "model": request.model,
            "generate_chunk": {
                "request_id": request.record.request_id,
                "choices": [{"index": 0, "token_ids": spoken, **ended}],
            },
            "stream_state": {
                "output_token_ids": taken.ids.tolist(),
                "output_chunk_lens": [step for step in taken.steps if step],
                "role_sent": True,
                "tools_streamed": True,
                "last_tool_call_ids": taken.calls,
            },
            "prompt_token_ids": orjson.Fragment(ids_json(begun.prompt.token_ids)),
            "chat_request": request.body,
        }
        answer = await self._ask(engine, asked, request.headers)
        taken.calls = answer.stream_state.last_tool_call_ids
        if by_itself:
            # As vLLM says it of a chat; it derenders any other reason so too.
            ended["finish_reason"] = "tool_calls"
        elif ended["finish_reason"] is None:
            del ended["stop_reason"]
        delta = _without_nulls(answer.chunk.choices[0].delta)
        told_ids = ids if taken.is_asked else None
        return {"index": 0, "delta": delta, "logprobs": None, **ended, "token_ids": told_ids}

    async def _ask(self, engine: str, body: Json, headers: Mapping[str, str]) -> _Derendered:
        """Raises EngineCallError, and CannotResumeError for a refusal: every engine would refuse it."""
        context, path = self._context, Endpoint.DERENDER_CHAT.path
        instance, timeout_s = context.plane.members.instance(engine), context.options.tokenize_timeout_s
        try:
            answer = await context.client.call(instance, path, dump_body(body), headers, timeout_s)
            return msgspec.json.decode(answer, type=_Derendered)
        except EngineCallError as failure:
            if failure.is_clients_fault:
                raise CannotResumeError(_IN_CALL) from None
            raise
        except ValueError as error:
            raise EngineCallError(engine, "garbled", f"{path} says: {error}", blame=Blame.NONE) from None


def _without_nulls(value: Any) -> Any:
    """As vLLM writes events of chats: without the fields that are not set."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
