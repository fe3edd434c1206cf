from collections.abc import Iterator
from pathlib import Path

import pytest

from .stack import TEMPLATES

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share engines run on one worker of xdist: those of a file, or of a folder in this one."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.xdist_group(item.path.relative_to(HERE).parts[0]))


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
