"""Short forms of `bench/rollout.py`: streams of all kinds over two gateways while engines and gateways are replaced."""

from pathlib import Path

import pytest
from tests.rollouts import report


@pytest.mark.slow("starts two gateways and six engines, and replaces three of them")
@pytest.mark.timeout(300)
def test_nobody_notices_a_rollout_of_stand_ins(tmp_path: Path) -> None:
    options = ("--streams", "30", "--per-s", "6", "--replace", "home-d-0", "--no-etcd")
    assert report(tmp_path, *options)["replaced"] == ["home-d-0"]
