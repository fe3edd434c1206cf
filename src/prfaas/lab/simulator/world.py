"""The simulated deployment: engines, links and the view that policies read, and what happens to a request there."""

import math
from collections.abc import Iterator
from heapq import heappush

import numpy as np

from prfaas.core.link.patience import late_after_s
from prfaas.core.prefix.index import PrefixHit
from prfaas.core.scheduling.checked_policy import CheckedPolicy
from prfaas.core.scheduling.decision import Decision, RoutingRequest
from prfaas.core.scheduling.decoders import slot_free_s
from prfaas.core.scheduling.length_window import LengthWindow
from prfaas.core.scheduling.policy import POLICIES, Policy, make_policy
from prfaas.core.scheduling.prefill_pool import PrefillPool
from prfaas.core.scheduling.waits import work_wait_s
from prfaas.core.units import BITS_PER_BYTE
from prfaas.lab.simulator.answers import Answers
from prfaas.lab.simulator.columns import REFUSED, Columns
from prfaas.lab.simulator.events import Callback, Events
from prfaas.lab.simulator.fleet import engines_of, links_of, usual_curves, view_of
from prfaas.lab.simulator.instance import Engine, Job, JobStage
from prfaas.lab.simulator.kept_transfers import KeptTransfers
from prfaas.lab.simulator.monitored_link import LOOK_S
from prfaas.lab.simulator.pools import MachinePools
from prfaas.lab.simulator.prefix_caches import PrefixCaches
from prfaas.lab.simulator.scenario import Scenario
from prfaas.lab.simulator.send_queue import FluidTransfer
from prfaas.lab.simulator.transfer import KvMoves

_NOTHING_HELD: dict[str, PrefixHit] = {}
# Reading a member of an enum takes as long as a function call.
_MOVING, _QUEUED, _POOLED, _PREFILLING, _SHARING, _SENDING, _DECODING = JobStage


