"""What prefill instances decode while the KV of their prompts travels, as the live policy decides it."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from prfaas.core.deployment import RelaySettings
from prfaas.core.scheduling import RelayPlan, relay_plan
from prfaas.core.units import BITS_PER_BYTE
from prfaas.lab.simulator.answers import Answers
from prfaas.lab.simulator.events import Events
from prfaas.lab.simulator.instance import Engine, Job, JobStage
from prfaas.lab.simulator.monitored_link import MonitoredLink
from prfaas.lab.simulator.paced_clock import PacedClock

StepTime = Callable[[int], float]

# Of a token that is as good as there: clocks are floating-point numbers.
_SLACK_TOKENS = 1e-6


@dataclass(slots=True)
class Relay:
    """One answer that its prefill instance goes on with."""

    job: Job
    most_tokens: int
    """That it may still get there, after its first one; at least 1."""
    told_tokens: int = 0
    asked_tokens: int = 1
    """The instance decodes that many before anybody looks: the second token of the answer, then the others."""
    place: int = 0
    """Its number in the instance's batch."""
    longest_step_s: float = 0.0
    """Between two of its tokens."""


@dataclass(slots=True)
class RelayingEngine:
    """What an instance does beside its prefills."""

    engine: Engine
    step_s: StepTime
    """Seconds of a decode step over the batch."""
    clock: PacedClock
    chunk_s: float = 0.0
    """What a chunk of the latest prompt takes."""


