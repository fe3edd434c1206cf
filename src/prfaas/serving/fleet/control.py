"""What a control plane does as one of several: it tells what is open here, counts what is open elsewhere, and leads or
follows."""

import asyncio
import logging
import re
import socket
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from prometheus_client import CollectorRegistry

from prfaas.core.deployment import AppliedDeployment, Deployment
from prfaas.core.scheduling.gateway_share import GatewayShare
from prfaas.serving.control.drains import InstanceDrains
from prfaas.serving.control.link_budget import LinkBudget
from prfaas.serving.control.part import Json, Part
from prfaas.serving.control.plane import LivePlane
from prfaas.serving.control.role_allocation import RoleAllocation
from prfaas.serving.declared_metrics import DeclaredMetrics, counter, gauge
from prfaas.serving.fleet.decisions import FleetDecisions
from prfaas.serving.fleet.etcd import EtcdStore
from prfaas.serving.fleet.member import FleetMember
from prfaas.serving.fleet.messages import Announcement, Decisions, Reloaded, file_digest
from prfaas.serving.fleet.shares import FleetShares, requests_of
from prfaas.serving.fleet.store import StoreError
from prfaas.serving.running_deployment import RunningDeployment

logger = logging.getLogger(__name__)

DECISIONS = "decisions"
DRAINED = "drained/"
RELOADED = "reloaded"

_Message = TypeVar("_Message", Announcement, Decisions, Reloaded)


