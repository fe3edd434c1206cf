"""What the leader of a fleet decides, thresholds and roles: as it is here, and as another gateway has written it."""

import math
from collections.abc import Callable

from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.link_budget import LinkBudget
from prfaas.serving.control.role_allocation import RoleAllocation
from prfaas.serving.control.thresholds import Thresholds
from prfaas.serving.fleet.messages import Decisions, RoleDecision


class FleetDecisions:
    """The parts of one control plane that decide for all gateways while it leads, and follow while it does not."""

    def __init__(
        self,
        cluster_state: ClusterState,
        thresholds: Thresholds,
        roles: RoleAllocation,
        budget: LinkBudget,
        on_roles: Callable[[str], None],
    ) -> None:
        """`on_roles` is called with every instance that another gateway has given other roles."""
        self._cluster_state = cluster_state
        self._thresholds = thresholds
        self._roles = roles
        self._budget = budget
        self._on_roles = on_roles

    def have_all_know(self, knows_all: Callable[[], bool]) -> None:
        """No conversion ends before `knows_all` says that every gateway knows of it."""
        self._roles.changes.knows_all = knows_all

    def decide(self, *, alone: bool, paces: bool) -> None:
        """Whether thresholds and roles are decided here, and whether the senders are told their paces from here."""
        self._thresholds.pause(not alone)
        self._roles.paused = not alone
        self._budget.paused = not paces

    def now(self, leader: str, file: str) -> Decisions:
        """Thresholds and roles as they are here. `file`: digest of the leader's."""
        view, converting = self._cluster_state.view, self._roles.changes.converting
        drained = [] if converting is None else self._cluster_state.together(converting[0])
        return Decisions(
            leader=leader,
            file=file,
            thresholds={
                name: None if math.isinf(tokens) else tokens for name, tokens in view.threshold_tokens.items()
            },
            roles={
                each.name: RoleDecision(
                    each.prefills,
                    each.decodes,
                    converting[1] if converting is not None and each.name in drained else None,
                )
                for cluster in view.clusters.values()
                if cluster.kind == "pd"
                for each in cluster.instances
            },
            held=sorted(self._thresholds.held),
        )

    def follow(self, known: Decisions) -> None:
        """Take over what another gateway has written."""
        held = set(known.held)
        for cluster, tokens in known.thresholds.items():
            threshold = math.inf if tokens is None else tokens
            self._thresholds.take_over(cluster, threshold, known.leader, is_held=cluster in held)
        names = self._names()
        for name, role in known.roles.items():
            # An instance without a role would be lost; one that is not in this gateway's file is not known here.
            if name not in names or not (role.prefills or role.decodes):
                continue
            draining = role.to_role is not None
            if self._cluster_state.follow_roles(
                name, prefills=role.prefills, decodes=role.decodes, draining=draining
            ):
                self._on_roles(name)

    def go_on(self, known: Decisions) -> None:
        """See through what the leader before has begun."""
        names = self._names()
        begun = {name: role.to_role for name, role in known.roles.items() if role.to_role and name in names}
        for name in begun:
            self._cluster_state.instance(name).draining = False
        for name, to_role in begun.items():
            # Further ranks of a group are converted with the first.
            self._roles.changes.begin(name, to_role, f"begun by {known.leader}")

    def hand_over(self) -> None:
        """Another gateway leads from now on."""
        self._roles.changes.hand_over()

    def _names(self) -> set[str]:
        clusters = self._cluster_state.view.clusters.values()
        return {each.name for cluster in clusters if cluster.kind == "pd" for each in cluster.instances}
