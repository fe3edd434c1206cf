"""The run of the demo: two clusters and a gateway, twice where there are pools, then the plain engine."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import aiohttp

from prfaas.core.deployment import TOOLS, Deployment
from prfaas.serving.certificates import https_options, identity_of
from prfaas.serving.engines.preparation import ensure_model
from prfaas.serving.engines.running import READY_TIMEOUT_S, EngineProgress, RunningEngines
from prfaas.serving.engines.template import EngineTemplates
from prfaas.serving.pool.running import RunningPools
from prfaas.tools.demo.client import DemoAnswer, RequestFailedError, stream_completion
from prfaas.tools.demo.gateway import DemoError, demo_gateway
from prfaas.tools.demo.outcome import DemoOutcome, outcome_of
from prfaas.tools.demo.pools import PoolWatch, watched_pools
from prfaas.tools.demo.prompts import DemoPrompt, corpus, demo_prompts
from prfaas.tools.demo.reference import (
    ReferenceAnswer,
    ReferenceFailedError,
    complete_alike,
    reference_command,
    reference_deployment,
)
from prfaas.tools.demo.second_act import PooledAnswer

ANSWER_TOKENS = 64
_WARM_UP_S = 120.0
_SETTLE_S = 20.0
_WARM_UP_TEXT = "Kernels are compiled and memory is touched when first used."


class Stages(Protocol):
    """How a run's progress is shown."""

    def starting(self, engines: RunningEngines) -> AbstractContextManager[Callable[[EngineProgress], None]]:
        """While `engines` start; what it gives is called with each step."""
        ...

    def asking(self, whom: str, prompts: Sequence[DemoPrompt]) -> AbstractContextManager[Callable[[], None]]:
        """While `prompts` are answered by `whom`; what it gives is called after each answer."""
        ...


def run_demo(
    deployment: Deployment, stages: Stages, ready_timeout_s: float = READY_TIMEOUT_S, *, restart: bool = False
) -> DemoOutcome:
    """Runs everything, one after the other, and leaves nothing running.

    `restart`: with a second act, in which every engine is killed and the pools answer for their caches.
    `ready_timeout_s`: how long the deployment's engines may take to start, and then the plain one.

    Raises:
        DemoError: `restart` without pools; a prompt got no answer from the gateway or the plain engine; the gateway
            failed.
        EngineError, KeyFileError, ConfigError: engines can't be started.
    """
    if restart and not deployment.pools:
        raise DemoError(
            "the deployment has no pools, so nothing is left of a prefix after a restart; give clusters a `pool`"
        )
    ensure_model(deployment)
    kv_model = deployment.model.kv_model()
    prompts = demo_prompts(_chars_per_token(deployment))
    try:
        # What has imported vLLM for the engines becomes the plain one too.
        with EngineTemplates() as templates:
            answers, seconds = _acts(deployment, prompts, stages, ready_timeout_s, templates, restart=restart)
            references, repeated = _plain_answers(
                deployment, prompts, answers, seconds, stages, ready_timeout_s, templates
            )
    except (RequestFailedError, ReferenceFailedError) as error:
        raise DemoError(f"{error}; the engines' logs are in {deployment.logs_dir}") from error
    return outcome_of(deployment, kv_model, prompts, answers, references, seconds, repeated)


def _acts(
    deployment: Deployment,
    prompts: Sequence[DemoPrompt],
    stages: Stages,
    ready_timeout_s: float,
    templates: EngineTemplates,
    *,
    restart: bool,
) -> tuple[tuple[DemoAnswer, ...], tuple[PooledAnswer, ...]]:
    with (
        RunningPools(deployment) as pools,
        RunningEngines(deployment, templates=templates) as engines,
    ):
        pools.wait_ready()
        with stages.starting(engines) as show:
            engines.wait_ready(ready_timeout_s, show)
        # Pools know what pages look like from their first engine on.
        with watched_pools(deployment) as watch:
            watch.empty()
            with stages.asking("two clusters", prompts) as answered:
                first = asyncio.run(_ask_gateway(deployment, prompts, answered, watch))
            answers = tuple(each.answer for each in first)
            if not restart:
                return answers, ()
            watch.settle(_SETTLE_S)
            for name in engines.names:
                engines.kill(name)
            engines.start()
            with stages.starting(engines) as show:
                engines.wait_ready(ready_timeout_s, show)
            with stages.asking("the same clusters, restarted", prompts) as answered:
                return answers, asyncio.run(_ask_gateway(deployment, prompts, answered, watch))


