"""Fixtures of the control plane's tests."""

from pathlib import Path

import pytest

from prfaas.control.board import Board
from prfaas.deployment import Deployment

from .world import FakeClock, board_of, deployment_of


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return deployment_of(tmp_path)


@pytest.fixture
def board(deployment: Deployment, clock: FakeClock) -> Board:
    return board_of(deployment, clock)
