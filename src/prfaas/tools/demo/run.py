"""The run of the demo: two clusters and a gateway, twice where there are pools, then the plain engine."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

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
from prfaas.tools.demo.outcome import ActAnswers, DemoOutcome, outcome_of
from prfaas.tools.demo.prompts import DemoPrompt, corpus, demo_prompts
from prfaas.tools.demo.reference import (
    ReferenceAnswer,
    complete_alike,
    reference_command,
    reference_deployment,
)

ANSWER_TOKENS = 64
_WARM_TOKENS = 2
_SETTLE_S = 20.0
# Pools are at rest when no page has come for so long.
_SETTLED_S = 1.0
_POLL_S = 0.1
# Who answers for the first act, and for the second.
_PLAIN = ("one plain engine", "the plain engine, from its cache")


class Stages(Protocol):
    """How a run's progress is shown."""

    def starting(self, engines: RunningEngines) -> AbstractContextManager[Callable[[StartProgress], None]]:
        """While `engines` start; what it gives is called with each step."""
        ...

    def asking(self, whom: str, prompts: Sequence[DemoPrompt]) -> AbstractContextManager[Callable[[], None]]:
        """While `prompts` are answered by `whom`; what it gives is called after each answer."""
        ...


def run_demo(
    deployment: Deployment, stages: Stages, ready_timeout_s: float = READY_TIMEOUT_S, *, restart: bool = False
) -> DemoOutcome:
    """Runs everything, one after the other, and leaves nothing running.

    The links of `deployment` get another bandwidth, which fits this machine and model (`DemoLine`).

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
    chars_per_token = _chars_per_token(deployment)
    prompts = demo_prompts(chars_per_token)
    try:
        # What has imported vLLM for the engines becomes the plain one too.
        with EngineTemplates() as templates:
            room = with_room(deployment, kv_model)
            run = _Run(room, prompts, chars_per_token, stages, ready_timeout_s, templates=templates)
            line, answered = run.two_clusters(kv_model, restart=restart)
            acts = run.plain(answered)
    except RequestFailedError as error:
        raise DemoError(f"{error}; the engines' logs are in {deployment.logs_dir}") from error
    served = deployment if line is None else line.put_in(deployment)
    return outcome_of(served, kv_model, prompts, *acts, line=line)


class PoolWatch:
    """A tool's session with each pool of a deployment."""

    def __init__(self, clients: list[PoolClient]) -> None:
        self._clients = clients

    def empty(self) -> None:
        """Drop what earlier runs left."""
        for client in self._clients:
            client.clear()

    def hit_tokens(self) -> int:
        """Tokens that engines have got from the pools so far."""
        return sum(
            int(stats.get("hit_memory_tokens", 0)) + int(stats.get("hit_ssd_tokens", 0))
            for stats in self._stats()
        )

    def settle(self, timeout_s: float) -> None:
        """Wait until no page has been added for a second: engines store in the background."""
        deadline = time.monotonic() + timeout_s
        before, since = self._stored_pages(), time.monotonic()
        while time.monotonic() < deadline and time.monotonic() - since < _SETTLED_S:
            time.sleep(_POLL_S)
            now = self._stored_pages()
            if now != before:
                before, since = now, time.monotonic()

    def _stored_pages(self) -> int:
        return sum(int(stats.get("stored_pages", 0)) for stats in self._stats())

    def _stats(self) -> list[dict[str, Any]]:
        return [client.stats() or {} for client in self._clients]


@contextmanager
def watched_pools(deployment: Deployment) -> Iterator[PoolWatch]:
    """The pools of a deployment, which run."""
    clients = [
        PoolClient(deployment.pool_socket(node), "tool", None, timeout_s=deployment.pool.timeout_s)
        for node in deployment.pools
    ]
    try:
        for client in clients:
            client.connect()
        yield PoolWatch(clients)
    finally:
        for client in clients:
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

    def two_clusters(
        self, kv_model: KvModel, *, restart: bool
    ) -> tuple[DemoLine | None, list[tuple[DemoAnswer, ...]]]:
        """The line that was chosen, None without links; the answers, and those after a restart of every engine."""
        with (
            RunningPools(self.deployment) as pools,
            RunningEngines(self.deployment, templates=self.templates) as engines,
        ):
            pools.wait_ready()
            self._wait_ready(engines)
            # Pools know what pages look like from their first engine on.
            with watched_pools(self.deployment) as watch:
                watch.empty()
                asyncio.run(warm_up(self.deployment, self.chars_per_token))
                line = self._line(kv_model)
                served = self.deployment if line is None else line.put_in(self.deployment)
                answered = [self._asked("two clusters", served, watch)]
                if not restart:
                    return line, answered
                watch.settle(_SETTLE_S)
                for name in engines.names:
                    engines.kill(name)
                engines.start()
                self._wait_ready(engines)
                asyncio.run(warm_up(self.deployment, self.chars_per_token))
                return line, [*answered, self._asked("the same clusters, restarted", served, watch)]

    def plain(self, answered: Sequence[Sequence[DemoAnswer]]) -> list[ActAnswers]:
        """The acts, of whose answers each is beside the plain engine's.

        The second is compared with answers from that engine's own cache, which splits a prompt as a pool does: what
        is behind the last whole block is computed.
        """
        plain = reference_deployment(self.deployment)
        with RunningEngines(plain, command=reference_command, templates=self.templates) as engines:
            self._wait_ready(engines)
            warm = warm_text(self.chars_per_token)
            # Both kinds of requests that are timed: the first of each takes seconds longer.
            both = [(warm, False), (warm[1:], True)]
            asyncio.run(_ask_reference(plain, both, _WARM_TOKENS, lambda: None))
            acts = []
            for answers, whom in zip(answered, _PLAIN, strict=False):
                # An engine that got nothing from another one computed the end of the prompt in one piece.
                moved = (answer.route.kv_bytes > 0 for answer in answers)
                asked = zip((prompt.text for prompt in self.prompts), moved, strict=True)
                with self.stages.asking(whom, self.prompts) as step:
                    acts.append(
                        ActAnswers(answers, asyncio.run(_ask_reference(plain, asked, ANSWER_TOKENS, step)))
                    )
            return acts

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

    def _asked(self, whom: str, served: Deployment, watch: PoolWatch) -> tuple[DemoAnswer, ...]:
        with self.stages.asking(whom, self.prompts) as answered:
            return asyncio.run(_ask_gateway(served, self.prompts, answered, watch))


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
) -> tuple[DemoAnswer, ...]:
    model = deployment.model.served_name

    async def stream_all(url: str) -> tuple[DemoAnswer, ...]:
        answers = []
        before_tokens = watch.hit_tokens()
        async with aiohttp.ClientSession() as session:
            for prompt in prompts:
                answer = await stream_completion(session, url, model, prompt.text, ANSWER_TOKENS)
                now_tokens = watch.hit_tokens()
                answers.append(replace(answer, pool_tokens=now_tokens - before_tokens))
                before_tokens = now_tokens
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
