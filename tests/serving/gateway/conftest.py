"""A fresh world per test: a gateway before three stand-in engines, all in the test's own event loop."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .world import World, running_world


@pytest.fixture
def in_world(tmp_path: Path) -> Callable[..., None]:
    """Runs an async test body in a fresh world and checks that nothing is left over."""

    def run(body: Callable[[World], Any], **kwargs: Any) -> None:
        async def main() -> None:
            async with asyncio.timeout(240), running_world(tmp_path, **kwargs) as world:
                await body(world)
                await world.settled()

        asyncio.run(main())

    return run