class World:
    """One simulated deployment, empty at 0 s. It owns the view that the policy reads.

    A request: `arrive` asks the policy; its prefill waits at an instance (or in its cluster's pool), runs, and
    streams its KV over the link meanwhile; with all of it there, the request takes a slot of its decode instance,
    which ends its TTFT, and leaves with its last token. A prefill takes what the cluster's curve says; inside a
    cluster KV takes no time (section 3.4.1).
    """

    def __init__(self, scenario: Scenario, rng: np.random.Generator, block_tokens: int) -> None:
        """`rng` is for the links' capacities; `block_tokens`: of the traffic's prefix blocks."""
        self.scenario = scenario
        self.events = Events()
        self.usual = usual_curves(scenario)
        self.kv = KvMoves(scenario.sent_model)
        policy = make_policy(scenario.policy, scenario.params)
        self.policy: Policy = policy if scenario.policy in POLICIES else CheckedPolicy(policy)
        self.view = view_of(scenario, self.kv.facts)
        self._first_from_prefill = scenario.first_token == "prefill"
        self.columns = Columns(self._first_from_prefill)
        self.open: dict[int, Job] = {}
        self.answers = Answers(self.events, self.columns, scenario.overheads, self.open)
        self.prefill_pools: dict[str, PrefillPool[Job]] = {
            name: PrefillPool(waits=cluster.waits) for name, cluster in self.view.clusters.items()
        }
        self.engines = engines_of(scenario, self.view, self.prefill_pools, self.events, self.answers)
        self.links = links_of(scenario, self.view, self.kv, self.events, rng)
        caches = scenario.caches
        self.caches = None if caches is None else PrefixCaches(list(self.engines), caches, block_tokens)
        self.pools = MachinePools(scenario, self.view, block_tokens, self.columns) if scenario.pools else None
        self._limits_waits = scenario.queue_limit_s < math.inf
        self.window = LengthWindow(scenario.control.window_s)
        self._local: Policy = make_policy("local_only")
        self._kept = KeptTransfers(scenario, self.kv)
        # Others take what profiles say.
        self._are_steps_slow = scenario.slowdown is not None or any(
            cluster.mixed_tokens for cluster in scenario.clusters
        )
        self._watches_lengths = scenario.adapts or scenario.allocation
        self._next_look_s = 0.0
        self._when_prefilled: Callback = self._prefilled  # bound once: every event would make another
        self._when_arrived: Callback = self._arrived

    def arrive(self, number: int, tokens: int, answer_tokens: int, blocks: list[int]) -> None:
        """A request comes now: `tokens` of prompt in prefix `blocks` (empty: unknown), an answer of so many tokens."""
        now_s = self.events.now_s
        if now_s >= self._next_look_s:
            self.look()
        job = Job(number, now_s, tokens, answer_tokens, blocks)
        if not self._route(job, self.policy):
            self.columns.reason[number] = self.columns.code(REFUSED)
            return
        decision, columns = job.decision, self.columns
        uncached = decision.uncached_tokens
        if self._watches_lengths:
            self.window.add(uncached, now_s)
        columns.uncached_tokens[number] = uncached
        columns.hit_tokens[number] = tokens - decision.prefill_tokens
        columns.reason[number] = columns.code(decision.reason)
        if job.promised_bytes:
            columns.offloaded[number] = 1

    def look(self) -> None:
        """Bring the view of the links up to date, and give up what waits for a link that is gone."""
        now_s = self.events.now_s
        self._next_look_s = now_s + LOOK_S
        for link in self.links.values():
            link.look(now_s)
            if now_s - link.carried_s >= self.scenario.stall_limit_s:
                for job in [job for job in self.open.values() if link in (job.link, job.prefix_link)]:
                    self.restart(job)

    def restart(self, job: Job, *, anywhere: bool = False) -> None:
        """Prefill a request again, in its PD cluster or `anywhere`, or from what was kept of it, as the live system."""
        kept = self._kept.decision(job, self.events.now_s, is_preempted=anywhere)
        self._give_up(job)
        again = Job(job.number, job.arrival_s, job.tokens, job.left_tokens, job.blocks)
        again.has_first = job.has_first
        self.columns.retries[job.number] += 1
        self._route(again, self.policy if anywhere else self._local, is_new=False, kept=kept)

    def start_next(self, engine: Engine) -> None:
        """Begin the next of an instance's queue, or of its cluster's pool, if there is room."""
        queue, view = engine.queue, engine.view
        if queue and not engine.at_work:
            job = queue.popleft()
            engine.take(job.service_s)
            self._start(engine, job)
        if queue or not len(engine.pool) or not view.takes_prefills:
            return
        now_s = self.events.now_s
        if not engine.at_work and engine.has_time(now_s):
            taken = engine.pool.take(engine.name, now_s=now_s)
            if taken is not None:
                self._assign(engine, taken)
                self._start(engine, taken)

    def set_free(self, engine: Engine) -> None:
        """Let any other instance of its cluster take what waits for this one alone: it leaves, or has failed."""
        engine.pool.release(engine.name)
        engine.cluster.waiting_s = engine.pool.waiting_s
        for job in self.open.values():
            if job.engine is engine and job.stage is _QUEUED and job in engine.pool:
                job.stage = _POOLED
                engine.withdraw(job.service_s, self.events.now_s)
        if not len(engine.pool):
            return
        others = [other for other in self.engines.values() if other.cluster is engine.cluster]
        if not any(other.view.takes_prefills for other in others):
            for job in [job for job in self.open.values() if job in engine.pool]:
                self.restart(job)
        for other in others:
            self.start_next(other)

    def _route(self, job: Job, policy: Policy, *, is_new: bool = True, kept: Decision | None = None) -> bool:
        """Put a request where the policy says, or what was `kept` of it does.

        False: it comes now, would wait too long, and is refused.
        """
        view, now_s, engines = self.view, self.events.now_s, self.engines
        view.now_s = now_s
        held = self.caches.held(job.blocks, job.tokens) if self.caches is not None else _NOTHING_HELD
        job.decision = decision = kept or policy.decide(self._request(job, held), view)
        job.engine = engine = engines[decision.prefill]
        job.target = target = engines[decision.decode]
        if self._limits_waits and is_new and self._would_wait_s(job) > self.scenario.queue_limit_s:
            return False
        job.computed_tokens = computed = decision.prefill_tokens
        job.service_s = engine.after_prefix_s(computed, job.tokens - computed)
        if self.pools is not None:
            self.pools.place(job, held)
        self.open[job.number] = job
        target_view = target.view
        target_view.in_flight += 1
        target_view.decoding += 1
        if engine is not target:
            engine.view.in_flight += 1
            if engine.cluster is not target.cluster:
                job.link = link = self.links[engine.cluster.name, target.cluster.name]
                job.promised_bytes = nbytes = link.kv.facts.bytes_to_move(
                    job.tokens - 1, decision.skip_tokens
                )
                link.promise(nbytes, now_s)
        if decision.cache_transfer is not None:
            # Meanwhile the prefill counts as accepted by its instance.
            job.stage = _MOVING
            engine.accept(job.service_s, now_s)
            self._move_prefix(job)
        elif not engine.at_work and not engine.queue:
            self._start(engine, job)
        else:
            self._wait(job)
        return True

    def _would_wait_s(self, job: Job) -> float:
        """Seconds that a new job would wait for its prefill, its link or its decode slot.

        Live the wait for a decode slot is that of the engine's seats; here it is that of the slots which keep the SLO,
        for no more decode here.
        """
        engine, target, view = job.engine, job.target, self.view
        link = view.links.get((engine.cluster.name, target.cluster.name))
        work_s = work_wait_s(job.decision, engine.view, engine.cluster, link, view.now_s)
        return max(work_s, slot_free_s(target.view, target.cluster.slot_s))

    def _request(self, job: Job, held: dict[str, PrefixHit]) -> RoutingRequest:
        first = self._first_from_prefill and not job.has_first
        if self.pools is None:
            return RoutingRequest(job.tokens, held, job.number, first_from_prefill=first)
        return self.pools.request(job.number, job.tokens, job.blocks, held, first)

    def _move_prefix(self, job: Job) -> None:
        """Carry out the cache transfer that the job's decision wants: instance to instance, or pool to pool."""
        moved, target, now_s = job.decision.cache_transfer, job.engine.cluster.name, self.events.now_s
        assert moved is not None
        begins_s = now_s
        if moved.from_pool:
            assert self.pools is not None
            source = self.pools.source_cluster(moved)
            if source == target:
                self.events.at(self.pools.read(job, moved, now_s), self._prefix_here, job)
                return
            self.pools.send(job, moved)
        else:
            holder = self.engines[moved.source]
            source = holder.cluster.name
            # What an instance sends it has computed the last token of, behind the prefills that it had.
            begins_s = max(now_s, holder.view.busy_until_s)
        job.prefix_link = self.links[source, target]
        if begins_s > now_s:
            self.events.at(begins_s, self._send_prefix, job)
        else:
            self._send_prefix(job)

    def _send_prefix(self, job: Job) -> None:
        moved, link = job.decision.cache_transfer, job.prefix_link
        if job.is_void or moved is None or link is None:
            return
        nbytes = (
            moved.kv_bytes
            if moved.from_pool
            else link.kv.facts.prefix_bytes_to_move(moved.reusable_tokens, moved.skip_tokens)
        )
        self.columns.link_bytes[job.number] += nbytes
        job.transfer = link.fluid.send(
            (moved.source, job.engine.name), nbytes, self._prefix_here, job, background=True
        )

    def _prefix_here(self, job: Job) -> None:
        """A job's prefix has come to its prefill instance, or to that one's pool."""
        if job.is_void:
            return
        engine = job.engine
        job.prefix_link = job.transfer = None
        job.stage = _QUEUED
        moved = job.decision.cache_transfer
        if self.pools is not None and moved is not None and moved.from_pool:
            self.pools.receive(job, moved)
        elif self.caches is not None:
            self.caches.insert(engine.name, job.blocks, job.tokens - job.decision.prefill_tokens)
        if not engine.at_work and not engine.queue:
            engine.take(job.service_s)
            self._start(engine, job)
        else:
            job.queued_s = self.events.now_s
            engine.queue.append(job)

    def _wait(self, job: Job) -> None:
        engine, decision, now_s = job.engine, job.decision, self.events.now_s
        if decision.urgency_s is None:
            job.queued_s = now_s
            engine.queue.append(job)
            engine.accept(job.service_s, now_s)
        elif decision.is_bound:
            engine.pool.offer(job, decision.urgency_s, job.service_s, engine.name, now_s=now_s)
            engine.accept(job.service_s, now_s)
        else:
            engine.pool.offer(job, decision.urgency_s, job.service_s, now_s=now_s)
            engine.cluster.waiting_s = engine.pool.waiting_s
            job.stage = _POOLED
            if self.caches is not None or self.pools is not None:
                # One that holds less may be idle: without caches the idle one was chosen.
                for other in self.engines.values():
                    if other.cluster is engine.cluster:
                        self.start_next(other)

    def _assign(self, engine: Engine, job: Job) -> None:
        """A job of the pool goes to an instance that is free."""
        if job.stage is _QUEUED:
            engine.take(job.service_s)
        else:
            engine.cluster.waiting_s = engine.pool.waiting_s
        before = job.engine
        if engine is not before:
            if before is not job.target:
                before.view.in_flight -= 1
            if engine is not job.target:
                engine.view.in_flight += 1
            job.engine = engine
            if self.caches is not None or self.pools is not None:
                self._look_up(job)

    def _look_up(self, job: Job) -> None:
        """What the instance holds that a job of the pool went to."""
        engine = job.engine
        held = self.caches.held(job.blocks, job.tokens) if self.caches is not None else _NOTHING_HELD
        request = self._request(job, held)
        reusable = request.reusable_at(engine.name)
        job.computed_tokens = job.tokens - reusable
        job.service_s = engine.after_prefix_s(job.computed_tokens, reusable)
        if self.pools is not None:
            self.pools.settle(job, held, reusable, request.loads_s.get(engine.name, 0.0))
        self.columns.hit_tokens[job.number] = reusable

    def _start(self, engine: Engine, job: Job) -> None:
        events, link, chunk_s = self.events, job.link, 0.0
        if self._are_steps_slow:
            if self.scenario.slowdown is not None:
                job.service_s = self.scenario.slowdown.stretched_s(events.now_s, job.service_s)
            chunk_s = engine.share_steps(job)
        if self.pools is not None:
            job.service_s = self.pools.service_s(job, events.now_s)
        service_s = job.service_s
        if self.usual:
            self.usual[engine.cluster.name].add(job.computed_tokens, service_s, events.now_s)
        end_s = events.now_s + service_s
        job.stage = _PREFILLING
        number, columns = job.number, self.columns
        columns.prefill_from_s[number], columns.prefilled_on[number] = (
            events.now_s - job.arrival_s,
            engine.number,
        )
        engine.at_work += 1
        engine.free_at_s = end_s
        engine.prefilled_s += service_s
        engine.view.busy_until_s = end_s + engine.waiting_s
        if link is not None:
            streamed_bytes = link.kv.streamed_bytes(job.tokens - 1, job.decision.skip_tokens)
            if engine.chunk_tokens:
                streamed_bytes += link.kv.window_bytes(job.tokens - 1, job.tokens - 1)
            last_bytes, route = job.promised_bytes - streamed_bytes, (engine.name, job.target.name)
            if engine.cluster.kills_per_s:
                streamed_bytes += self._kept.checkpoint_bytes(job, link.view.capacity_bits_per_s)
            job.transfer = transfer = link.fluid.stream(
                route, streamed_bytes, last_bytes, service_s, self._when_arrived, job, ends_by_itself=False
            )
            if engine.chunk_tokens:
                self._follow_chunks((job, _chunk_rates(job, transfer)))
        events.number = number = events.number + 1
        heappush(events.heap, (end_s, number, self._when_prefilled, job))
        if chunk_s:
            engine.lengthen_steps(chunk_s, events.now_s)

    def _follow_chunks(self, stream: "tuple[Job, _Rates]") -> None:
        """Set the rate of a stream whose prefill runs in chunks, and again with the next chunk."""
        job, rates = stream
        link, transfer = job.link, job.transfer
        if link is None or transfer is None:
            return
        lasts_s, bits_per_s = next(rates, (0.0, 0.0))
        if lasts_s and link.fluid.produce_at(transfer, bits_per_s):
            self.events.at(self.events.now_s + lasts_s, self._follow_chunks, stream)

    def _prefilled(self, job: Job) -> None:
        engine, now_s = job.engine, self.events.now_s
        late_s = 0.0
        if engine.chunk_tokens and not (job.is_void or job.is_lost):
            late_s = engine.fill_up(job, now_s)
        if late_s > 0:
            job.stage = _SHARING
            self.events.at(now_s + late_s, self._computed, job)
        if job.transfer is not None and job.link is not None:
            if late_s > 0:
                job.link.fluid.hold(job.transfer)
            job.link.fluid.end_production(job.transfer)
        if not job.is_lost:
            engine.at_work -= 1
            if late_s <= 0:
                self._computed(job)
            if engine.queue or engine.pool:
                self.start_next(engine)
        if engine.chunk_s and not engine.at_work:
            engine.lengthen_steps(0.0, now_s)

    def _computed(self, job: Job) -> None:
        """All of its KV is there."""
        if job.is_void:
            return
        engine = job.engine
        self.columns.prefill_to_s[job.number] = self.events.now_s - job.arrival_s
        if engine is not job.target:
            engine.view.in_flight -= 1
        if self.caches is not None:
            self.caches.insert(engine.name, job.blocks, job.tokens)
        if self.pools is not None:
            self.pools.computed(job)
        if self._first_from_prefill and self.answers.end_with_prefill(job):
            job.leave_link(self.events.now_s)
            job.is_void = True
        elif job.stage is _PREFILLING or job.stage is _SHARING:
            job.stage = _SENDING
            if job.link is None:
                self._arrived(job)
                return
            if job.transfer is not None:
                job.link.fluid.release(job.transfer)
            # It may all be there with that: then it has arrived by now.
            if job.link is not None and (grace_s := self.scenario.transfer_grace_s) < math.inf:
                late_s = late_after_s(job.promised_bytes, job.link.configured_bits_per_s, grace_s)
                self.events.at(self.events.now_s + late_s, self._late, job)

    def _late(self, job: Job) -> None:
        if job.stage is _SENDING and not job.is_void:
            self.restart(job)

    def _arrived(self, job: Job) -> None:
        """All KV is at the decode instance."""
        if job.is_void:
            return
        is_over = self._first_from_prefill and self.answers.end_with_prefill(job)
        link, target = job.link, job.target
        if link is not None:
            link.settle(job.promised_bytes, self.events.now_s)
            self.columns.link_bytes[job.number] += job.promised_bytes + job.checkpoint_bytes
            job.transfer = job.link = None
        if is_over:
            job.stage = _DECODING
            return
        if not target.view.healthy:
            self.restart(job)
            return
        if self.caches is not None and job.engine is not target:
            self.caches.insert(target.name, job.blocks, job.tokens, with_states=False)
        if self.pools is not None:
            self.pools.arrived(job)
        job.stage = _DECODING
        number, columns = job.number, self.columns
        columns.kv_there_s[number], columns.decoded_on[number] = (
            self.events.now_s - job.arrival_s,
            target.number,
        )
        assert target.clock is not None  # only PD instances decode
        target.clock.join(job.left_tokens, job, job.tokens)

    def _give_up(self, job: Job) -> None:
        """Undo what the job holds."""
        engine, target, now_s = job.engine, job.target, self.events.now_s
        job.is_void = True
        target.view.in_flight -= 1
        target.view.decoding -= 1
        if engine is not target and job.stage <= _SHARING:
            engine.view.in_flight -= 1
        if job.stage is _MOVING:
            engine.withdraw(job.service_s, now_s)
        elif job.stage is _QUEUED:
            if not engine.pool.withdraw(job):
                engine.queue.remove(job)
            engine.withdraw(job.service_s, now_s)
        elif job.stage is _POOLED:
            engine.pool.withdraw(job)
            engine.cluster.waiting_s = engine.pool.waiting_s
        job.leave_link(now_s)


