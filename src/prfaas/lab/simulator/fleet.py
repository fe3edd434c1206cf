"""The parts of a scenario's world: its view, links and engines."""

from collections.abc import Callable, Mapping
from itertools import count

import numpy as np

from prfaas.core.kv.model import KvModel
from prfaas.core.latency.service_curve import ServiceCurve
from prfaas.core.scheduling.decision import KvFacts
from prfaas.core.scheduling.prefill_pool import PrefillPool
from prfaas.core.scheduling.view import ClusterView, InstanceView, LinkView, View
from prfaas.core.units import GB, SECONDS_PER_HOUR
from prfaas.lab.simulator.answers import Answers
from prfaas.lab.simulator.events import Events
from prfaas.lab.simulator.instance import Engine, Job
from prfaas.lab.simulator.link import FluidLink
from prfaas.lab.simulator.monitored_link import MonitoredLink
from prfaas.lab.simulator.scenario import Scenario, instance_names
from prfaas.lab.simulator.simulated_cluster import SimulatedCluster
from prfaas.lab.simulator.token_clock import StepGrowth, TokenClock
from prfaas.lab.simulator.transfer import KvMoves

JobCallback = Callable[[Job], None]


def links_of(
    scenario: Scenario, view: View, kv: KvMoves, events: Events, rng: np.random.Generator
) -> dict[tuple[str, str], MonitoredLink]:
    """By (source, target); `rng` is for their capacities."""
    return {
        (link.source, link.target): MonitoredLink(
            view.links[link.source, link.target],
            FluidLink(
                events,
                link.name,
                scenario.capacity_of(link),
                rng=stream,
                rtt_s=link.rtt_s,
                transfer_limit_bits_per_s=link.transfer_limit_bits_per_s,
            ),
            KvMoves(scenario.link_models[link.name]) if link.name in scenario.link_models else kv,
            events,
            scenario.control.silence_s,
        )
        for link, stream in zip(scenario.links, rng.spawn(len(scenario.links)), strict=True)
    }


def engines_of(
    scenario: Scenario,
    view: View,
    pools: Mapping[str, PrefillPool[Job]],
    events: Events,
    answers: Answers,
) -> dict[str, Engine]:
    """By name."""
    numbers = count()
    engines = {
        instance.name: Engine(
            instance,
            view.clusters[cluster.name],
            pools[cluster.name],
            _decode_batch_of(cluster, events, answers.begin, answers.end),
            cluster.decode_step_s,
            chunk_tokens=cluster.chunk_tokens,
            block_tokens=cluster.kv_block_tokens if scenario.kv_model.is_hybrid else 1,
            mixed_tokens=cluster.mixed_tokens,
            number=next(numbers),
        )
        for cluster in scenario.clusters
        for instance in view.clusters[cluster.name].instances
    }
    for engine in engines.values():
        if engine.view.group:
            engine.ranks = [engines[name] for name in engine.view.group]
    return engines


def _decode_batch_of(
    cluster: SimulatedCluster, events: Events, started: JobCallback, done: JobCallback
) -> TokenClock | None:
    """That of one instance; None where nothing decodes."""
    if cluster.decode_step_s is None:
        return None
    growth = StepGrowth(cluster.context_s, cluster.measured_context_tokens)
    return TokenClock(events, cluster.decode_step_s, cluster.decode_slots, started, done, growth)


def view_of(scenario: Scenario, kv: KvFacts) -> View:
    """The view that policies read when a simulation begins: every instance idle, in its first role."""
    kept = {cluster.name: cluster.kv_model or scenario.kv_model for cluster in scenario.clusters}
    return View(
        clusters={
            cluster.name: ClusterView(
                cluster.name,
                cluster.kind,
                [
                    InstanceView(
                        name,
                        cluster.name,
                        prefills=number < cluster.prefill_instances,
                        decodes=number >= cluster.prefill_instances,
                        decode_slots=cluster.decode_slots,
                        group=_group_of(cluster, number),
                    )
                    for number, name in enumerate(instance_names(cluster))
                ],
                cluster.curve.seconds,
                slot_s=scenario.output_tokens * cluster.full_step_s,
                instance_price_per_s=cluster.instance_price_per_hour / SECONDS_PER_HOUR,
                kills_per_s=cluster.kills_per_hour / SECONDS_PER_HOUR,
                kv=_facts(cluster.kv_model),
                pool_kv=None if kept[cluster.name] == scenario.sent_model else _facts(kept[cluster.name]),
            )
            for cluster in scenario.clusters
        },
        links={
            (link.source, link.target): LinkView(
                link.source,
                link.target,
                link.bandwidth_bits_per_s,
                rtt_s=link.rtt_s,
                # The view is always kept up to date: `MonitoredLink.look`.
                seen_s=float("inf"),
                egress_price_per_byte=link.egress_per_gb / GB,
                kv=_facts(scenario.link_models.get(link.name)),
                joins_pools=kept[link.source] == kept[link.target],
            )
            for link in scenario.links
        },
        kv=kv,
        threshold_tokens=dict(scenario.threshold_tokens),
        stale_after_s=scenario.control.stale_after_s,
        # As `KeptTransfers`: every prefill of a simulation gives the first token, or none does.
        keeps_transfers=scenario.keeps_transfers and scenario.first_token != "prefill",
    )


def _group_of(cluster: SimulatedCluster, number: int) -> tuple[str, ...]:
    """The names of those that an instance is in a group with, its own among them; none where it is in none."""
    ranks = cluster.group_ranks
    first = number - number % ranks
    return tuple(instance_names(cluster)[first : first + ranks]) if ranks > 1 else ()


def _facts(model: KvModel | None) -> KvFacts | None:
    return None if model is None else KvFacts.of_model(model)


def usual_curves(scenario: Scenario) -> dict[str, ServiceCurve]:
    """By cluster, what prefills of so many uncached tokens take with the prefixes behind which they are, as the live
    `PrefillCurves.usual`: for the slow loops. None where these don't run, or no prompt has a cached prefix."""
    if not (scenario.adapts or scenario.allocation) or (scenario.caches is None and not scenario.pools):
        return {}
    control = scenario.control
    rebuild_s = min(control.threshold_period_s, control.allocation_period_s) / 2
    return {cluster.name: cluster.curve.copied(rebuild_s) for cluster in scenario.clusters}
