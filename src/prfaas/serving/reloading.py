"""A running deployment takes on its file again: read, checked, compared, and applied as a whole or not at all."""

import asyncio
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from prfaas.core.bounded_file import WRITTEN_BYTES, file_bytes
from prfaas.core.deployment import (
    AppliedDeployment,
    Deployment,
    DeploymentDifference,
    DeploymentError,
    Instance,
    load_deployment,
)
from prfaas.serving.running_deployment import RunningDeployment

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.25


class ReloadRefusedError(Exception):
    """The file can't be taken on while everything runs; the text is one sentence."""


class Follower(Protocol):
    """A part of the running deployment that has something to do when it has moved."""

    def follow(self, before: AppliedDeployment, now: AppliedDeployment) -> None:
        """Do it, at once. What raises leaves everybody at what was before."""
        ...


@dataclass(frozen=True, slots=True)
class ReloadOutcome:
    """What a file changes."""

    difference: DeploymentDifference
    applied: bool
    digest: str
    """Of the file."""
    leaving: tuple[str, ...]
    """Instances that end their work before they are forgotten."""

    def to_json(self) -> dict[str, Any]:
        """As `POST /prfaas/reload` answers it."""
        return {
            "applied": self.applied,
            "digest": self.digest,
            "changes": [
                {"field": each.field, "sentence": each.sentence, "needs": each.needs}
                for each in self.difference.changes
            ],
            "added": [instance.name for instance in self.difference.added],
            "removed": [instance.name for instance in self.difference.removed],
            "leaving": list(self.leaving),
        }


class Reloader:
    """Has one running deployment follow its file. It belongs to one event loop.

    The file is always the one that the deployment was started from: what a gateway routes by is what stands on its
    own disk, and nobody who reaches its port can give it other addresses.
    """

    def __init__(self, deployment: Deployment) -> None:
        """`deployment`: as it was started."""
        self.running = RunningDeployment(deployment, _digest(deployment))
        self._followers: list[Follower] = []
        self._checks: list[Callable[[Deployment, DeploymentDifference], None]] = []
        self._has_left: Callable[[str], bool] = lambda _name: True
        self._on_left: list[Callable[[Instance], None]] = []
        self.restart: Callable[[str], bool] = lambda _name: False
        """Has the engine of an instance started again, soon; False: this process starts none of that name."""
        self._one_at_a_time = asyncio.Lock()

    @property
    def applied(self) -> AppliedDeployment:
        """What was taken on last."""
        return self.running.applied

    def follow(self, follower: Follower) -> None:
        """Have a part follow, in the order of these calls."""
        self._followers.append(follower)

    def check(self, check: Callable[[Deployment, DeploymentDifference], None]) -> None:
        """Have `check` called before anything is applied. What it raises is why the file is refused."""
        self._checks.append(check)

    def wait_for(self, has_left: Callable[[str], bool]) -> None:
        """Who knows whether nothing is left of the work of an instance that leaves."""
        self._has_left = has_left

    def on_left(self, told: Callable[[Instance], None]) -> None:
        """Have `told` called with every instance that has left."""
        self._on_left.append(told)

    async def reload(self, *, apply: bool = True, expected: str | None = None) -> ReloadOutcome:
        """Read the file again, and take it on if all that it changes can be.

        Args:
            apply: False: only say what would change.
            expected: digest of the file that the caller means; None: whatever is there.

        Raises:
            DeploymentError: there is something wrong with the file.
            ReloadRefusedError: the caller means another file, or something in it can't be changed while everything
                runs. Of a check, too, what it raises.
        """
        async with self._one_at_a_time:
            said, digest = await asyncio.to_thread(_read, self.applied.said)
            if expected not in (None, digest):
                raise ReloadRefusedError(
                    f"the gateway's own {said.path} is another file than yours; copy yours there first"
                )
            difference = self.applied.difference(said)
            for check in self._checks:
                check(said, difference)
            if not apply:
                return self._outcome(difference, digest, applied=False)
            if difference.refused:
                raise ReloadRefusedError(refusal(difference))
            self._take_on(self.applied.taking_on(said, digest))
            for change in difference.changes:
                logger.info("reloaded: %s", change.sentence)
            return self._outcome(difference, digest, applied=True)

    async def run(self) -> None:
        """Until cancelled: forget who leaves when its work has ended."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            for instance in self.applied.leaving:
                if self._has_left(instance.name):
                    self._take_on(self.applied.without(instance.name))
                    logger.info("%s has left", instance.name)
                    for told in self._on_left:
                        told(instance)

    def _take_on(self, applied: AppliedDeployment) -> None:
        before = self.applied
        self.running.move(applied)
        try:
            for follower in self._followers:
                follower.follow(before, applied)
        except Exception:
            # Nothing may be applied by half.
            self.running.move(before)
            for follower in self._followers:
                follower.follow(applied, before)
            raise

    def _outcome(self, difference: DeploymentDifference, digest: str, *, applied: bool) -> ReloadOutcome:
        leaving = tuple(instance.name for instance in self.applied.leaving)
        return ReloadOutcome(difference, applied, digest, leaving)


def refusal(difference: DeploymentDifference) -> str:
    """One sentence on what can't be changed while everything runs, and for each field what would do."""
    first, *others = difference.refused
    told = f"nothing was changed: {first.sentence}, which can't change while everything runs: {first.needs}"
    return "; nor can ".join((told, *(f"{change.field}: {change.needs}" for change in others)))


def digest_of(content: bytes) -> str:
    """What files are compared by: SHA-256, in hex."""
    return hashlib.sha256(content).hexdigest()


def _digest(deployment: Deployment) -> str:
    try:
        return digest_of(file_bytes(deployment.path, WRITTEN_BYTES))
    except OSError:
        return ""


def _read(deployment: Deployment) -> tuple[Deployment, str]:
    before = _digest(deployment)
    said = load_deployment(deployment.path, state_dir=deployment.state_dir)
    if _digest(deployment) != before:
        raise DeploymentError(deployment.path, None, "", "was written while it was read; reload again")
    return said, before