class Relays:
    """The relayed answers of one simulated deployment.

    Whether an answer is relayed is decided when its prefill begins, by `core.scheduling.relay`, as live; and where the
    instance has a seat for it then. An instance that computes a prompt takes a decode step for its relayed answers
    after each chunk: both get slower. That is the most it can cost, since real engines decode within the chunk's step.

    Args:
        settings: How many tokens, and in what chunks prompts are computed.
        steps: Decode steps over the batch, by cluster.
        engines: All instances.
        events: The simulated clock.
        answers: What is told of tokens.
        over: Called with a request whose answer has ended here.
    """

    def __init__(
        self,
        settings: RelaySettings,
        steps: dict[str, StepTime],
        engines: dict[str, Engine],
        events: Events,
        answers: Answers,
        over: Callable[[Job], None],
    ) -> None:
        self._settings = settings
        self._events = events
        self._answers = answers
        self._over = over
        self._engines = {
            name: RelayingEngine(
                engine,
                steps[engine.cluster.name],
                PacedClock(events, steps[engine.cluster.name], settings.seats, _nothing, self._relayed),
            )
            for name, engine in engines.items()
        }
        # By the number of the request: how much may be relayed, and what is under way.
        self._allowed: dict[int, int] = {}
        self._open: dict[int, Relay] = {}
        # What was relayed of those whose KV has not arrived.
        self._told: dict[int, int] = {}
        # Whose prefill has begun and whose KV has not arrived.
        self._moving: dict[str, list[Job]] = {}

    def prefill_begun(self, job: Job) -> None:
        """A prefill has begun: it is decided whether its instance decodes on, and others there get slower."""
        here = self._engines[job.engine.name]
        chunks = max(job.computed_tokens / self._settings.chunk_tokens, 1.0)
        here.chunk_s = job.service_s / chunks
        if job.link is not None:
            plan = self._plan(job, job.link)
            if plan.tokens:
                self._allowed[job.number] = plan.tokens
        self._set_pace(here)

    def prefill_ended(self, engine: Engine) -> None:
        """A prefill has ended, or was lost: relayed answers get faster if it was the last one."""
        self._set_pace(self._engines[engine.name])

    def begin(self, job: Job) -> None:
        """The client has its first token from the prefill, and the rest of the KV travels."""
        allowed = self._allowed.pop(job.number, 0)
        if job.is_void or job.stage is not JobStage.SENDING or not allowed:
            return
        here = self._engines[job.engine.name]
        if here.clock.batch >= self._settings.seats:
            return
        self._open[job.number] = relay = Relay(job, min(allowed, job.left_tokens))
        self._join(here, relay)

    def hand_over(self, job: Job) -> None:
        """Its KV is there: the decode instance computes what was relayed, which crosses without KV, and goes on."""
        self.end(job)
        relayed = self._told.pop(job.number, 0)
        if relayed and not job.is_void:
            prefill_s, tokens = job.target.prefill_s, job.tokens
            self._answers.fall_behind(job, prefill_s(tokens) - prefill_s(tokens - relayed))

    def give_up(self, job: Job) -> None:
        """All is computed again: prompt, and what was relayed."""
        self.end(job)
        self._told.pop(job.number, None)

    def end(self, job: Job) -> None:
        """Its instance decodes no more of it: what it has decoded is part of the answer."""
        self._allowed.pop(job.number, None)
        relay = self._open.pop(job.number, None)
        if relay is None:
            return
        here = self._engines[job.engine.name]
        had_tokens = relay.asked_tokens - here.clock.leave(relay.place)
        whole = int(had_tokens + _SLACK_TOKENS)
        # What is left of a step says when the last whole token came.
        passed_s = max(had_tokens - whole, 0.0) * self._step_s(here)
        relay.told_tokens += whole
        if whole:
            self._answers.tell_relayed(job, relay.told_tokens, passed_s)
        self._close(here, relay)

    def check(self) -> None:
        """What must hold at every moment; an AssertionError says what is wrong."""
        for number, relay in self._open.items():
            job = relay.job
            assert job.number == number and not job.is_void, f"{number} is relayed and void"
            assert job.stage is JobStage.SENDING, f"{number} is relayed at {job.stage!r}"
            most = min(self._settings.tokens, job.left_tokens)
            assert 0 <= relay.told_tokens < relay.most_tokens <= most, f"{number} relays too much"
        for name, here in self._engines.items():
            relayed = sum(relay.job.engine.name == name for relay in self._open.values())
            assert here.clock.batch == relayed, f"{name} relays {here.clock.batch}, not {relayed}"
            assert not here.clock.waiting, f"{here.clock.waiting} wait for a seat of {name}"

    def _plan(self, job: Job, link: MonitoredLink) -> RelayPlan:
        """By the live policy, which is told of the bytes and prefills that come before this one."""
        view, now_s = link.view, self._events.now_s
        moving = self._moving.setdefault(link.fluid.name, [])
        moving[:] = [each for each in moving if each.link is link and not each.is_void]
        if view.capacity_bits_per_s > 0:
            # Here bytes are promised by the decision, live when the prefill begins.
            later_bytes = link.promised_bytes - sum(each.promised_bytes for each in moving)
            later_s = BITS_PER_BYTE * later_bytes / view.capacity_bits_per_s
            view = replace(view, drained_s=view.drained_s - later_s)
        moving.append(job)
        prefill = copy.copy(job.engine.view)
        prefill.busy_until_s -= job.service_s
        target = job.target
        assert target.clock is not None and target.step_s is not None  # only PD instances decode
        return relay_plan(
            replace(job.decision, prefill_tokens=job.computed_tokens),
            prefill,
            job.engine.cluster,
            view,
            most_tokens=self._settings.tokens,
            step_s=target.step_s(max(target.clock.batch, 1)),
            now_s=now_s,
        )

    def _join(self, here: RelayingEngine, relay: Relay) -> None:
        relay.place = here.clock.join(relay.asked_tokens, relay)
        self._set_pace(here)

    def _relayed(self, relay: Relay) -> None:
        """The tokens that were asked for are there."""
        job = relay.job
        here = self._engines[job.engine.name]
        relay.told_tokens += relay.asked_tokens
        self._answers.tell_relayed(job, relay.told_tokens, 0.0)
        relay.asked_tokens = relay.most_tokens - relay.told_tokens
        if relay.asked_tokens:
            self._join(here, relay)
            return
        del self._open[job.number]
        self._close(here, relay)
        if not job.left_tokens:
            del self._told[job.number]
            self._over(job)

    def _close(self, here: RelayingEngine, relay: Relay) -> None:
        """Its instance has done with it."""
        job = relay.job
        job.tokens += relay.told_tokens
        job.left_tokens -= relay.told_tokens
        if relay.told_tokens:
            self._told[job.number] = relay.told_tokens
            self._answers.tell_gap(job.number, relay.longest_step_s)
        self._set_pace(here)

    def _step_s(self, here: RelayingEngine) -> float:
        """From one relayed token to the next."""
        batch = max(here.clock.batch, 1)
        return here.step_s(batch) + (here.chunk_s if here.engine.at_work else 0.0)

    def _set_pace(self, here: RelayingEngine) -> None:
        """Go on with what the instance has now: chunks of prompts, a decode step after each."""
        engine, clock, step_s = here.engine, here.clock, here.step_s
        chunk_s = here.chunk_s if engine.at_work else 0.0
        clock.lengthen(chunk_s)
        between_s = self._step_s(here)
        relays: Iterator[Relay] = clock.members
        for relay in relays:
            relay.longest_step_s = max(relay.longest_step_s, between_s)
        if not engine.at_work:
            return
        slower = 1.0 + step_s(clock.batch) / chunk_s if clock.batch else 1.0
        prefills = engine.sharing
        assert isinstance(prefills, PacedClock)
        prefills.set_pace(lambda batch: slower * batch)
        free_at_s = self._events.now_s + slower * prefills.lacking_tokens
        engine.prefilled_s += free_at_s - engine.free_at_s
        engine.free_at_s = free_at_s
        engine.view.busy_until_s = free_at_s + engine.waiting_s


def _nothing(_relay: object) -> None:
    """An answer that has a seat: nothing more to do."""
