"""A control plane for tests of the gateway only: a fixed threshold, a record of what went where, /health probes.

It counts what it is told, so that tests can see that the gateway tells it everything exactly once.
"""

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import aiohttp

from prfaas.core.deployment import Deployment, Instance
from prfaas.core.prefix.hashing import MediaItem, PromptChains
from prfaas.core.scheduling.decision import Decision, Route
from prfaas.core.scheduling.view import NoDecodeInstanceError
from prfaas.serving.control.experiment import Experiment
from prfaas.serving.control.listeners import Listeners
from prfaas.serving.control.planning_inputs import kv_facts
from prfaas.serving.own_process import LoopClock
from prfaas.serving.running_deployment import RunningDeployment
from prfaas.serving.tasks import LoopFailures

BLOCK_TOKENS = 256


class FixedWork:
    """One prefill elsewhere; whether the gateway called it a measurement."""

    is_measured = False
    left_s = 0.0

    def measured(self) -> None:
        self.is_measured = True


class FixedLinks:
    """`resent`: what the producers of a pair have sent again so far."""

    def __init__(self) -> None:
        self.resent: dict[tuple[str, str], int] = {}

    def resent_bytes(self, producer: str, consumer: str) -> int | None:
        return self.resent.get((producer, consumer))


class FixedPlane:
    """`prefers`: a decode instance that is taken first. `edit`: changes decisions before they are given out.

    `waits_s`: what it predicts for everything. `every_tokens`: between checkpoints.
    """

    def __init__(
        self, deployment: Deployment, *, probe_s: float = 0.1, suspect_s: float = 0.2, can_skip: bool = True
    ) -> None:
        self._deployment = deployment
        self._instances = {instance.name: instance for instance in deployment.instances}
        self._probe_s = probe_s
        self.suspect_s = suspect_s
        self._can_skip = can_skip
        self._kv = kv_facts(deployment.model.kv_model())
        self.view = SimpleNamespace(kv=self._kv, clusters={})
        self._held: dict[str, set[int]] = {name: set() for name in self._instances}
        self._suspects: dict[str, float] = {}
        self.prefers: str | None = None
        self.edit: Callable[[Decision], Decision] = lambda decision: decision
        self.open: Counter[str] = Counter()
        self.planned_for: list[tuple[str, str]] = []
        self.observed: list[tuple[int, int]] = []
        self.measured: list[str] = []
        self.suspected: list[tuple[str, bool]] = []
        self.rejections: dict[tuple[str, str], str] = {}
        self.asked: list[str] = []
        self.routed_early: list[bool] = []
        self.own_prefills: list[int] = []
        self.drained: list[tuple[str, bool]] = []
        self.waits_s = self.answers_s = 0.0
        self.idle: str | None = None
        self.own_tokens: dict[str, int] = {}
        self.idle_is_used = False
        self.closed = False
        self.loop_clock, self.loop_failures = LoopClock(), LoopFailures()
        self.links = FixedLinks()
        self.experiment = Experiment(RunningDeployment(deployment), b"secret")
        self.every_tokens = 0
        # All the parts that the gateway asks.
        self.router = self.members = self.cluster_state = self.admission = self.prefixes = self.waits = self
        self.health = self.compatibility = self.rank_stats = self.drains = self.thresholds = self
        self.listeners = Listeners()
        self.notices: list[tuple[str, float]] = []
        self.left_s = 0.0
        self.offloads: list[bool] = []
        self.answers: list[int] = []

    def silence(self, producer: str, consumer: str, sentence: str = "nothing has come back") -> None:
        """A producer has given up the path to a consumer."""
        self.listeners.silent.tell(producer, consumer, sentence)

    def freeze(self, name: str, reason: str | None = "frozen: made to be") -> None:
        """Judge an instance frozen; with None: not any more. It stays in routing."""
        self.listeners.frozen.tell(name, reason)

    def idle_decode_instance(self) -> str | None:
        return self.idle

    def is_used(self, name: str) -> bool:
        return self.idle_is_used

    @property
    def busy(self) -> int:
        """Prefills and decodes that the gateway has begun and not ended."""
        return sum(self.open.values())

    def chains(
        self, token_ids: Sequence[int], salt: str, adapter: str, media: Sequence[MediaItem] = ()
    ) -> PromptChains:
        chain = [hash((salt, adapter, *media))]
        for begin in range(0, len(token_ids) - BLOCK_TOKENS, BLOCK_TOKENS):
            chain.append(hash((chain[-1], *token_ids[begin : begin + BLOCK_TOKENS])))
        return PromptChains(len(token_ids), {BLOCK_TOKENS: tuple(chain[1:])})

    def route(
        self,
        num_tokens: int,
        chains: PromptChains,
        *,
        avoid: Collection[str] = (),
        offload: bool = True,
        first_from_prefill: bool = False,
    ) -> Decision:
        self.offloads.append(offload)
        self.routed_early.append(first_from_prefill)
        up, held = self._up((chains,), avoid)
        best = partial(self._best, held)
        decode = best(i for i in up if i.has_role("decode"))
        if decode is None:
            raise NoDecodeInstanceError("nobody decodes")
        near = best(
            i for i in up if i.has_role("prefill") and i.cluster == decode.cluster and i is not decode
        )
        far = best(i for i in up if i.has_role("prefill") and i.cluster != decode.cluster)
        uncached = num_tokens - (held[near.name] if near is not None else 0)
        threshold = self._deployment.routing.threshold_tokens
        assert threshold is not None
        route, prefill, reason = Route.LOCAL, decode, "unseen"
        if offload and far is not None and uncached > threshold:
            route, prefill, reason = Route.OFFLOAD, far, "long"
        elif near is not None:
            prefill, reason = near, "short" if uncached <= threshold else "no-prfaas-instance"
        else:
            reason = "no-prefill-instance"
        skip = held[decode.name] if self._can_skip and prefill is not decode else 0
        return self.edit(
            Decision(
                route=route,
                prefill=prefill.name,
                decode=decode.name,
                uncached_tokens=uncached,
                prefill_tokens=num_tokens - held[prefill.name],
                skip_tokens=skip,
                kv_bytes=self._kv.bytes_to_move(num_tokens, skip) if prefill is not decode else 0,
                reason=reason,
                threshold_tokens=float(threshold),
                predicted_ttft_s=0.5,
            )
        )

    def at_decode(
        self,
        num_tokens: int,
        chains: Sequence[PromptChains] = (),
        *,
        reason: str = "whole",
        reuses: bool = True,
        avoid: Collection[str] = (),
    ) -> Decision:
        up, held = self._up(chains, avoid)
        decode = self._best(held, (i for i in up if i.has_role("decode")))
        if decode is None:
            raise NoDecodeInstanceError("nobody decodes")
        return Decision(
            route=Route.LOCAL,
            prefill=decode.name,
            decode=decode.name,
            uncached_tokens=num_tokens - reuses * held[decode.name],
            prefill_tokens=num_tokens - reuses * held[decode.name],
            skip_tokens=0,
            kv_bytes=0,
            reason=reason,
            threshold_tokens=math.inf,
            predicted_ttft_s=0.5 if num_tokens else math.nan,
        )

    def _up(
        self, chains: Sequence[PromptChains], avoid: Collection[str]
    ) -> tuple[list[Instance], dict[str, int]]:
        """Those that may be used, and the tokens that each holds of the prompts."""
        up = [i for i in self._instances.values() if i.name not in self._suspects and i.name not in avoid]
        return up, {i.name: sum(self._held_tokens(i.name, each) for each in chains) for i in up}

    def _best(self, held: dict[str, int], candidates: Iterable[Instance]) -> Instance | None:
        return min(
            candidates,
            key=lambda i: (i.name != self.prefers, -held[i.name], self.open[i.name], i.name),
            default=None,
        )

    def decoders(self) -> list[str]:
        return [
            i.name for i in self._instances.values() if i.name not in self._suspects and i.has_role("decode")
        ]

    def _held_tokens(self, name: str, chains: PromptChains) -> int:
        hashes = chains.by_block_tokens[BLOCK_TOKENS]
        return BLOCK_TOKENS * sum(1 for _ in itertools.takewhile(self._held[name].__contains__, hashes))

    def checkpoint_tokens(self, decision: Decision) -> int:
        return self.every_tokens

    def may_sample(self, decision: Decision) -> bool:
        prefill, decode = self._instances[decision.prefill], self._instances[decision.decode]
        return not self.every_tokens and not self._deployment.pulls(prefill, decode)

    def least(self) -> float:
        return self.waits_s

    def of(self, decision: Decision) -> float:
        return self.waits_s

    def answer_s(self, decode: str, max_tokens: int | None) -> float:
        return self.answers_s

    def instance(self, name: str) -> Instance:
        return self._instances[name]

    def own_last_tokens(self, name: str) -> int:
        return self.own_tokens.get(name, 1)

    @asynccontextmanager
    async def admit(self, decision: Decision, chains: PromptChains) -> AsyncIterator[Decision]:
        yield decision

    @contextmanager
    def planned(self, decision: Decision) -> Iterator[None]:
        self.planned_for.append((decision.prefill, decision.decode))
        yield
        self.planned_for.remove((decision.prefill, decision.decode))

    @contextmanager
    def prefilling(self, decision: Decision) -> Iterator[FixedWork]:
        work = FixedWork()
        work.left_s = self.left_s
        with self._counted(decision.prefill):
            yield work
        if work.is_measured:
            self.measured.append(decision.prefill)

    @contextmanager
    def decoding(self, name: str, tokens: int, reused_tokens: int = 0, *, answers: int = 1) -> Iterator[None]:
        self.own_prefills.append(tokens)
        self.answers.append(answers)
        with self._counted(name):
            yield

    @contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        self.open[name] += 1
        try:
            yield
        finally:
            self.open[name] -= 1

    def expect(self, name: str, chains: PromptChains) -> None:
        self._held[name].update(chains.by_block_tokens[BLOCK_TOKENS])

    def observe(self, num_tokens: int, uncached_tokens: int) -> None:
        self.observed.append((num_tokens, uncached_tokens))

    def suspect(self, name: str, reason: str, *, lost_cache: bool = False) -> None:
        self.suspected.append((name, lost_cache))
        self._suspects[name] = asyncio.get_running_loop().time() + self.suspect_s
        if lost_cache:
            self._held[name].clear()

    def drain(self, name: str, *, wanted: bool) -> None:
        self.drained.append((name, wanted))

    def give_notice(self, name: str, notice_s: float) -> None:
        self.notices.append((name, notice_s))
        self.listeners.noticed.tell(name, notice_s)

    def hold(self, cluster: str, tokens: float | None) -> None:
        raise ValueError("this one is fixed")

    def reason(self, producer: str, consumer: str) -> str | None:
        # What only a producer knows yet is not known here before it was asked.
        return self.rejections.get((producer, consumer)) if producer in self.asked else None

    async def ask(self, producer: str) -> None:
        self.asked.append(producer)

    def is_up(self, name: str) -> bool:
        return name not in self._suspects

    def state(self) -> dict[str, Any]:
        return {
            "clusters": {
                cluster.name: {
                    "instances": {
                        i.name: {"role": "+".join(i.roles), "healthy": self.is_up(i.name), "drain": None}
                        for i in cluster.instances
                    }
                }
                for cluster in self._deployment.clusters
            }
        }

    async def run(self) -> None:
        """Probes suspects until cancelled."""
        await asyncio.gather(self.loop_clock.run(), self._probe())

    async def _probe(self) -> None:
        loop = asyncio.get_running_loop()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session:
            while True:
                await asyncio.sleep(self._probe_s)
                for name, until_s in list(self._suspects.items()):
                    if loop.time() >= until_s and await _healthy(session, self._instances[name].url):
                        self._suspects.pop(name, None)

    async def close(self) -> None:
        self.closed = True


async def _healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url + "/health") as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
