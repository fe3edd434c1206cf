"""What a control plane does as one of several: it tells what is open here, counts what is open elsewhere, and leads or
follows."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from prometheus_client import CollectorRegistry

from prfaas.core.deployment import AppliedDeployment, Deployment, FleetConfig
from prfaas.core.scheduling.gateway_share import (
    MOST_LENGTHS,
    GatewayShare,
    OtherGateways,
    new_lengths,
    total,
)
from prfaas.core.scheduling.length_window import LengthWindow
from prfaas.serving.control.cluster_state import Clock, ClusterState
from prfaas.serving.control.fleet_metrics import FleetMetrics
from prfaas.serving.control.fleet_reloads import FleetReloads
from prfaas.serving.control.link_budget import LinkBudget
from prfaas.serving.control.prefill_admission import PrefillAdmission
from prfaas.serving.control.role_allocation import RoleAllocation, RoleChanges
from prfaas.serving.control.thresholds import Thresholds
from prfaas.serving.fleet.member import FleetMember
from prfaas.serving.fleet.messages import Announcement, Decisions, Reloaded, RoleDecision
from prfaas.serving.fleet.store import Store, StoreError

logger = logging.getLogger(__name__)

DECISIONS = "decisions"
DRAINED = "drained/"
RELOADED = "reloaded"
# Less than a tenth of a second is no news, and every put costs etcd a write to disk.
_DIGITS = 1
# Observed lengths are told for so long: others miss them only where etcd is silent for longer.
_LENGTHS_S = 2.0

_Message = TypeVar("_Message", Announcement, Decisions, Reloaded)


class FleetControl:
    """One gateway's control plane in its fleet.

    - Told to the others, under a lease: prefills and requests open here, bytes promised to links, lengths observed.
    - Counted in this view: the sum of what the others tell, for as long as their leases last.
    - Thresholds and roles: decided and written by the leader, followed by the others. A new leader goes on from what
      is written.
    - Drain marks: whoever is asked writes them, all follow.
    - Reloads: who has taken its file on says so, and the others look at theirs.

    Without etcd nothing new is decided. What others told last counts for one lease more; after that their requests are
    guessed from what engines report.
    """

    def __init__(
        self,
        deployment: Deployment,
        config: FleetConfig,
        name: str,
        store: Store,
        registry: CollectorRegistry,
        *,
        clock: Clock,
        cluster_state: ClusterState,
        prefill_admission: PrefillAdmission,
        thresholds: Thresholds,
        role_changes: RoleChanges,
        role_allocation: RoleAllocation,
        budget: LinkBudget,
        window: LengthWindow,
        drain: Callable[[str, bool], None],
    ) -> None:
        """`drain(instance, wanted)` carries a drain mark out here; the other parts are the control plane's own."""
        self.reloads = FleetReloads(deployment, name)
        self._config = config
        self._clock = clock
        self._cluster_state = cluster_state
        self._prefill_admission = prefill_admission
        self._thresholds = thresholds
        self._role_changes = role_changes
        self._role_allocation = role_allocation
        self._budget = budget
        self._window = window
        self._drain = drain
        self._metrics = FleetMetrics(registry)
        self._leaving: frozenset[str] = frozenset()
        self._lengths: deque[tuple[float, int]] = deque(maxlen=MOST_LENGTHS)
        self._lengths_total = 0
        self._seen_lengths: dict[str, int] = {}
        self._decoded: dict[str, tuple[bytes, Announcement | None]] = {}
        self._heard_s = clock()
        self._losses = 0
        self._is_leading = False
        self._leader: str | None = None
        self._known: Decisions | None = None
        self._followed: Decisions | None = None
        self._decided_revision = 0
        self._applied = 0
        self._wanted_marks: dict[str, bool] = {}
        self._marked: set[str] = set()
        self._mark_revisions: dict[str, int] = {}
        self.member = FleetMember(
            store,
            f"/prfaas/{deployment.name}/",
            name,
            lease_s=config.lease_s,
            period_s=config.period_s,
            tell=self.announcement,
            on_value=self._on_value,
            on_joined=self.steer,
            on_store_lost=self._on_store_lost,
        )
        role_changes.knows_all = self._knows_all
        self._pause()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.member.run())
            group.create_task(self._loop())

    async def close(self) -> None:
        """Leave the fleet; after `run` has ended."""
        await self.reloads.close()
        await self.member.leave()

    def observe(self, uncached_tokens: int) -> None:
        """One request of this gateway, for the statistics of all."""
        self._lengths.append((self._clock(), max(uncached_tokens, 0)))
        self._lengths_total += 1

    def mark(self, instance: str, *, wanted: bool) -> None:
        """Have all gateways drain an instance, or none any more. Written when etcd answers."""
        if instance in self._wanted_marks or wanted != (instance in self._marked):
            self._wanted_marks[instance] = wanted

    def adopt(self, applied: AppliedDeployment) -> None:
        """This gateway has taken a file on; the others are told when etcd answers."""
        self.reloads.adopt(applied.said)
        self._leaving = frozenset(instance.name for instance in applied.leaving)
        # Who joins may have been drained, or given another role, before this gateway knew of it.
        for name in self._marked.intersection(self._cluster_state.names):
            if self._wanted_marks.get(name, True):
                self._drain(name, True)
        if not self._is_leading:
            self._followed = None
            self._follow()

    def is_known_drained(self, instance: str) -> bool:
        """Whether every gateway has carried out the newest drain mark of an instance."""
        return instance not in self._wanted_marks and self._all_applied(self._mark_revisions.get(instance, 0))

    def announcement(self) -> bytes:
        """What this gateway tells the others now."""
        while self._lengths and self._lengths[0][0] < self._clock() - _LENGTHS_S:
            self._lengths.popleft()
        share = msgspec.structs.replace(
            total([self._cluster_state.own_share(), self._prefill_admission.own_share()]),
            lengths=[tokens for _, tokens in self._lengths],
            lengths_total=self._lengths_total,
        )
        return msgspec.json.encode(Announcement(self.reloads.digest, _rounded(share), self._applied))

    def take_shares(self) -> None:
        """Count what the others have told."""
        now_s = self._clock()
        if self.member.is_connected:
            self._heard_s = now_s
        shares: dict[str, GatewayShare] = {}
        if now_s - self._heard_s <= self._config.lease_s:
            announcements = {name: self._announcement(name) for name in self.member.others}
            shares = {name: told.share for name, told in announcements.items() if told is not None}
        self._decoded = {name: each for name, each in self._decoded.items() if name in self.member.members}
        for gone in self._seen_lengths.keys() - shares.keys():
            del self._seen_lengths[gone]
        for name, share in shares.items():
            for tokens in new_lengths(share, self._seen_lengths.get(name, 0)):
                self._window.add(tokens, now_s)
            self._seen_lengths[name] = share.lengths_total
        others = OtherGateways(shares)
        self._cluster_state.set_others(others.total())
        self._prefill_admission.set_others(others)

    def steer(self) -> None:
        """Lead or follow, by who the leader is now."""
        member = self.member
        if not member.has_joined:
            return
        if member.leader != self._leader:
            if self._leader is not None:
                self._metrics.leader_changes.inc()
            self._leader = member.leader
        if not member.leads:
            if self._is_leading:
                self._is_leading = False
                self._role_changes.hand_over()
                self._followed = None
            self._follow()
        elif member.is_connected and not self._is_leading:
            self._begin_to_lead()
        self._pause()

    def state(self) -> dict[str, Any]:
        """For `GET /prfaas/state`."""
        member = self.member
        told = {name: self._announcement(name) for name in member.others}
        requests = {
            name: 0 if each is None else sum(part.requests for part in each.share.instances.values())
            for name, each in told.items()
        }
        members = {
            name: {
                "requests": requests[name],
                "same_file": each is not None and each.file == self.reloads.digest,
            }
            for name, each in told.items()
        }
        own = self._cluster_state.own_share().instances.values()
        members[member.name] = {"requests": sum(part.requests for part in own), "same_file": True}
        return {
            "name": member.name,
            "leader": member.leader,
            "leads": member.leads,
            "connected": member.is_connected,
            "problem": member.problem,
            "silent_s": 0.0 if member.is_connected else round(self._clock() - self._heard_s, 3),
            "losses": member.losses,
            "members": dict(sorted(members.items())),
            "unwritten_drains": sorted(self._wanted_marks),
        }

    async def _loop(self) -> None:
        while True:
            self.take_shares()
            self.steer()
            try:
                await self.write()
            except StoreError as error:
                logger.debug("nothing written: %s", error)
            self._count()
            await asyncio.sleep(self._config.period_s)

    async def write(self) -> None:
        """Write what is decided and not written yet. Raises StoreError."""
        if not self.member.is_connected:
            return
        for name, wanted in list(self._wanted_marks.items()):
            value = msgspec.json.encode({"by": self.member.name}) if wanted else None
            revision = await self.member.put(DRAINED + name, value)
            if revision is not None:
                self._note_mark(name, wanted, revision)
                if self._wanted_marks.get(name) == wanted:
                    del self._wanted_marks[name]
        await self.reloads.tell(lambda told: self.member.put(RELOADED, msgspec.json.encode(told)))
        decided = self.decided()
        if self._is_leading and decided != self._known:
            revision = await self.member.put(DECISIONS, msgspec.json.encode(decided))
            if revision is not None:
                self._known, self._decided_revision = decided, revision

    def decided(self) -> Decisions:
        """Thresholds and roles as they are here."""
        view, converting = self._cluster_state.view, self._role_changes.converting
        return Decisions(
            self.member.name,
            self.reloads.digest,
            {name: None if math.isinf(tokens) else tokens for name, tokens in view.threshold_tokens.items()},
            {
                each.name: RoleDecision(
                    each.prefills,
                    each.decodes,
                    converting[1] if converting is not None and converting[0] == each.name else None,
                )
                for cluster in view.clusters.values()
                if cluster.kind == "pd"
                for each in cluster.instances
            },
            sorted(self._thresholds.held),
        )

    def _begin_to_lead(self) -> None:
        known = self._known
        # What a fleet with another file has decided, and nobody of it is left, is no good for this one.
        if known is not None and (known is self._followed or known.file == self.reloads.digest):
            self._follow()
            for name, role in known.roles.items():
                if role.to_role is not None and name in self._names():
                    self._cluster_state.instance(name).draining = False
                    self._role_changes.begin(name, role.to_role, f"begun by {known.leader}")
        self._is_leading = True
        logger.info("this gateway decides thresholds and roles now")

    def _follow(self) -> None:
        """Take over what is written."""
        known = self._known
        if known is None or known is self._followed:
            return
        self._followed = known
        for cluster, tokens in known.thresholds.items():
            threshold = math.inf if tokens is None else tokens
            self._thresholds.follow(cluster, threshold, known.leader, is_held=cluster in known.held)
        names = self._names()
        for name, role in known.roles.items():
            # An instance without a role would be lost; one that is not in this gateway's file is not known here.
            if name not in names or not (role.prefills or role.decodes):
                continue
            draining = role.to_role is not None
            if self._cluster_state.follow_roles(
                name, prefills=role.prefills, decodes=role.decodes, draining=draining
            ):
                self._prefill_admission.changed(name)

    def _names(self) -> set[str]:
        clusters = self._cluster_state.view.clusters.values()
        return {each.name for cluster in clusters if cluster.kind == "pd" for each in cluster.instances}

    def _pause(self) -> None:
        decides = self._is_leading and self.member.is_connected
        self._thresholds.pause(not decides)
        self._role_allocation.paused = not decides
        # Without any leader all tell the senders: they hear the same, and so tell the same.
        self._budget.paused = self.member.leader not in (None, self.member.name)

    def _on_value(self, key: str, value: bytes | None, revision: int) -> None:
        self._applied = max(self._applied, revision)
        # The watch may still tell what this gateway has written over.
        if key == DECISIONS and revision >= self._decided_revision:
            self._known = None if value is None else self._read(value, Decisions)
            if value is not None and not self._is_leading:
                self.steer()
        elif key == RELOADED:
            is_news = self.reloads.is_news(revision)
            told = None if value is None else self._read(value, Reloaded)
            if told is not None and is_news:
                self.reloads.hear(told, is_old=not self.member.has_joined)
        elif key.startswith(DRAINED):
            name = key.removeprefix(DRAINED)
            self._note_mark(name, value is not None, revision)
            # Who leaves gets nothing new, whatever a gateway says that does not know it yet.
            if name in self._cluster_state.names and name not in self._leaving | self._wanted_marks.keys():
                self._drain(name, value is not None)

    def _on_store_lost(self) -> None:
        """Write marks and decisions again; the store's revisions begin anew."""
        self._wanted_marks = dict.fromkeys(self._marked, True) | self._wanted_marks
        self._mark_revisions.clear()
        self._known = self._followed = None
        self._decided_revision = self._applied = 0
        self.reloads.count_anew()

    def _note_mark(self, name: str, wanted: bool, revision: int) -> None:
        if revision >= self._mark_revisions.get(name, 0):
            (self._marked.add if wanted else self._marked.discard)(name)
            self._mark_revisions[name] = revision

    def _announcement(self, name: str) -> Announcement | None:
        value = self.member.members[name].value
        known = self._decoded.get(name)
        if known is None or known[0] is not value:
            known = self._decoded[name] = value, self._read(value, Announcement)
        return known[1]

    def _read(self, value: bytes, form: type[_Message]) -> _Message | None:
        try:
            return msgspec.json.decode(value, type=form)
        except (msgspec.DecodeError, RecursionError) as error:
            self._metrics.unreadable.inc()
            logger.warning("a value in etcd is no %s: %s", form.__name__, error)
            return None

    def _knows_all(self) -> bool:
        """Whether all gateways have carried out what is decided here."""
        return self.decided() == self._known and self._all_applied(self._decided_revision)

    def _all_applied(self, revision: int) -> bool:
        told = (self._announcement(name) for name in self.member.others)
        return all(each is not None and each.applied >= revision for each in told)

    def _count(self) -> None:
        member, metrics = self.member, self._metrics
        metrics.members.set(len(member.members))
        metrics.leads.set(member.leads)
        metrics.connected.set(member.is_connected)
        metrics.losses.inc(member.losses - self._losses)
        self._losses = member.losses


def _rounded(share: GatewayShare) -> GatewayShare:
    """Times to a tenth of a second."""
    replace = msgspec.structs.replace
    return replace(
        share,
        instances={
            name: replace(each, prefill_s=round(each.prefill_s, _DIGITS))
            for name, each in share.instances.items()
        },
        clusters={
            name: replace(
                each, waiting_s=round(each.waiting_s, _DIGITS), served_s=round(each.served_s, _DIGITS)
            )
            for name, each in share.clusters.items()
        },
    )