class FleetControl(Part):
    """One gateway's control plane in its fleet.

    - Told to the others, under a lease: its share of the open work (`FleetShares`).
    - Counted in this view: the sum of what the others tell, for as long as their leases last.
    - Thresholds and roles: decided and written by the leader, followed by the others (`FleetDecisions`). A new leader
      goes on from what is written.
    - Drain marks: whoever is asked writes them, all follow (`DrainMarks`).
    - Reloads: who has taken its file on says so, and the others look at theirs (`FleetReloads`).

    Without etcd nothing new is decided. What others told last counts for one lease more; after that their requests are
    guessed from what engines report.
    """

    def __init__(
        self,
        running: RunningDeployment,
        store: EtcdStore,
        registry: CollectorRegistry,
        shares: FleetShares,
        decisions: FleetDecisions,
        marks: "DrainMarks",
    ) -> None:
        """
        Args:
            running: has a fleet.
            store: what the gateways share.
            registry: gets the `prfaas_control_fleet_*` metrics.
            shares: of the work that is open here.
            decisions: of thresholds and roles.
            marks: of instances that are drained.
        """
        config = running.current.fleet
        assert config is not None
        name = config.name or default_name(running.current)
        self.reloads = FleetReloads(running, name)
        self._period_s, self._lease_s = config.period_s, config.lease_s
        self._shares = shares
        self._decisions = decisions
        self._marks = marks
        self._metrics = FleetMetrics(registry)
        self._decoded: dict[str, tuple[bytes, Announcement | None]] = {}
        self._heard_s = marks.clock()
        self._losses = 0
        self._is_leading = False
        self._leader: str | None = None
        self._known: Decisions | None = None
        self._followed: Decisions | None = None
        self._decided_revision = 0
        self._applied = 0
        self.member = FleetMember(store, f"/prfaas/{running.current.name}/", name, config, self)
        decisions.have_all_know(self._knows_all)
        self._pause()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.loop_failures.keep("FleetMember", self.member.run))
            group.create_task(self.loop_failures.keep("FleetControl", self._loop))

    async def close(self) -> None:
        """Leave the fleet; after `run` has ended."""
        await self.reloads.close()
        await self.member.leave()

    def follow(self, before: AppliedDeployment, now: AppliedDeployment) -> None:
        """This gateway has taken a file on; the others are told when etcd answers."""
        self.reloads.follow(before, now)
        # Who joins may have been drained, or given another role, before this gateway knew of it.
        self._marks.carry_out()
        if not self._is_leading:
            self._followed = None
            self._follow()

    def announcement(self) -> bytes:
        """What this gateway tells the others now."""
        return msgspec.json.encode(
            Announcement(self.reloads.digest, self._shares.own(), self._applied, self._marks.out)
        )

    def take_shares(self) -> None:
        """Count what the others have told."""
        now_s = self._marks.clock()
        if self.member.is_connected:
            self._heard_s = now_s
        shares: dict[str, GatewayShare] = {}
        if now_s - self._heard_s <= self._lease_s:
            announcements = {name: self._announcement(name) for name in self.member.others}
            shares = {name: told.share for name, told in announcements.items() if told is not None}
        self._decoded = {name: each for name, each in self._decoded.items() if name in self.member.members}
        self._shares.count(shares)

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
                self._decisions.hand_over()
                self._followed = None
            self._follow()
        elif member.is_connected and not self._is_leading:
            self._begin_to_lead()
        self._pause()

    def state(self, _now_s: float) -> Json:
        """The gateways, and who leads."""
        member = self.member
        members: Json = {}
        for name in member.others:
            told = self._announcement(name)
            is_same = told is not None and told.file == self.reloads.digest
            members[name] = {
                "requests": 0 if told is None else requests_of(told.share),
                "same_file": is_same,
                "out": [] if told is None else told.out,
            }
        own = {"requests": self._shares.open_requests, "same_file": True, "out": self._marks.out}
        members[member.name] = own
        fleet = {
            "name": member.name,
            "leader": member.leader,
            "leads": member.leads,
            "connected": member.is_connected,
            "problem": member.problem,
            "silent_s": 0.0 if member.is_connected else round(self._marks.clock() - self._heard_s, 3),
            "losses": member.losses,
            "members": dict(sorted(members.items())),
            "unwritten_drains": self._marks.unwritten,
        }
        return {"fleet": fleet}

    def state_of(self, name: str, _now_s: float) -> Json:
        """An instance is drained when no gateway sends it anything."""
        marks = self._marks
        is_known = marks.is_written(name) and self._all_applied(marks.revision(name))
        return {"drain": "draining"} if marks.is_closed(name) and not is_known else {}

    async def _loop(self) -> None:
        while True:
            self.take_shares()
            self.steer()
            try:
                await self.write()
            except StoreError as error:
                logger.debug("nothing written: %s", error)
            self._count()
            await asyncio.sleep(self._period_s)

    async def write(self) -> None:
        """Write what is decided and not written yet. Raises StoreError."""
        if not self.member.is_connected:
            return
        await self._marks.write(self.member)
        await self.reloads.tell(lambda told: self.member.put(RELOADED, msgspec.json.encode(told)))
        decided = self.decided()
        if self._is_leading and decided != self._known:
            revision = await self.member.put(DECISIONS, msgspec.json.encode(decided))
            if revision is not None:
                self._known, self._decided_revision = decided, revision

    def decided(self) -> Decisions:
        """Thresholds and roles as they are here."""
        return self._decisions.now(self.member.name, self.reloads.digest)

    def _begin_to_lead(self) -> None:
        known = self._known
        # What a fleet with another file has decided, and nobody of it is left, is no good for this one.
        if known is not None and (known is self._followed or known.file == self.reloads.digest):
            self._follow()
            self._decisions.go_on(known)
        self._is_leading = True
        logger.info("this gateway decides thresholds and roles now")

    def _follow(self) -> None:
        """Take over what is written."""
        known = self._known
        if known is None or known is self._followed:
            return
        self._followed = known
        self._decisions.follow(known)

    def _pause(self) -> None:
        # Without any leader all tell the senders: they hear the same, and so tell the same.
        self._decisions.decide(
            alone=self._is_leading and self.member.is_connected,
            paces=self.member.leader in (None, self.member.name),
        )

    def take_value(self, key: str, value: bytes | None, revision: int) -> None:
        """Take what the leader has decided, a reload, or a mark of an instance that is drained."""
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
            self._marks.hear(key.removeprefix(DRAINED), value is not None, revision)

    def forget_revisions(self) -> None:
        """Write marks and decisions again; the store's revisions begin anew."""
        self._marks.write_again()
        self._known = self._followed = None
        self._decided_revision = self._applied = 0
        self.reloads.count_anew()

    def _announcement(self, name: str) -> Announcement | None:
        value = self.member.members[name].value
        known = self._decoded.get(name)
        if known is None or known[0] is not value:
            known = self._decoded[name] = value, self._read(value, Announcement)
        return known[1]

    def _read(self, value: bytes, form: type[_Message]) -> _Message | None:
        try:
            return msgspec.json.decode(value, type=form)
        except (ValueError, RecursionError) as error:
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


