"""The deployment that runs by now: everybody reads settings here, and a reload moves it."""

from prfaas.core.deployment import AppliedDeployment, Deployment


class RunningDeployment:
    """Holds what runs. A reload moves it, in one step of the event loop.

    Parts are given this in place of a `Deployment`. They read `current` at the moment when they need a setting and keep
    no copy of it: `running.current.control.silence_s`.
    """

    __slots__ = ("applied", "current")

    applied: AppliedDeployment
    """What was taken on last: the file, and who leaves."""
    current: Deployment
    """The file's deployment, with the instances that leave still in it."""

    def __init__(self, deployment: Deployment, digest: str = "") -> None:
        """`digest`: of the file, in hex."""
        self.move(AppliedDeployment(deployment, digest))

    def move(self, applied: AppliedDeployment) -> None:
        """Run this from now on."""
        self.applied, self.current = applied, applied.running