def _plain_answers(
    deployment: Deployment,
    prompts: Sequence[DemoPrompt],
    answers: Sequence[DemoAnswer],
    seconds: Sequence[PooledAnswer],
    stages: Stages,
    ready_timeout_s: float,
    templates: EngineTemplates,
) -> tuple[tuple[ReferenceAnswer, ...], tuple[ReferenceAnswer, ...]]:
    """The plain engine's answers to be compared with those of the first act and of the second."""
    plain = reference_deployment(deployment)
    with RunningEngines(plain, command=reference_command, templates=templates) as engines:
        with stages.starting(engines) as show:
            engines.wait_ready(ready_timeout_s, show)
        asyncio.run(_warm_up(plain))
        with stages.asking("one plain engine", prompts) as answered:
            references = asyncio.run(_ask_reference(plain, prompts, answers, answered))
        if not seconds:
            return references, ()
        # Its own cache splits a prompt as a pool does: what is behind the last whole block is computed.
        again = tuple(each.answer for each in seconds)
        with stages.asking("the plain engine, from its cache", prompts) as answered:
            return references, asyncio.run(_ask_reference(plain, prompts, again, answered))


def _chars_per_token(deployment: Deployment) -> float:
    """Characters per token of the model's tokenizer on the demo's text; 1.0 for a byte-level one."""
    from tokenizers import Tokenizer

    file = deployment.model.path / "tokenizer.json"
    if not file.is_file():
        return 1.0
    sample = corpus()[:20_000]
    return len(sample) / len(Tokenizer.from_file(str(file)).encode(sample, add_special_tokens=False).ids)


async def _ask_gateway(
    deployment: Deployment, prompts: Sequence[DemoPrompt], answered: Callable[[], None], watch: PoolWatch
) -> tuple[PooledAnswer, ...]:
    await _warm_up(deployment)
    async with demo_gateway(deployment) as gateway:
        return await gateway.unless_ended(
            _stream_all(gateway.url, deployment.model.served_name, prompts, answered, watch)
        )


async def _stream_all(
    url: str, model: str, prompts: Sequence[DemoPrompt], answered: Callable[[], None], watch: PoolWatch
) -> tuple[PooledAnswer, ...]:
    answers = []
    before_tokens = watch.hit_tokens()
    async with aiohttp.ClientSession() as session:
        for prompt in prompts:
            answer = await stream_completion(session, url, model, prompt.text, ANSWER_TOKENS)
            now_tokens = watch.hit_tokens()
            answers.append(PooledAnswer(answer, now_tokens - before_tokens))
            before_tokens = now_tokens
            answered()
    return tuple(answers)


async def _ask_reference(
    plain: Deployment,
    prompts: Sequence[DemoPrompt],
    compared: Sequence[DemoAnswer],
    answered: Callable[[], None],
) -> tuple[ReferenceAnswer, ...]:
    (engine,) = plain.instances
    model = plain.model.served_name
    answers = []
    async with aiohttp.ClientSession() as session:
        for prompt, answer in zip(prompts, compared, strict=True):
            # An engine that got nothing from another one computed the end of the prompt in one piece.
            moved = answer.route.kv_bytes > 0
            answers.append(
                await complete_alike(
                    session, engine.url, model, prompt.text, ANSWER_TOKENS, last_token_alone=moved
                )
            )
            answered()
    return tuple(answers)


async def _warm_up(deployment: Deployment) -> None:
    """A first request of each engine takes seconds longer than the second; no prompt of the demo should be it."""
    tls, model = identity_of(deployment, TOOLS), deployment.model.served_name
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        for instance in deployment.instances:
            url = f"{instance.url}/v1/completions"
            group.create_task(_warm_up_one(session, url, model, https_options(instance, tls)))


async def _warm_up_one(
    session: aiohttp.ClientSession, url: str, model: str, https: Mapping[str, Any]
) -> None:
    body = {"model": model, "prompt": _WARM_UP_TEXT, "max_tokens": 2, "temperature": 0}
    # Whatever is wrong shows with the first prompt, where it is reported.
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with asyncio.timeout(_WARM_UP_S), session.post(url, json=body, **https) as response:
            await response.read()