class DrainMarks:
    """Which instances are drained for all gateways: as is written, and as is to be written when etcd answers."""

    def __init__(self, running: RunningDeployment, drains: InstanceDrains) -> None:
        """`drains`: carries marks out here."""
        self.clock = drains.cluster_state.clock
        self._running = running
        self._drains = drains
        self._wanted: dict[str, bool] = {}
        self._marked: set[str] = set()
        # Of marks, and of those that are taken away until etcd has told so: it may still tell the mark before.
        self._revisions: dict[str, int] = {}
        self._heard_revision = 0

    def mark(self, instance: str, wanted: bool) -> None:
        """Have all gateways drain an instance, or none any more. Written when etcd answers."""
        if instance in self._wanted or wanted != (instance in self._marked):
            self._wanted[instance] = wanted

    def hear(self, name: str, wanted: bool, revision: int) -> None:
        """What another gateway, or this one, has written; each change once, in the order of revisions."""
        self._heard_revision = max(self._heard_revision, revision)
        self._note(name, wanted, revision)
        if name not in self._marked and self._revisions.get(name, 0) <= revision:
            self._revisions.pop(name, None)
        # Who leaves gets nothing new, whatever a gateway says that does not know it yet.
        leaving = {instance.name for instance in self._running.applied.leaving}
        if name in self._drains.cluster_state.names and name not in leaving | self._wanted.keys():
            self._drains.carry_out(name, wanted=wanted)

    def carry_out(self) -> None:
        """Drain who is marked and takes part."""
        for name in self._marked.intersection(self._drains.cluster_state.names):
            if self._wanted.get(name, True):
                self._drains.carry_out(name, wanted=True)

    async def write(self, member: FleetMember) -> None:
        """Write what is not written yet. Raises StoreError."""
        for name, wanted in list(self._wanted.items()):
            value = msgspec.json.encode({"by": member.name}) if wanted else None
            revision = await member.put(DRAINED + name, value)
            if revision is not None:
                if revision > self._heard_revision:
                    self._note(name, wanted, revision)
                if self._wanted.get(name) == wanted:
                    del self._wanted[name]

    def write_again(self) -> None:
        """The store has lost all of them, and its revisions begin anew."""
        self._wanted = dict.fromkeys(self._marked, True) | self._wanted
        self._revisions.clear()
        self._heard_revision = 0

    @property
    def unwritten(self) -> list[str]:
        """Whose mark is still to be written."""
        return sorted(self._wanted)

    def is_written(self, name: str) -> bool:
        """Whether the store has the newest mark of an instance."""
        return name not in self._wanted

    def revision(self, name: str) -> int:
        """Of the newest mark of an instance; 0: none."""
        return self._revisions.get(name, 0)

    @property
    def out(self) -> list[str]:
        """The instances that get nothing from this gateway."""
        state = self._drains.cluster_state
        return sorted(name for name in state.names if not state.instance(name).available)

    def is_closed(self, name: str) -> bool:
        """Whether nothing new goes to an instance from here."""
        state = self._drains.cluster_state
        return name in state.names and state.instance(name).closed

    def _note(self, name: str, wanted: bool, revision: int) -> None:
        if revision >= self._revisions.get(name, 0):
            (self._marked.add if wanted else self._marked.discard)(name)
            self._revisions[name] = revision


