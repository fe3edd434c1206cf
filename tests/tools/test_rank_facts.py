"""Engines that can't share heads are named before any of them starts."""

from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.core.deployment import Deployment, load_deployment
from prfaas.tools.doctor import check_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "local.yaml"


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return load_deployment(EXAMPLE, state_dir=tmp_path)


def with_ranks(deployment: Deployment, kind: str, ranks: int) -> Deployment:
    clusters = tuple(
        replace(
            cluster,
            instances=tuple(replace(each, tensor_parallel=ranks) for each in cluster.instances),
        )
        if cluster.kind == kind
        else cluster
        for cluster in deployment.clusters
    )
    return replace(deployment, clusters=clusters)


def test_engines_that_can_share_heads_are_no_finding(deployment: Deployment) -> None:
    assert check_ranks(deployment) == []
    assert check_ranks(with_ranks(with_ranks(deployment, "prfaas", 3), "pd", 3)) == []
    assert check_ranks(with_ranks(with_ranks(deployment, "prfaas", 4), "pd", 2)) == []
    assert check_ranks(with_ranks(deployment, "pd", 8)) == []


def test_a_pair_that_cannot_share_heads_is_named(deployment: Deployment) -> None:
    (found,) = check_ranks(with_ranks(with_ranks(deployment, "prfaas", 3), "pd", 2))
    far = next(each for each in deployment.clusters if each.kind == "prfaas").instances[0].name
    assert found.level == "problem" and far in found.text
    assert "tensor_parallel 3" in found.text and "neither divides the other" in found.text
    assert found.mend is not None and "one divides the other" in found.mend
