"""`bench/rollout.py` with engines of vLLM: streams of all kinds over two gateways while engines are replaced."""

from pathlib import Path

import pytest
from tests.rollouts import report


@pytest.mark.engine
@pytest.mark.slow("starts engines of vLLM, and one of them again")
@pytest.mark.extended("its parts run against stand-ins in `make test`")
@pytest.mark.timeout(600)
def test_nobody_notices_a_rollout_of_vllm(tmp_path: Path) -> None:
    options = ("--engines", "vllm", "--streams", "30", "--per-s", "1", "--replace", "home-d-0")
    assert report(tmp_path, *options)["replaced"] == ["home-d-0"]
