"""Whose token ids are taken: the own tokenizer's where all engines that decode agree, else an engine's."""

import asyncio
from collections.abc import Callable
from typing import Any

from ..stand_in import StandInEngine
from ..world import World, route_of

InWorld = Callable[..., None]
TEXT = "tell me " * 40
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": TEXT}]}


async def introduced(*engines: StandInEngine) -> None:
    """Each engine has been asked for two samples of both kinds; one that disagrees for the first of them."""
    while any(len(engine.rendered()) < (2 if engine.other_ids else 4) for engine in engines):
        await asyncio.sleep(0.02)


async def asked(world: World) -> tuple[str, int]:
    """The prompt's length that routing knew of a plain chat, and how often an engine rendered for it."""
    decoders = [engine for engine in (world.decode, world.spare) if engine is not None]
    before = sum(len(engine.rendered()) for engine in decoders)
    response, _ = await world.post("/v1/chat/completions", CHAT)
    assert response.status == 200
    return route_of(response)["uncached"], sum(len(engine.rendered()) for engine in decoders) - before


def test_plain_prompts_are_tokenized_here_once_the_engines_agree(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        await introduced(world.decode)
        length = str(len(world.decode._ids(CHAT)))
        assert await asked(world) == (length, 0)
        for unusual in ({"tools": [{"type": "function", "function": {"name": "f"}}]}, {"documents": [{}]}):
            await world.post("/v1/chat/completions", CHAT | unusual)
            assert world.decode.rendered()[-1].body == CHAT | unusual

    in_world(body)


def test_one_engine_that_disagrees_is_enough_to_ask_for_every_prompt(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        assert world.spare is not None
        await introduced(world.decode, world.spare)
        assert (await asked(world))[1] == 1

    in_world(body, spare=True, other_ids=True)


def test_a_new_process_may_have_another_template(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        await introduced(world.decode)
        length, rendered = await asked(world)
        assert rendered == 0
        world.decode.other_ids = True
        world.plane.listeners.restarted.tell("decode")
        # From the first request on, whether its samples have been asked for by then or not.
        for _ in range(2):
            longer, rendered = await asked(world)
            assert int(longer) == int(length) + 1 and rendered >= 1
            await introduced(world.decode)

    in_world(body)


def test_an_engine_that_renders_nothing_gets_such_prompts_as_they_are(in_world: InWorld) -> None:
    """As vLLM without `--enable-scale-out`, which says 403."""

    async def body(world: World) -> None:
        response, _ = await world.post("/v1/chat/completions", CHAT | {"documents": [{}]})
        assert response.status == 200 and route_of(response)["reason"] == "not-rendered"

    in_world(body, renders=False)
