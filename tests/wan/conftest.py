import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from wan.laboratory import Laboratory, LineSettings, missing

PROBLEM = missing()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("wan") and PROBLEM is not None:
            item.add_marker(pytest.mark.skip(reason=PROBLEM))


@pytest.fixture
def make_laboratory() -> Iterator[Callable[..., Laboratory]]:
    with ExitStack() as stack:

        def make(settings: LineSettings, far: int = 1, **options: Any) -> Laboratory:
            return stack.enter_context(Laboratory({"far": far, "home": 1}, settings, **options))

        yield make
