from collections.abc import Iterator

import pytest

from .stack import Stack, running, write_deployment


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Three engines of the tiny Qwen3-Next and the gateway, over a link on which transfer time matters."""
    directory = tmp_path_factory.mktemp("prfaas-test-stack")
    yield from running(write_deployment(directory, bandwidth="100 Mbit/s"))
