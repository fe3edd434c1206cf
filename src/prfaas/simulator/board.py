"""The board that policies read, as it is when a simulation begins."""

from prfaas.scheduling import ClusterView, InstanceView, KvFacts, LinkView, View
from prfaas.simulator.scenario import Scenario, instance_names


def board_of(scenario: Scenario, kv: KvFacts) -> View:
    """Everybody idle, in the roles of the beginning."""
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
                    )
                    for number, name in enumerate(instance_names(cluster))
                ],
                cluster.curve.seconds,
            )
            for cluster in scenario.clusters
        },
        links={
            (link.source, link.target): LinkView(
                link.source,
                link.target,
                link.bandwidth_bits_per_s,
                rtt_s=link.rtt_s,
                # The board always knows how the link is: `Lane.look`.
                seen_s=float("inf"),
            )
            for link in scenario.links
        },
        kv=kv,
        threshold_tokens=dict(scenario.threshold_tokens),
        stale_after_s=scenario.control.stale_after_s,
    )
