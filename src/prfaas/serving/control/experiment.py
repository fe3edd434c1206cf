"""The experiment that a deployment file asks for: whose decisions count now, and when it must end."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

from prfaas.core.deployment import AppliedDeployment, Deployment, ExperimentConfig
from prfaas.core.deployment.source import read_source
from prfaas.core.experiment import Guard, Slice, Slices
from prfaas.core.ledger import LedgerEntry
from prfaas.core.scheduling.parameters import PolicyError
from prfaas.core.scheduling.policy import Policy, make_policy
from prfaas.core.scheduling.view import View
from prfaas.serving.control.metrics import ControlMetrics
from prfaas.serving.control.part import Json, Part
from prfaas.serving.running_deployment import RunningDeployment

logger = logging.getLogger(__name__)


class Experiment(Part):
    """Routes as the file says in some slices of time, and another way in the others, until that hurts.

    It begins anew where a file is taken on that asks for another one. Each gateway of a fleet ends it by itself.
    """

    def __init__(
        self, running: RunningDeployment, secret: bytes, unix_s: Callable[[], float] = time.time
    ) -> None:
        """
        Args:
            running: asks for it.
            secret: the deployment's; decides the order of slices.
            unix_s: the clock that all gateways share.

        Raises:
            DeploymentError: the other policy can't be made.
        """
        self._secret = secret
        self._unix_s = unix_s
        self._take(running.current)

    def _take(self, deployment: Deployment) -> None:
        config = deployment.gateway.experiment
        other = None if config is None else _other_policy(deployment, config)
        self._config, self._other = config, other
        self._ended_s, self._harm = math.inf, ""
        if config is not None:
            self._slices = Slices(config.slice_s, config.washout_s, self._secret)
            self._guard = Guard(config.most_harm)

    def way(self, policy: Policy, view: View) -> tuple[Policy, View]:
        """What decides now, and what it sees, where `policy` is the file's."""
        config, now = self._config, self.at(self._unix_s())
        if config is None or now is None or now.arm == "as-is":
            return policy, view
        if config.without_link is not None:
            links = {
                pair: link for pair, link in view.links.items() if "->".join(pair) != config.without_link
            }
            return policy, replace(view, links=links)
        if config.threshold_tokens is not None:
            thresholds = dict.fromkeys(view.clusters, float(config.threshold_tokens))
            view = replace(view, threshold_tokens=thresholds)
        return self._other or policy, view

    def at(self, unix_s: float) -> Slice | None:
        """The slice of a moment that is not long past; None: there is no experiment, or it has ended."""
        return None if self._config is None or unix_s >= self._ended_s else self._slices.at(unix_s)

    def arm(self, at: Slice | None) -> str:
        """How requests of a slice are routed: `as-is`, or what is other; empty: there is no experiment."""
        if at is None or self._config is None:
            return ""
        return at.arm if at.arm == "as-is" else _described(self._config)

    def hear(self, row: LedgerEntry) -> None:
        """A request has ended: it may show that the other way hurts."""
        has_failed = row.outcome == "engine_error"
        if row.slice is None or self._config is None or self._harm or (row.ttft_s is None and not has_failed):
            return
        at = Slice(row.slice, "as-is" if row.arm == "as-is" else "other", counts=not row.washout)
        harm = self._guard.harm(at, None if has_failed else row.ttft_s)
        if harm is not None:
            self._ended_s, self._harm = self._unix_s(), harm
            logger.warning("the experiment against %s has ended: %s", _described(self._config), harm)

    def follow(self, before: AppliedDeployment, now: AppliedDeployment) -> None:
        """Begin another one. Raises DeploymentError where it can't be made."""
        if (now.said.gateway.experiment, now.said.routing) != (
            before.said.gateway.experiment,
            before.said.routing,
        ):
            self._take(now.running)

    def state(self, _now_s: float) -> Json:
        """What is compared, how requests are routed now, and why it has ended."""
        if self._config is None:
            return {"experiment": None}
        now = self.at(self._unix_s())
        return {
            "experiment": {
                "against": _described(self._config),
                "arm": None if now is None else now.arm,
                "ended": self._harm or None,
            }
        }

    def write_gauges(self, metrics: ControlMetrics, _now_s: float) -> None:
        now = self.at(self._unix_s())
        metrics.experiment_other.set(now is not None and now.arm == "other")
        metrics.experiment_ended.set(bool(self._harm))


def _described(config: ExperimentConfig) -> str:
    if config.without_link is not None:
        return f"without {config.without_link}"
    if config.threshold_tokens is not None:
        return f"threshold {config.threshold_tokens}"
    return config.against


def _other_policy(deployment: Deployment, config: ExperimentConfig) -> Policy | None:
    """None: the file's own, which sees something else."""
    try:
        if config.threshold_tokens is not None and deployment.routing.policy == "static_threshold":
            return make_policy("static_threshold", {"threshold_tokens": config.threshold_tokens})
        is_own = config.threshold_tokens is not None or config.without_link is not None
        return None if is_own else make_policy(config.against)
    except PolicyError as error:
        place = ("gateway", "experiment", "against")
        raise read_source(deployment.path).error(place, str(error)) from error
