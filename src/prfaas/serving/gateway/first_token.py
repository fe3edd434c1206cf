"""The first token of an answer, sampled by the engine that prefills: how it is asked for, and what is told of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from prfaas.serving.gateway.bodies import Json

_TOKEN_ID = "token_id:"
# Stands for bytes that are no character yet.
_INCOMPLETE = "\ufffd"

NO_TEXT = "no-text"
"""The first token's text is not known before the second: it is a part of a character, or has none."""
STOP_SPANS = "stop-spans"
"""A stop string may begin in the first token and end in the second, where no engine would see all of it."""


@dataclass(frozen=True, slots=True)
class FirstTokenAsk:
    """What the prefill engine needs besides the prompt to sample the first token as the decode engine would."""

    sampling: Json
    """Fields of a text completion."""
    stops: Sequence[str] = ()
    """Stop strings."""
    is_all: bool = False
    """The answer may have no second token, so no KV needs to move."""

    def body_fields(self) -> Json:
        """Fields of the prefill's request. The token's id comes back as a name: asked for otherwise, vLLM would send
        all of the prompt's ids with it."""
        return {**self.sampling, "logprobs": 0, "return_tokens_as_token_ids": True}


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What the prefill engine has sampled."""

    token_id: int
    text: str
    """What a client reads of it: nothing of a stop string or a stop token."""
    finish_reason: str | None
    """None: the answer goes on."""
    stop_reason: int | str | None
    """The stop string or token that ended the answer; None for the model's own end."""
    prompt_details: Json | None = None
    """The usage's `prompt_tokens_details`, where the engine tells them."""

    @classmethod
    def of(cls, answer: bytes, ask: FirstTokenAsk) -> "FirstToken":
        """The token in a completion of one. Raises ValueError for an answer that is something else."""
        try:
            told = orjson.loads(answer)
            (choice,) = told["choices"]
            (name,) = choice["logprobs"]["tokens"]
            token_id, text, reason = (
                int(name.removeprefix(_TOKEN_ID)),
                choice["text"],
                choice["finish_reason"],
            )
            details = told["usage"].get("prompt_tokens_details")
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"no first token in the prefill's answer: {type(error).__name__}") from None
        if not isinstance(text, str) or reason not in ("stop", "length"):
            raise ValueError("the prefill's answer is no whole completion of one token")
        # One token was all that the engine was asked for, so it says that the length ended it.
        goes_on = reason == "length" and not ask.is_all
        return cls(token_id, text, None if goes_on else reason, choice.get("stop_reason"), details)

    def held(self, ask: FirstTokenAsk) -> str | None:
        """Why the client must not have it before the second token, in one word; None: it may."""
        if self.finish_reason is not None:
            return None
        if not self.text or _INCOMPLETE in self.text:
            return NO_TEXT
        return STOP_SPANS if any(_begins_in(stop, self.text) for stop in ask.stops) else None


class FirstTokenHeldError(Exception):
    """The client must not have the first token alone, so the request takes the other way from its beginning."""

    def __init__(self, reason: str) -> None:
        """`reason`: one word."""
        super().__init__(reason)
        self.reason = reason


def _begins_in(stop: str, text: str) -> bool:
    """Whether `text` ends with a part of `stop` that is not all of it."""
    return any(text.endswith(stop[:length]) for length in range(1, len(stop)))
