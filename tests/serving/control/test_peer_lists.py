"""Whom the control plane sends a peer list, and whom it leaves alone."""

import asyncio
from pathlib import Path

import pytest

from prfaas.core.deployment import AppliedDeployment, Deployment
from prfaas.serving.control.listeners import Listeners
from prfaas.serving.control.peer_lists import PeerListUpdates
from prfaas.serving.control.rank_stats import RankStats
from prfaas.serving.running_deployment import RunningDeployment
from prfaas.serving.transport.protocol.peer_list import peer_list_of

from .world import FILE, FakeSender, deployment_of


class Told:
    """The ports of all instances, with the rosters of a deployment's command lines."""

    def __init__(self, deployment: Deployment) -> None:
        self.ports = {instance.name: (FakeSender(),) for instance in deployment.instances}
        for instance in deployment.instances:
            digest = peer_list_of(deployment, instance, 0).digest
            self.ports[instance.name][0].roster = {"digest": digest, "told": False, "trouble": ""}

    def counts(self) -> dict[str, int]:
        return {name: len(ports[0].rosters) for name, ports in self.ports.items() if ports[0].rosters}


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return deployment_of(tmp_path)


def wider(folder: Path) -> Deployment:
    return deployment_of(folder, text=FILE.replace("1 Gbit/s", "2 Gbit/s"))


def move(updates: PeerListUpdates, deployment: Deployment) -> None:
    updates._running.move(AppliedDeployment(deployment, ""))
    updates._want()


def look(told: Told, updates: PeerListUpdates) -> None:
    """Have every rank say once which list it has, and what comes of that carried out."""

    async def look() -> None:
        listeners = Listeners()
        listeners.told.append(updates.hear)
        stats = RankStats(updates._running, told.ports, listeners)  # type: ignore[arg-type]
        for name in told.ports:
            await stats.ask(name)
        await updates._telling.finish()

    asyncio.run(look())


def test_who_has_its_roster_is_told_nothing(deployment: Deployment) -> None:
    told = Told(deployment)
    updates = PeerListUpdates(RunningDeployment(deployment), told.ports)
    look(told, updates)
    assert told.counts() == {} and updates.behind == []


def test_who_has_started_with_another_is_told_once(deployment: Deployment, tmp_path: Path) -> None:
    told = Told(deployment)
    updates = PeerListUpdates(RunningDeployment(wider(tmp_path)), told.ports)
    look(told, updates)
    # Only those whose way is over the link have another roster.
    assert told.counts() == {"far-0": 1, "far-1": 1}
    assert updates.behind == ["far-0/0", "far-1/0"]
    look(told, updates)
    assert told.counts() == {"far-0": 1, "far-1": 1} and updates.behind == []


def test_who_was_told_otherwise_by_another_is_left_alone(deployment: Deployment) -> None:
    told = Told(deployment)
    updates = PeerListUpdates(RunningDeployment(deployment), told.ports)
    look(told, updates)
    told.ports["far-0"][0].roster = {"digest": "another", "told": True, "trouble": ""}
    look(told, updates)
    assert told.counts() == {} and updates.behind == ["far-0/0"]
    # Until it starts again, or this deployment changes.
    told.ports["far-0"][0].roster = {"digest": "older", "told": False, "trouble": ""}
    look(told, updates)
    assert told.counts() == {"far-0": 1}


def test_who_refuses_is_not_asked_for_ever(deployment: Deployment, tmp_path: Path) -> None:
    told = Told(deployment)
    updates = PeerListUpdates(RunningDeployment(deployment), told.ports)
    told.ports["far-0"][0].takes_rosters = False
    move(updates, wider(tmp_path))
    for _ in range(2):
        look(told, updates)
        told.ports["far-0"][0].roster = {"digest": "old", "told": True, "trouble": "it can't"}
    look(told, updates)
    assert told.counts()["far-0"] == 1 and updates.behind == ["far-0/0"]


def test_who_does_not_answer_or_does_not_know_is_passed_over(deployment: Deployment, tmp_path: Path) -> None:
    told = Told(deployment)
    told.ports["far-0"][0].links = None
    told.ports["far-1"][0].roster = None
    updates = PeerListUpdates(RunningDeployment(wider(tmp_path)), told.ports)
    look(told, updates)
    assert told.counts() == {} and updates.behind == []


def test_all_are_told_twice_after_a_change(deployment: Deployment, tmp_path: Path) -> None:
    async def main() -> dict[str, int]:
        told = Told(deployment)
        told.ports["home-d0"][0].links = None
        updates = PeerListUpdates(RunningDeployment(deployment), told.ports)
        move(updates, wider(tmp_path))
        updates.announce()
        for _ in range(10):
            await asyncio.sleep(0)
        return told.counts()

    names = ["far-0", "far-1", "home-p0", "home-p1", "home-d1"]
    assert asyncio.run(main()) == dict.fromkeys(names, 2)
