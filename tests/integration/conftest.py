from collections.abc import Iterator

import pytest

from .stack import TEMPLATES


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Models, keys and logs of tests stay out of the user's own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRFAAS_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session", autouse=True)
def templates() -> Iterator[None]:
    """End those that engines were forked of."""
    with TEMPLATES:
        yield
