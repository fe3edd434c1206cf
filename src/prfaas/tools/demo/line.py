"""The line between the demo's clusters, as wide for this machine and model as the paper's is for its own.

First requests, so that no prompt of the demo is one; and how fast an engine prefills once it is warm.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from prfaas.core.deployment import TOOLS, Deployment, Instance
from prfaas.core.kv.model import KvModel
from prfaas.core.units import BITS_PER_BYTE, MIB, format_bits_per_s
from prfaas.serving.certificates import https_options, identity_of
from prfaas.tools.demo.prompts import LONGEST_TOKENS, corpus
from prfaas.tools.http_client import post_json

USED_SHARE = 0.13
"""Of the paper's line: its prefill instances make 13 of its 100 Gbit/s (arXiv 2604.15039, section 4)."""
_DIGITS = 2
# Blocks are moved whole, and tokenizers differ from the measured characters per token.
_STAGING_MARGIN = 1.3
# A first long prompt takes longer than the second: memory is touched, and kernels are compiled for its shapes.
_WARM_TOKENS, _TIMED_TOKENS = 600, 1200
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """How fast one engine of this machine prefills, measured with one prompt."""

    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the prompt over its time."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class DemoLine:
    """The chosen line."""

    speed: PrefillSpeed
    bandwidth_bits_per_s: float

    @classmethod
    def of(cls, model: KvModel, speed: PrefillSpeed) -> "DemoLine":
        """Such that the KVCache of the longest prompt takes 13 % of its prefill's time on it, to two digits."""
        prefill_s = LONGEST_TOKENS / speed.tokens_per_s
        exact = model.bytes_to_move(LONGEST_TOKENS) * BITS_PER_BYTE / (USED_SHARE * prefill_s)
        step = 10.0 ** (math.floor(math.log10(exact)) + 1 - _DIGITS)
        return cls(speed, math.ceil(exact / step) * step)

    def put_in(self, deployment: Deployment) -> Deployment:
        """`deployment` with all its links as wide. The gateway that serves it tells its engines, which obey at once."""
        links = tuple(
            replace(link, bandwidth_bits_per_s=self.bandwidth_bits_per_s) for link in deployment.links
        )
        return replace(deployment, links=links)

    def used_share(self, model: KvModel, tokens: int) -> float:
        """The time that the KVCache of `tokens` takes on this line, as a share of its prefill's time."""
        line_s = model.bytes_to_move(tokens) * BITS_PER_BYTE / self.bandwidth_bits_per_s
        return line_s / (tokens / self.speed.tokens_per_s)

    def sentence(self) -> str:
        """Why it is as wide."""
        return (
            f"An engine prefills {self.speed.tokens_per_s:,.0f} tokens/s here, so the line between the clusters has "
            f"{format_bits_per_s(self.bandwidth_bits_per_s)}: KVCache takes {USED_SHARE:.0%} of its prefill's time on "
            "it, as on the paper's line."
        )

    def to_json(self) -> dict[str, Any]:
        """Bits per second, tokens per second, and how they were measured."""
        return {
            "bandwidth_bits_per_s": self.bandwidth_bits_per_s,
            "prefill_tokens_per_s": self.speed.tokens_per_s,
            "measured_tokens": self.speed.tokens,
            "measured_s": self.speed.seconds,
        }


def with_room(deployment: Deployment, model: KvModel) -> Deployment:
    """`deployment` whose engines have staging for the longest prompt's KVCache: dense models need more."""
    needed_bytes = math.ceil(model.bytes_to_move(LONGEST_TOKENS) * _STAGING_MARGIN / MIB) * MIB
    staging_bytes = max(deployment.engine.staging_bytes, needed_bytes)
    return replace(deployment, engine=replace(deployment.engine, staging_bytes=staging_bytes))


def warm_text(chars_per_token: float) -> str:
    """A page that no prompt of the demo begins like."""
    return corpus()[-round(_WARM_TOKENS * chars_per_token) :]


async def warm_up(deployment: Deployment, chars_per_token: float) -> None:
    """A page of text for every engine, all at once. Whatever is wrong shows with the first prompt."""
    prompt = warm_text(chars_per_token)
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        for instance in deployment.instances:
            group.create_task(_quietly(session, deployment, instance, prompt))


async def prefill_speed(
    deployment: Deployment, instances: Sequence[Instance], chars_per_token: float
) -> PrefillSpeed | None:
    """Of the first of `instances`, which is warm and idle; None if it does not answer."""
    warm, timed = len(warm_text(chars_per_token)), round(_TIMED_TOKENS * chars_per_token)
    prompt = corpus()[-warm - timed : -warm]
    async with aiohttp.ClientSession() as session:
        begin_s = time.monotonic()
        tokens = await _quietly(session, deployment, instances[0], prompt)
        return None if tokens is None else PrefillSpeed(tokens, time.monotonic() - begin_s)


async def _quietly(
    session: aiohttp.ClientSession, deployment: Deployment, instance: Instance, prompt: str
) -> int | None:
    """Tokens of the prompt, once its first token is there; None if that failed."""
    https: Mapping[str, Any] = https_options(instance, identity_of(deployment, TOOLS))
    body = {"model": deployment.model.served_name, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
        async with asyncio.timeout(_TIMEOUT_S):
            answer = await post_json(session, f"{instance.url}/v1/completions", body, https=https)
            return int(answer["usage"]["prompt_tokens"])
    return None
