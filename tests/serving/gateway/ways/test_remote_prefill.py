"""A prefill elsewhere, between its decision and its first byte."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from prfaas.serving.gateway.ways.remote_prefill import RemotePrefill


class Plane:
    """Counts the prefills under way."""

    def __init__(self) -> None:
        self.open = 0
        self.admission = self
        self.prefixes = SimpleNamespace(expect=lambda name, chains: None)

    @asynccontextmanager
    async def admit(self, decision: object, _chains: object) -> AsyncIterator[object]:
        yield decision

    @contextmanager
    def prefilling(self, _decision: object) -> Iterator[object]:
        self.open += 1
        try:
            yield object()
        finally:
            self.open -= 1


class Prefixes:
    async def move(self, _prompt: object, decision: object) -> object:
        return SimpleNamespace(decision=decision, transfer=None)


def test_it_counts_before_anything_else_is_decided() -> None:
    """Requests that come at the same moment would all go to the instance that seems free."""

    async def main() -> None:
        plane: Any = Plane()
        context: Any = SimpleNamespace(plane=plane, metrics=MagicMock(), running=MagicMock())
        hops: Any = SimpleNamespace(transfers=None)
        record = SimpleNamespace(since=lambda stage, begun_s: 0.0)
        request: Any = SimpleNamespace(record=record, samples=1)
        attempt: Any = SimpleNamespace(decision=SimpleNamespace(prefill="far"), moved=None)
        prompt: Any = SimpleNamespace(request=request, chains=None, token_ids=[1, 2, 3])
        seen: list[int] = []
        facts = {"prompt": prompt, "attempt": attempt, "ask": None}
        remote = RemotePrefill(hops, Prefixes(), context, **facts)  # type: ignore[arg-type]
        prefill = asyncio.create_task(remote.begin())
        # What is ready to run next, as another request that is decided.
        asyncio.get_running_loop().call_soon(lambda: seen.append(plane.open))
        await asyncio.sleep(0)
        assert seen == [1]
        prefill.cancel()
        await asyncio.gather(prefill, return_exceptions=True)
        assert plane.open == 0

    asyncio.run(main())
