"""First requests, so that no prompt of the demo is one; and how fast an engine prefills once it is warm."""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from prfaas.core.deployment import TOOLS, Deployment, Instance
from prfaas.serving.certificates import https_options, identity_of
from prfaas.tools.demo.line import PrefillSpeed
from prfaas.tools.demo.prompts import corpus

# A first long prompt takes longer than the second: memory is touched, and kernels are compiled for its shapes.
_WARM_TOKENS, _TIMED_TOKENS = 600, 1200
_TIMEOUT_S = 120.0


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
        async with (
            asyncio.timeout(_TIMEOUT_S),
            session.post(f"{instance.url}/v1/completions", json=body, **https) as response,
        ):
            return int((await response.json())["usage"]["prompt_tokens"])
    return None
