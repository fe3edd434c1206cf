"""Fixtures of the control plane's tests."""

from pathlib import Path

import pytest

from prfaas.core.deployment import Deployment
from prfaas.serving.control.cluster_state import ClusterState

from .world import FakeClock, cluster_state_of, deployment_of


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return deployment_of(tmp_path)


@pytest.fixture
def cluster_state(deployment: Deployment, clock: FakeClock) -> ClusterState:
    return cluster_state_of(deployment, clock)
