"""Answers in the shapes of the OpenAI API, as vLLM writes them."""

import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import orjson

from prfaas.serving.engines.synthetic.bodies import Asked
from prfaas.serving.engines.synthetic.engine import Generation
from prfaas.serving.engines.synthetic.text import Text

DONE = b"data: [DONE]\n\n"


class Writer:
    """Writes one request's answer, whole or in pieces. Choices of prompt p come at p·n, p·n + 1, …"""

    def __init__(self, asked: Asked, text: Text) -> None:
        self._asked = asked
        self._text = text
        self._id = f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid4().hex}"
        self._created = int(time.time())

    def whole(self, generations: Sequence[Generation]) -> bytes:
        """The answer that is not streamed."""
        choices = []
        for at, (work, generation) in enumerate(zip(self._asked.works, generations, strict=True)):
            ids = list(generation.token_ids)
            for sample in range(work.samples):
                choice = self._choice(at * work.samples + sample, ids, finished=True)
                text = choice.pop("text")
                if self._asked.chat:
                    choice["message"] = {"role": "assistant", "content": text, "tool_calls": []}
                else:
                    choice["text"] = text
                    if self._asked.return_token_ids:
                        choice["prompt_token_ids"] = list(work.token_ids)
                choices.append(choice)
        answer = self._envelope("chat.completion" if self._asked.chat else "text_completion", choices)
        answer["usage"] = self._usage(generations)
        answer["kv_transfer_params"] = None
        if self._asked.chat and self._asked.return_token_ids:
            answer["prompt_token_ids"] = list(self._asked.works[0].token_ids)
        return orjson.dumps(answer)

    def piece(self, prompt: int, token_ids: Sequence[int], *, first: bool, last: bool) -> bytes:
        """One event with what has come since the last one of a prompt; `first` also opens a chat answer."""
        asked, work = self._asked, self._asked.works[prompt]
        choices = []
        for sample in range(work.samples):
            choice = self._choice(prompt * work.samples + sample, list(token_ids), finished=last)
            text = choice.pop("text")
            if asked.chat:
                choice["delta"] = {"role": "assistant", "content": text} if first else {"content": text}
            else:
                choice["text"] = text
                if first and asked.return_token_ids:
                    choice["prompt_token_ids"] = list(work.token_ids)
            choices.append(choice)
        event = self._envelope("chat.completion.chunk" if asked.chat else "text_completion", choices)
        if first and asked.chat and asked.return_token_ids:
            event["prompt_token_ids"] = list(work.token_ids)
        return _event(event)

    def usage(self, generations: Sequence[Generation]) -> bytes:
        """The event that ends a stream with `stream_options.include_usage`."""
        event = self._envelope("chat.completion.chunk" if self._asked.chat else "text_completion", [])
        event["usage"] = self._usage(generations)
        return _event(event)

    def _choice(self, index: int, ids: list[int], *, finished: bool) -> dict[str, Any]:
        return {
            "index": index,
            "text": self._text.decode(ids),
            "logprobs": None,
            "finish_reason": "length" if finished else None,
            "stop_reason": None,
            "token_ids": ids if self._asked.return_token_ids else None,
        }

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._asked.model,
            "choices": choices,
        }

    def _usage(self, generations: Sequence[Generation]) -> dict[str, Any]:
        prompt = sum(generation.prompt_tokens for generation in generations)
        completion = sum(work.max_tokens * work.samples for work in self._asked.works)
        cached = sum(generation.cached_tokens for generation in generations)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _event(event: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"
