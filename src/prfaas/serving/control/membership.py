"""Who belongs to a running control plane: clusters and links that are added, instances that join and leave, settings.

Every part of the plane follows in one step of the event loop, so that no decision sees half of a change.
"""

import asyncio
from dataclasses import replace

from prfaas.core.deployment import AppliedDeployment, Deployment, Instance
from prfaas.core.units import GB, SECONDS_PER_HOUR
from prfaas.serving.control.guarded_policy import guarded
from prfaas.serving.control.kv_events import events_endpoints
from prfaas.serving.control.plane import LivePlane
from prfaas.serving.control.planning_inputs import (
    cluster_view,
    curves_of,
    instance_view,
    link_view,
    policy_of,
)


class Membership:
    """Changes the members and settings of one plane. It belongs to the plane's event loop.

    An instance that joins takes part when it has answered. One that leaves gets nothing new from then on. It is
    forgotten when a deployment without it is adopted, which must wait until `is_idle`.
    """

    def __init__(self, plane: LivePlane) -> None:
        self._plane = plane
        self._leaving_since_s: dict[str, float] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def adopt(self, applied: AppliedDeployment) -> None:
        """Follow what was taken on. Nothing here waits.

        Raises:
            DeploymentError: the file's policy can't be made; nothing has changed then.
        """
        plane, running = self._plane, applied.running
        before = plane.deployment
        policy = plane.policy
        if running.routing != before.routing:
            policy = guarded(running.routing.policy, policy_of(running), plane.metrics.policy_failures)
        joined = [each for each in running.instances if each.name not in plane.instances]
        gone = [
            each for name, each in plane.instances.items() if name not in {i.name for i in running.instances}
        ]
        self._add_places(running)
        for instance in joined:
            self._join(instance, applied)
        self._close_leaving(applied)
        for instance in gone:
            plane.role_changes.give_up(instance.name)
        plane.deployment, plane.policy = running, policy
        self._set_roles(before.instances, running.instances, gone)
        self._set_prices(applied)
        self._have_parts_follow(applied)
        for instance in gone:
            self._forget(instance)
        self._keep_places(running)
        plane.rosters.announce()
        for instance in running.instances:
            plane.prefill_admission.changed(instance.name)

    def is_idle(self, name: str) -> bool:
        """Whether nothing is left of the work of an instance that leaves; an engine that does not answer has none."""
        plane, view = self._plane, self._plane.cluster_state.instance(name)
        if view.in_flight or plane.cluster_state.is_planned(name) or plane.prefill_admission.is_working(name):
            return False
        newest = plane.engines.meters[name].newest
        if not view.healthy or newest is None:
            return True
        # Another gateway's work counts as well, and what the engine said before may be old.
        is_fresh = view.seen_s > self._leaving_since_s.get(name, 0.0)
        return is_fresh and newest.running + newest.waiting == 0

    async def close(self) -> None:
        """Wait until the connections to those that have left are closed."""
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _add_places(self, running: Deployment) -> None:
        """Clusters, still without instances, and links, which are used once the engines know them."""
        plane, state = self._plane, self._plane.cluster_state
        for cluster in running.clusters:
            if cluster.name not in state.view.clusters:
                plane.curves[cluster.name] = curves = curves_of(cluster)
                state.add_cluster(cluster_view(running, cluster, curves))
        for link in running.links:
            if (link.source, link.target) not in state.view.links:
                state.add_link(replace(link_view(running, link, plane.clock()), up=False))
        plane.prefill_admission.adopt()

    def _keep_places(self, running: Deployment) -> None:
        """Forget clusters and links that are not there: those of a file that not all parts could follow."""
        plane = self._plane
        clusters = {cluster.name for cluster in running.clusters}
        plane.cluster_state.keep_only(clusters, {(link.source, link.target) for link in running.links})
        for name in plane.curves.keys() - clusters:
            del plane.curves[name]
        plane.prefill_admission.adopt()

    def _join(self, instance: Instance, applied: AppliedDeployment) -> None:
        plane, running = self._plane, applied.running
        plane.instances[instance.name] = instance
        plane.kv_ports[instance.name] = tuple(
            plane.kv_port_of(instance, rank) for rank in range(instance.kv_ranks)
        )
        view = instance_view(running, running.cluster_of(instance), instance, plane.clock())
        view.healthy = False
        plane.cluster_state.join(view)

    def _close_leaving(self, applied: AppliedDeployment) -> None:
        plane = self._plane
        leaving = {instance.name for instance in applied.leaving}
        for name in leaving - self._leaving_since_s.keys():
            self._leaving_since_s[name] = plane.clock()
            plane.role_changes.give_up(name)
            plane.cluster_state.instance(name).closed = True
        for name in self._leaving_since_s.keys() - leaving:
            del self._leaving_since_s[name]
            if any(instance.name == name for instance in applied.said.instances):
                plane.cluster_state.instance(name).closed = False

    def _set_roles(
        self, before: tuple[Instance, ...], now: tuple[Instance, ...], gone: list[Instance]
    ) -> None:
        """Roles that the file has changed. What the plane has converted by itself stays."""
        roles = {instance.name: instance.roles for instance in before}
        for instance in now:
            if roles.get(instance.name, instance.roles) != instance.roles and instance not in gone:
                self._plane.role_changes.give_up(instance.name)
                self._plane.cluster_state.set_roles(instance.name, instance.roles)
                self._plane.instances[instance.name] = instance

    def _set_prices(self, applied: AppliedDeployment) -> None:
        view, said = self._plane.cluster_state.view, applied.said
        view.stale_after_s = said.control.stale_after_s
        for cluster in said.clusters:
            price_per_s = cluster.instance_price_per_hour / SECONDS_PER_HOUR
            view.clusters[cluster.name].instance_price_per_s = price_per_s
            view.clusters[cluster.name].kills_per_s = cluster.kills_per_hour / SECONDS_PER_HOUR
        for link in said.links:
            view.links[link.source, link.target].egress_price_per_byte = link.egress_per_gb / GB

    def _have_parts_follow(self, applied: AppliedDeployment) -> None:
        plane, running = self._plane, applied.running
        plane.engines.adopt(running.instances)
        plane.health.adopt(running)
        plane.pools.adopt(running)
        endpoints = events_endpoints(running, running.instances)
        plane.prefix_knowledge.adopt(endpoints)
        plane.event_feed.adopt(endpoints | events_endpoints(running, running.pools))
        plane.links.adopt(running)
        plane.budget.adopt(running, {**plane.kv_ports, **plane.pool_senders})
        plane.compatibility.adopt(running, plane.kv_ports)
        plane.copier.adopt(running)
        plane.facts.adopt(running)
        plane.thresholds.adopt(running)
        plane.role_allocation.adopt(running.control, plane.policy)
        plane.rosters.adopt(running)
        plane.overview.applied = applied

    def _forget(self, instance: Instance) -> None:
        plane, name = self._plane, instance.name
        plane.prefix_knowledge.drop(name, "left")
        plane.drains.forget(name)
        plane.cluster_state.leave(name)
        del plane.instances[name]
        ports = plane.kv_ports.pop(name)

        async def close() -> None:
            await asyncio.gather(*(port.close() for port in ports), return_exceptions=True)

        task = asyncio.get_running_loop().create_task(close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
