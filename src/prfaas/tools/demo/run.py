"""The run of the demo: two clusters and a gateway, then the plain engine."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from prfaas.core.deployment import Deployment
from prfaas.core.kv.model import KvModel
from prfaas.serving.engines.child_processes import READY_TIMEOUT_S, StartProgress
from prfaas.serving.engines.preparation import ensure_model
from prfaas.serving.engines.running import RunningEngines
from prfaas.serving.engines.template import EngineTemplates
from prfaas.serving.pool.client import PoolClient
from prfaas.serving.pool.running import RunningPools
from prfaas.tools.demo.client import DemoAnswer, RequestFailedError, stream_completion
from prfaas.tools.demo.gateway import DemoError, demo_gateway
from prfaas.tools.demo.line import DemoLine, prefill_speed, warm_text, warm_up, with_room
from prfaas.tools.demo.outcome import DemoOutcome, outcome_of
from prfaas.tools.demo.prompts import DemoPrompt, corpus, demo_prompts
from prfaas.tools.demo.reference import (
    ReferenceAnswer,
    complete_alike,
    reference_command,
    reference_deployment,
)

ANSWER_TOKENS = 64
_WARM_TOKENS = 2


class Stages(Protocol):
    """How a run's progress is shown."""

    def starting(self, engines: RunningEngines) -> AbstractContextManager[Callable[[StartProgress], None]]:
        """While `engines` start; what it gives is called with each step."""
        ...

    def asking(self, whom: str, prompts: Sequence[DemoPrompt]) -> AbstractContextManager[Callable[[], None]]:
        """While `prompts` are answered by `whom`; what it gives is called after each answer."""
        ...


def run_demo(deployment: Deployment, stages: Stages, ready_timeout_s: float = READY_TIMEOUT_S) -> DemoOutcome:
    """Runs everything, one after the other, and leaves nothing running.

    The links of `deployment` get another bandwidth, which fits this machine and model (`DemoLine`).

    `ready_timeout_s`: how long the deployment's engines may take to start, and then the plain one.

    Raises:
        DemoError: a prompt got no answer from the gateway or the plain engine; the gateway failed.
        EngineError, KeyFileError, ConfigError: engines can't be started.
    """
    ensure_model(deployment)
    kv_model = deployment.model.kv_model()
    chars_per_token = _chars_per_token(deployment)
    prompts = demo_prompts(chars_per_token)
    try:
        # What has imported vLLM for the engines becomes the plain one too.
        with EngineTemplates() as templates:
            room = with_room(deployment, kv_model)
            run = _Run(room, prompts, chars_per_token, stages, ready_timeout_s, templates=templates)
            line, answers = run.two_clusters(kv_model)
            references = run.plain(answers)
    except RequestFailedError as error:
        raise DemoError(f"{error}; the engines' logs are in {deployment.logs_dir}") from error
    served = deployment if line is None else line.put_in(deployment)
    return outcome_of(served, kv_model, prompts, answers, references, line=line)


def _empty_pools(deployment: Deployment) -> None:
    """Drop what earlier runs left in the pools, which run."""
    for node in deployment.pools:
        client = PoolClient(deployment.pool_socket(node), "tool", None, timeout_s=deployment.pool.timeout_s)
        try:
            client.connect()
            client.clear()
        finally:
            client.close()


@dataclass(frozen=True, slots=True)
class _Run:
    """What both halves need: two clusters, and the plain engine."""

    deployment: Deployment
    prompts: Sequence[DemoPrompt]
    chars_per_token: float
    stages: Stages
    ready_timeout_s: float
    """For the engines of each half."""
    templates: EngineTemplates

    def two_clusters(self, kv_model: KvModel) -> tuple[DemoLine | None, tuple[DemoAnswer, ...]]:
        """The line that was chosen, None without links; and the answers."""
        with (
            RunningPools(self.deployment) as pools,
            RunningEngines(self.deployment, templates=self.templates) as engines,
        ):
            pools.wait_ready()
            self._wait_ready(engines)
            # Pools know what pages look like from their first engine on.
            _empty_pools(self.deployment)
            asyncio.run(warm_up(self.deployment, self.chars_per_token))
            line = self._line(kv_model)
            served = self.deployment if line is None else line.put_in(self.deployment)
            with self.stages.asking("two clusters", self.prompts) as answered:
                return line, asyncio.run(_ask_gateway(served, self.prompts, answered))

    def plain(self, answers: Sequence[DemoAnswer]) -> tuple[ReferenceAnswer, ...]:
        """The plain engine's answers, each beside one of `answers`."""
        plain = reference_deployment(self.deployment)
        with RunningEngines(plain, command=reference_command, templates=self.templates) as engines:
            self._wait_ready(engines)
            warm = warm_text(self.chars_per_token)
            # Both kinds of requests that are timed: the first of each takes seconds longer.
            both = [(warm, False), (warm[1:], True)]
            asyncio.run(_ask_reference(plain, both, _WARM_TOKENS, lambda: None))
            # An engine that got nothing from another one computed the end of the prompt in one piece.
            moved = (answer.route.kv_bytes > 0 for answer in answers)
            asked = zip((prompt.text for prompt in self.prompts), moved, strict=True)
            with self.stages.asking("one plain engine", self.prompts) as step:
                return asyncio.run(_ask_reference(plain, asked, ANSWER_TOKENS, step))

    def _wait_ready(self, engines: RunningEngines) -> None:
        with self.stages.starting(engines) as show:
            engines.wait_ready(self.ready_timeout_s, show)

    def _line(self, kv_model: KvModel) -> DemoLine | None:
        sources = {link.source for link in self.deployment.links}
        senders = [each for each in self.deployment.with_role("prefill") if each.cluster in sources]
        if not senders:
            return None
        speed = asyncio.run(prefill_speed(self.deployment, senders, self.chars_per_token))
        return None if speed is None else DemoLine.of(kv_model, speed)


def _chars_per_token(deployment: Deployment) -> float:
    """Characters per token of the model's tokenizer on the demo's text; 1.0 for a byte-level one."""
    from tokenizers import Tokenizer

    file = deployment.model.path / "tokenizer.json"
    if not file.is_file():
        return 1.0
    sample = corpus()[:20_000]
    return len(sample) / len(Tokenizer.from_file(str(file)).encode(sample, add_special_tokens=False).ids)


async def _ask_gateway(
    deployment: Deployment, prompts: Sequence[DemoPrompt], answered: Callable[[], None]
) -> tuple[DemoAnswer, ...]:
    model = deployment.model.served_name

    async def stream_all(url: str) -> tuple[DemoAnswer, ...]:
        answers = []
        async with aiohttp.ClientSession() as session:
            for prompt in prompts:
                answers.append(await stream_completion(session, url, model, prompt.text, ANSWER_TOKENS))
                answered()
        return tuple(answers)

    async with demo_gateway(deployment) as gateway:
        return await gateway.unless_ended(stream_all(gateway.url))


async def _ask_reference(
    plain: Deployment, asked: Iterable[tuple[str, bool]], tokens: int, answered: Callable[[], None]
) -> tuple[ReferenceAnswer, ...]:
    """Its answers to prompts; with each, whether its last token is to be computed alone."""
    (engine,) = plain.instances
    answers = []
    async with aiohttp.ClientSession() as session:
        for prompt, alone in asked:
            answers.append(
                await complete_alike(
                    session, engine.url, plain.model.served_name, prompt, tokens, last_token_alone=alone
                )
            )
            answered()
    return tuple(answers)
