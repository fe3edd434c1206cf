from collections.abc import Iterator

import pytest
from tests.support_table import deployments_in, problems, shown_by

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


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """What a test says that it shows is what its engines were started as: the support table is made of that."""
    shown = shown_by(item)
    if shown is not None:
        for deployment in deployments_in(getattr(item, "funcargs", {}).values()):
            found = problems(shown, deployment)
            assert not found, f"{item.nodeid}: {'; '.join(found)}"