class FleetReloads:
    """The reloads of one gateway among several. It belongs to one running event loop.

    Every file that is taken on here is told once, also where only a setting of the gateway has changed in it, and also
    where the store fails meanwhile. Who looks because another one has told it, and takes on the same, tells nothing.
    """

    def __init__(self, running: RunningDeployment, name: str) -> None:
        """`name`: this gateway's in the fleet."""
        self.reload: Callable[[], Awaitable[object]] | None = None
        """Has this gateway take its file on again."""
        self.digest = file_digest(running.applied.said)
        """Of the file that it runs."""
        self._name = name
        self._said = running.applied.said
        self._has_news = False
        self._heard: Reloaded | None = None
        self._looking: asyncio.Task[None] | None = None
        self._newest_revision = 0

    def follow(self, before: AppliedDeployment, now: AppliedDeployment) -> None:
        """This gateway has taken a file on."""
        self._has_news = self._has_news or now.said != before.said
        self._said, self.digest = now.said, file_digest(now.said)

    def hear(self, told: Reloaded, *, is_old: bool) -> None:
        """Another gateway has taken a file on: look at the one here. `is_old`: before this gateway read its own."""
        if is_old or told.by == self._name or self.reload is None:
            return
        self._heard = told
        if not self._is_looking:
            self._looking = asyncio.get_running_loop().create_task(self._look(self.reload))

    def is_news(self, revision: int) -> bool:
        """Whether a word of the store is newer than those before; asked once of each."""
        before, self._newest_revision = self._newest_revision, max(self._newest_revision, revision)
        return revision > before

    def count_anew(self) -> None:
        """The store's revisions begin anew."""
        self._newest_revision = 0

    async def tell(self, put: Callable[[Reloaded], Awaitable[int | None]]) -> None:
        """Tell what is not told yet. `put` returns None, or raises StoreError, where it is not written."""
        if not self._has_news or self._is_looking:
            return
        said = self._said
        if await put(Reloaded(self._name, self.digest)) is not None:
            self._has_news = self._said is not said

    async def close(self) -> None:
        """Look no longer."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    @property
    def _is_looking(self) -> bool:
        return self._looking is not None and not self._looking.done()

    async def _look(self, reload: Callable[[], Awaitable[object]]) -> None:
        # What is told meanwhile may be of a file that was read too early.
        while (told := self._heard) is not None:
            self._heard = None
            try:
                await reload()
            except Exception as error:
                logger.warning("%s has taken another file on, and this gateway can't: %s", told.by, error)
            if self.digest == told.file:
                self._has_news = False
                logger.info("this gateway has the file that %s has taken on", told.by)
            else:
                logger.warning("the deployment file here is not the one that %s has taken on", told.by)


class FleetMetrics(DeclaredMetrics):
    """`prfaas_control_fleet_*`."""

    prefix = "prfaas_control_fleet_"

    members = gauge("Gateways of the fleet, as last seen; this one counts.")
    leads = gauge("1 when this gateway decides thresholds and roles.")
    connected = gauge("1 when etcd answers and this gateway is a member.")
    losses = counter("How often etcd was lost.")
    leader_changes = counter("How often another gateway led than before.")
    unreadable = counter("Values in etcd that could not be read.", name="unreadable_values")


def join_fleet(plane: LivePlane, registry: CollectorRegistry, store: EtcdStore | None = None) -> FleetControl:
    """Have a plane share what it knows with those of the other gateways, as the last of its parts.

    Args:
        plane: of a deployment with a fleet.
        registry: gets the `prfaas_control_fleet_*` metrics.
        store: what the gateways share; None: the fleet's etcd.

    Raises:
        TlsFileError: a file of the fleet's certificates can't be used.
    """
    running, listeners = plane.members.running, plane.listeners
    config = running.current.fleet
    assert config is not None
    if store is None and config.is_plain and not config.is_local:
        logger.warning(
            "what gateways share goes to etcd unencrypted; who can write there can misroute requests"
        )
    shares = FleetShares(plane.cluster_state, plane.admission, plane.thresholds.window)
    marks = DrainMarks(running, plane.drains)
    decisions = FleetDecisions(
        plane.cluster_state,
        plane.thresholds,
        plane.part(RoleAllocation),
        plane.part(LinkBudget),
        plane.admission.changed,
    )
    fleet = FleetControl(
        running=running,
        store=EtcdStore(config) if store is None else store,
        registry=registry,
        shares=shares,
        decisions=decisions,
        marks=marks,
    )
    listeners.observed.append(shares.observe)
    listeners.drained.append(marks.mark)
    listeners.noticed.append(lambda name, _notice_s: marks.mark(name, True))
    plane.parts.append(fleet)
    return fleet


def default_name(deployment: Deployment) -> str:
    """This gateway's name where the file has none: its machine's name and its port."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", f"{socket.gethostname()}-{deployment.gateway.port}")
