"""The OpenAI-compatible endpoint that is measured: a vLLM server, or our gateway."""

import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp

from prfaas.core.latency.profile import ProfileError
from prfaas.tools.http_client import AnswerError, base_url, greedy_body, post_json, served_models, streamed

# The longest silence of the endpoint, which is a whole prefill.
_READ_TIMEOUT_S = 600.0

# Enough different ids that two prompts don't begin alike, few enough that any tokenizer knows so many.
_POOL_TEXT_CHARACTERS = 2000
# ASCII, and Latin, Greek, Cyrillic, Hebrew, Devanagari, CJK and symbols: even a tokenizer of bytes makes some 200 ids
# of them.
_LETTERS = "".join(
    chr(code)
    for first, last in (
        (0x20, 0x7E), (0xC0, 0x24F), (0x391, 0x3C9), (0x410, 0x44F), (0x5D0, 0x5EA), (0x905, 0x939), (0x2190, 0x21FF),
        (0x4E00, 0x4FFF),
    )
    for code in range(first, last + 1)
)  # fmt: skip


class MeasureError(ProfileError):
    """An endpoint can't be measured; the text says why."""


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """When the tokens of one answer came: (monotonic seconds, tokens that came then), in order."""

    arrivals: tuple[tuple[float, int], ...]

    @property
    def tokens(self) -> int:
        """Tokens of the answer."""
        return sum(count for _, count in self.arrivals)

    @property
    def first_s(self) -> float:
        """When the first token came."""
        return self.arrivals[0][0]

    @property
    def last_s(self) -> float:
        """When the last token came."""
        return self.arrivals[-1][0]


class ProfiledEndpoint:
    """Sends prompts of exactly so many tokens that no prefix cache knows, and takes the time.

    Use as an async context manager; `model` and `max_model_len` (None: not reported) are known inside. Prompts are
    random ids out of what the model's own tokenizer makes of random letters, new ones in every run.

    Raises:
        MeasureError: whatever is wrong with the endpoint or an answer, in one sentence.
    """

    def __init__(self, url: str, model: str | None = None) -> None:
        self.url = base_url(url)
        self.model = model or ""
        self.max_model_len: int | None = None
        self._random = random.SystemRandom()
        self._ids: Sequence[int] = ()
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> "ProfiledEndpoint":
        if not self.url.startswith(("http://", "https://")):
            raise MeasureError(f'"{self.url}" is no URL; write for example http://127.0.0.1:8000')
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=_READ_TIMEOUT_S)
        self._session = aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**20
        )
        try:
            await self._find_model()
            self._ids = await self._pool()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def prefill_s(self, tokens: int) -> float:
        """Seconds from sending a fresh prompt of `tokens` tokens to having the one token asked for."""
        body = greedy_body(self.model, self._prompt(tokens), 1)
        start_s = time.monotonic()
        answer = await self._post(body)
        seconds = time.monotonic() - start_s
        usage = answer.get("usage") or {}
        if usage.get("prompt_tokens") != tokens:
            raise MeasureError(
                f"{self.url} counts {usage.get('prompt_tokens')} tokens in a prompt of {tokens} token ids"
            )
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached:
            raise MeasureError(f"{self.url} had {cached} tokens of a new prompt in its prefix cache")
        return seconds

    async def decode(self, context_tokens: int, tokens: int) -> TokenTimes:
        """Stream `tokens` tokens after a fresh prompt of `context_tokens`."""
        body = greedy_body(self.model, self._prompt(context_tokens), tokens, stream=True)
        arrivals: list[tuple[float, int]] = []
        with self._explained():
            async with streamed(self._session, f"{self.url}/v1/completions", body) as (_, events):
                async for event in events:
                    choices = event.get("choices") or ()
                    count = sum(len(choice.get("token_ids") or ()) for choice in choices)
                    if count:
                        arrivals.append((time.monotonic(), count))
        times = TokenTimes(tuple(arrivals))
        if times.tokens != tokens:
            raise MeasureError(f"{self.url} streamed {times.tokens} of {tokens} tokens")
        return times

    def _prompt(self, tokens: int) -> list[int]:
        return self._random.choices(self._ids, k=tokens)

    async def _find_model(self) -> None:
        try:
            served = await served_models(self._session, self.url)
        except AnswerError as error:
            raise MeasureError(f"{self.url}/v1/models answered {error.status}: {error}") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise MeasureError(f"{self.url} can't be reached: {_why(error)}") from error
        except ValueError as error:
            raise MeasureError(
                f"{self.url}/v1/models is not the model list of an OpenAI-compatible server"
            ) from error
        self.model = self.model or next(iter(served), "")
        if self.model not in served:
            raise MeasureError(
                f'{self.url} doesn\'t serve "{self.model}"; it serves {", ".join(served) or "nothing"}'
            )
        longest = served[self.model]
        self.max_model_len = longest if longest is not None and longest > 0 else None

    async def _pool(self) -> Sequence[int]:
        """Token ids that the model knows: those of random letters of many scripts.

        Many different ones: which experts of a mixture work depends on the token.
        """
        letters = self._random.choices(_LETTERS, k=_POOL_TEXT_CHARACTERS)
        # None of them is more than three bytes, so never more than three tokens.
        length = _POOL_TEXT_CHARACTERS if self.max_model_len is None else self.max_model_len // 4
        body = greedy_body(self.model, "".join(letters[:length]), 1, add_special_tokens=False)
        answer = await self._post(body)
        try:
            ids = {int(token) for token in answer["choices"][0]["prompt_token_ids"]}
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise MeasureError(
                f'{self.url} doesn\'t tell the token ids of a prompt ("return_token_ids"); vLLM does'
            ) from error
        if len(ids) < 2:
            raise MeasureError(f"{self.url} makes only {len(ids)} different tokens of random letters")
        return sorted(ids)

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._explained():
            return await post_json(self._session, f"{self.url}/v1/completions", body)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except AnswerError as error:
            raise MeasureError(f"{self.url} answered {error.status}: {error}") from error
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise MeasureError(f"{self.url} can't be measured: {_why(error)}") from error


def _why(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