_Rates = Iterator[tuple[float, float]]
"""Seconds, and bits per second for so long."""


def _chunk_rates(job: Job, transfer: FluidTransfer) -> _Rates:
    """Of the stream of a prefill that runs in chunks, one chunk after another.

    The first chunks of a long prompt attend to few tokens, so they take less time than the last ones and their KV needs
    more of a link. What the engine had cached of the prompt leaves with the first one.
    """
    engine = job.engine
    skip_tokens, prefix_tokens = job.decision.skip_tokens, job.tokens - job.computed_tokens
    sent_tokens, link = job.tokens - 1 - skip_tokens, job.link
    if sent_tokens <= 0 or not job.computed_tokens or link is None:
        return
    window_bits = BITS_PER_BYTE * link.kv.window_bytes(job.tokens - 1, job.tokens - 1)
    token_bits = (transfer.total_bits - transfer.last_bits - window_bits) / sent_tokens
    pace = job.service_s / engine.after_prefix_s(job.computed_tokens, prefix_tokens)
    before_s, unsent_from, sent_bits = 0.0, skip_tokens, 0.0
    for begun in range(0, job.computed_tokens, engine.chunk_tokens):
        done = min(begun + engine.chunk_tokens, job.computed_tokens)
        at_s = engine.after_prefix_s(done, prefix_tokens) * pace
        end = min(prefix_tokens + done, job.tokens - 1)
        if at_s > before_s and end > unsent_from:
            # What windows hold of the prompt so far.
            held_bits = float(BITS_PER_BYTE * link.kv.window_bytes(job.tokens - 1, end))
            bits = token_bits * (end - unsent_from) + held_bits - sent_bits
            yield at_s - before_s, bits / (at_s - before_s)
            before_s, unsent_from, sent_bits = at_s, end, held_bits
