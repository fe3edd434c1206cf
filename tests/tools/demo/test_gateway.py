"""What asks the demo's gateway is given up when the gateway ends."""

import asyncio

import pytest

from prfaas.tools.demo.gateway import DemoError, DemoGateway


async def _answered() -> str:
    return "an answer"


async def _for_ever() -> None:
    await asyncio.Event().wait()


def test_an_answer_comes_back() -> None:
    async def check() -> str:
        gateway = asyncio.create_task(_for_ever())
        try:
            return await DemoGateway("http://127.0.0.1:1", gateway).unless_ended(_answered())
        finally:
            gateway.cancel()

    assert asyncio.run(check()) == "an answer"


def test_nobody_waits_for_a_gateway_that_has_ended() -> None:
    async def failing() -> None:
        raise OSError("no such address")

    async def check() -> int:
        gateway = asyncio.create_task(failing())
        with pytest.raises(DemoError, match="the gateway ended: OSError"):
            await DemoGateway("http://127.0.0.1:1", gateway).unless_ended(_for_ever())
        return len(asyncio.all_tasks())

    # Only the check itself.
    assert asyncio.run(check()) == 1
