"""Fixtures of a fleet's tests: the control plane's small deployment, and its clock."""

from pathlib import Path

import pytest
from tests.serving.control.world import FakeClock, deployment_of

from prfaas.core.deployment import Deployment


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return deployment_of(tmp_path)
