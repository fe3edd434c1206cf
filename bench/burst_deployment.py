"""The deployment that `burst.py` drives: at another speed, running, and as the planner sees it."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from prfaas.core.deployment import Deployment
from prfaas.core.latency.service_curve import ServiceCurve
from prfaas.core.planner import KvSize, PlanProblem, best_operation
from prfaas.core.scheduling.live_problem import ClusterFacts, LinkFacts, problem_now
from prfaas.core.units import parse_bits_per_s
from prfaas.core.workload.lengths import LengthDistribution
from prfaas.serving.control.planning_inputs import decode_slots


def derived(path: Path, directory: Path, speedup: float, first_port: int, *, allocation: bool) -> Path:
    """The deployment at another speed, links and SLO in proportion, and with ports of its own.

    `allocation` False: instances keep their roles.
    """
    document = yaml.safe_load(path.read_text())
    slower = speedup / document["clusters"][0]["speedup"]
    ports = iter(range(first_port, first_port + 1000))
    for cluster in document["clusters"]:
        cluster["speedup"] *= slower
        for instance in cluster["instances"]:
            instance |= {"http_port": next(ports), "kv_port": next(ports)}
    for link in document["links"]:
        link["bandwidth"] = parse_bits_per_s(link["bandwidth"]) * slower
    document["slo"]["tokens_per_s"] *= slower
    document["gateway"]["port"] = next(ports)
    document.setdefault("control", {})["allocation"] = allocation
    derived_path = directory / f"{path.stem}-burst.yaml"
    derived_path.write_text(yaml.safe_dump(document, sort_keys=False))
    return derived_path


@contextlib.contextmanager
def running(path: Path, directory: Path) -> Iterator[None]:
    """The deployment as `prfaas up` runs it, ready; its state, logs and messages are in `directory`."""
    log_path = directory / "up.log"
    with log_path.open("w") as log:
        up = subprocess.Popen(
            [sys.executable, "-m", "prfaas.cli.main", "up", str(path)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PRFAAS_HOME": str(directory / "home")},
        )
        try:
            assert up.stdout is not None
            if not up.stdout.readline().startswith("ready:"):
                raise SystemExit(f"the deployment did not start:\n{log_path.read_text()[-2000:]}")
            yield
        finally:
            up.terminate()
            up.wait(60)


def problem_of(
    deployment: Deployment,
    lengths: LengthDistribution,
    output_tokens: float,
    link_factors: Mapping[str, float],
) -> PlanProblem:
    """What the planner is asked: the file's profiles, its links (some with only a part of their bandwidth), and
    these uncached lengths and answers."""
    clusters = []
    for cluster in deployment.clusters:
        assert cluster.profile is not None
        count = len(cluster.instances)
        curve = ServiceCurve.of_profile(cluster.profile, cluster.speedup)
        if cluster.kind == "prfaas":
            clusters.append(ClusterFacts(cluster.name, cluster.kind, count, curve))
        else:
            batch = decode_slots(deployment, cluster)
            step_s = cluster.profile.decode_step_s(batch) / cluster.speedup
            clusters.append(ClusterFacts(cluster.name, cluster.kind, count, curve, batch, step_s))
    links = [
        LinkFacts(link.source, link.target, link.bandwidth_bits_per_s * link_factors.get(link.name, 1.0))
        for link in deployment.links
    ]
    model = deployment.model.kv_model()
    return problem_now(clusters, links, lengths, output_tokens, KvSize(model))


def best_prefill(deployment: Deployment, problem: PlanProblem) -> dict[str, int]:
    """Prefill instances of every PD cluster at the planner's optimum, with at least one of each role, as the
    scheduler keeps it."""
    return {
        roles.cluster: min(max(roles.prefill, 1), len(deployment.cluster(roles.cluster).instances) - 1)
        for roles in best_operation(problem).roles
    }
