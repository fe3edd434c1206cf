"""The view as far as the deployment file decides it: who is where, what links are there, what things cost."""

from dataclasses import replace

from prfaas.core.deployment import AppliedDeployment, Instance
from prfaas.core.latency.prefill_curves import PrefillCurves
from prfaas.core.scheduling.decoders import slot_free_s
from prfaas.core.scheduling.view import InstanceView
from prfaas.core.units import GB, SECONDS_PER_HOUR
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.metrics import ControlMetrics
from prfaas.serving.control.part import Json, Part
from prfaas.serving.control.planning_inputs import cluster_view, curves_of, instance_view, link_view
from prfaas.serving.running_deployment import RunningDeployment


class DeployedView(Part):
    """Keeps the view that of the file, and tells what is in it. It is the first part of a plane.

    An instance that joins takes part when it has answered. A link that is added is used once the engines know it.
    """

    def __init__(
        self, running: RunningDeployment, cluster_state: ClusterState, curves: dict[str, PrefillCurves]
    ) -> None:
        """
        Args:
            running: what the view is to be of.
            cluster_state: has the view.
            curves: how fast an instance of a cluster prefills, by the cluster's name.
        """
        self._running = running
        self._cluster_state = cluster_state
        self._curves = curves
        self._started_s = cluster_state.view.now_s

    def join(self, instance: Instance) -> None:
        """One more in the view, with its cluster."""
        deployment, state = self._running.current, self._cluster_state
        cluster = deployment.cluster_of(instance)
        if cluster.name not in state.view.clusters:
            self._curves[cluster.name] = curves = curves_of(cluster)
            state.add_cluster(cluster_view(deployment, cluster, curves))
        view = instance_view(deployment, cluster, instance, state.clock())
        view.healthy = False
        state.join(view)

    def follow(self, _before: AppliedDeployment, _now: AppliedDeployment) -> None:
        """Links, prices, and which engines use a pool."""
        deployment, state = self._running.current, self._cluster_state
        view = state.view
        view.stale_after_s = deployment.control.stale_after_s
        for link in deployment.links:
            if (link.source, link.target) not in view.links:
                state.add_link(replace(link_view(deployment, link, state.clock()), up=False))
            view.links[link.source, link.target].egress_price_per_byte = link.egress_per_gb / GB
        state.keep_links({(link.source, link.target) for link in deployment.links})
        for cluster in deployment.clusters:
            found = view.clusters[cluster.name]
            found.instance_price_per_s = cluster.instance_price_per_hour / SECONDS_PER_HOUR
            found.kills_per_s = cluster.expected_kills_per_hour / SECONDS_PER_HOUR
            found.reads_kv = deployment.reads_kv(cluster)
        for pool in deployment.pools:
            view.pools[pool.name].instances = pool.instances

    def leave(self, name: str) -> None:
        """One less in the view. A cluster goes with its last instance, where the file has none of that name."""
        state = self._cluster_state
        cluster = state.instance(name).cluster
        state.leave(name)
        is_empty = not state.view.clusters[cluster].instances
        if is_empty and cluster not in {each.name for each in self._running.current.clusters}:
            state.drop_cluster(cluster)
            self._curves.pop(cluster, None)

    def state(self, now_s: float) -> Json:
        """The deployment file's names and settings, and the clusters with their instances."""
        deployment, applied = self._running.current, self._running.applied
        clusters = self._cluster_state.view.clusters
        return {
            "deployment": deployment.name,
            "model": deployment.model.served_name,
            "policy": deployment.routing.policy,
            "applied": {
                "digest": applied.digest,
                "leaving": [instance.name for instance in applied.leaving],
            },
            "up_s": round(now_s - self._started_s, 3),
            "clusters": {
                cluster.name: {
                    "kind": cluster.kind,
                    "hardware": cluster.hardware,
                    "slot_s": round(clusters[cluster.name].slot_s, 4) if cluster.kind == "pd" else None,
                    "instances": {
                        instance.name: self._instance(instance.name, now_s) for instance in cluster.instances
                    },
                }
                for cluster in deployment.clusters
            },
        }

    def write_gauges(self, metrics: ControlMetrics, now_s: float) -> None:
        """Write the gauges of instances."""
        for cluster in self._running.current.clusters:
            for instance in cluster.instances:
                name, view = instance.name, self._cluster_state.instance(instance.name)
                told = self._instance(name, now_s)
                metrics.instance_info.labels(name, cluster.name, cluster.kind).set(1)
                metrics.instance_healthy.labels(name).set(view.healthy)
                metrics.instance_prefills.labels(name).set(view.prefills)
                metrics.instance_decodes.labels(name).set(view.decodes)
                metrics.instance_draining.labels(name).set(view.draining or view.closed)
                metrics.instance_in_flight.labels(name).set(view.in_flight)
                metrics.instance_wait_seconds.labels(name).set(told["busy_s"])
                metrics.instance_age_seconds.labels(name).set(told["age_s"])
                metrics.instance_queued_prefills.labels(name).set(told["queue"])
                metrics.instance_decoding_requests.labels(name).set(view.decoding)
                metrics.instance_decode_slots.labels(name).set(told["decode_slots"])

    def _instance(self, name: str, now_s: float) -> Json:
        state = self._cluster_state
        view = state.instance(name)
        cluster, leaves_s = state.view.clusters[view.cluster], state.view.leaves_s.get(name)
        return {
            "role": role_of(view),
            "draining": view.draining,
            "healthy": view.healthy,
            "leaves_in_s": None if leaves_s is None else round(max(leaves_s - now_s, 0.0), 3),
            "in_flight": view.in_flight,
            "queue": state.open_prefills(name),
            "busy_s": round(max(view.busy_until_s - now_s, 0.0), 4),
            "decoding": view.decoding,
            "decode_slots": view.decode_slots if cluster.kind == "pd" else 0,
            "decode_wait_s": round(slot_free_s(view, cluster.slot_s), 4) if cluster.kind == "pd" else 0.0,
            "age_s": round(max(now_s - view.seen_s, 0.0), 3),
        }


def role_of(view: InstanceView) -> str:
    """ "prefill", "decode" or "prefill+decode"."""
    return "+".join(name for name, has in (("prefill", view.prefills), ("decode", view.decodes)) if has)
