"""In whatever shape a prompt comes, it is prefilled elsewhere as the very ids that its decode engine makes of it."""

from collections.abc import Callable

import pytest

from .. import stand_in_apis
from ..world import World, route_of
from .shapes import limited, shapes

InWorld = Callable[..., None]
SHAPES = shapes("tell me of colours " * 30, list(range(40, 240)) * 3)


def test_there_are_forty() -> None:
    assert len(SHAPES) >= 40


@pytest.mark.parametrize("other_ids", [False, True], ids=["own tokenizer", "engine's"])
def test_ids_are_the_engines(in_world: InWorld, other_ids: bool) -> None:
    """`other_ids`: the model's own tokenizer makes others than the engine."""

    async def body(world: World) -> None:
        for name, (path, asked) in SHAPES.items():
            for engine in world.engines:
                engine.seen.clear()
            response, _ = await world.post(path, {"model": "stand-in", **limited(path, asked, 4)})
            assert (response.status, route_of(response)["route"]) == (200, "offload"), name
            (prefill,), sent = world.remote.generated(), world.decode.generated()[-1].body
            sent.pop("kv_transfer_params")
            assert prefill.body["prompt"] == world.decode._ids(stand_in_apis.as_chat(path, sent))[:-1], name

    in_world(body, other_ids=other_ids)
