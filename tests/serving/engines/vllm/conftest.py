"""For all tests of the vLLM connector."""

import pytest

from prfaas.serving.engines.vllm import producer


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that starves, two engines may take longer to meet than an engine waits for another one."""
    monkeypatch.setattr(producer, "MEET_TIMEOUT_S", 60.0)
