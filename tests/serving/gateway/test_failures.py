"""Dead engines, lost transfers, leaving clients: the client sees an answer, and nothing is left over."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import aiohttp
import pytest

from .stand_in import answer_text
from .world import HASTY, OPTIONS, World, route_of

InWorld = Callable[..., None]
LONG = list(range(50, 250)) * 5
SHORT = list(range(60, 90))


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(200):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not happen within four seconds")


@pytest.mark.parametrize("fault", ["refuses", "http-500", "not-announced"])
def test_a_failed_remote_prefill_becomes_a_local_one(in_world: InWorld, fault: str) -> None:
    async def body(world: World) -> None:
        world.plane.suspect_s = 60.0
        if fault == "refuses":
            await world.remote.stop_http()
        elif fault == "http-500":
            world.remote.fails = 500
        else:
            world.remote.sends = False
        route, answer = await world.complete(LONG)
        assert (route["route"], route["prefill"]) == ("local", "local")
        assert route["fallback"] == {"refuses": "unreachable"}.get(fault, fault)
        assert answer["choices"][0]["text"] == answer_text(LONG)
        assert world.decode.loaded == [len(LONG) - 1]
        # The instance is out of routing now: the next request does not try it again.
        route, _ = await world.complete([9, *LONG])
        assert "fallback" not in route and route["prefill"] == "local"
        assert not world.plane.is_up("remote")

    in_world(body, options=HASTY)


def test_a_transfer_that_is_late_over_a_link_blames_nobody(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.remote.stalls = True
        route, answer = await world.complete(LONG)
        assert (route["prefill"], route["fallback"]) == ("local", "link-slow")
        assert answer["choices"][0]["text"] == answer_text(LONG)
        assert world.plane.suspected == [] and world.plane.is_up("remote")

    in_world(body)


def test_an_incompatible_pair_costs_no_grace_and_blames_nobody(in_world: InWorld) -> None:
    sentence = "KV layout differs in 'block_tokens': decode/0 has '16', remote/0 has '32'"

    async def body(world: World) -> None:
        world.remote.sends = False
        world.plane.rejections["remote", "decode"] = sentence
        route, answer = await world.complete(LONG)
        assert (route["prefill"], route["fallback"]) == ("local", "incompatible")
        assert answer["choices"][0]["text"] == answer_text(LONG)
        assert world.plane.suspected == []
        assert len(world.remote.generated()) == 1
        # Known now: the next one does not even prefill there, however it was decided for.
        response, _ = await world.post("/v1/completions", {"model": "stand-in", "prompt": [9, *LONG]})
        assert route_of(response)["fallback"] == "incompatible" and len(world.remote.generated()) == 1
        async with world.admin.get(f"/prfaas/requests/{response.headers['X-Request-Id']}") as page:
            (note,) = (await page.json())["notes"]
        assert note["what"] == f"remote and decode are incompatible: {sentence}"

    # So long that the test would fail if anything waited for the grace.
    in_world(body, options=replace(OPTIONS, announce_grace_s=600.0))


def test_a_path_that_the_producer_has_given_up_is_not_waited_for(in_world: InWorld) -> None:
    """Before the transfer is announced too: the consumer knows nothing, and the prefill goes on."""

    async def body(world: World) -> None:
        world.remote.hangs, world.remote.sends = True, False
        request = asyncio.create_task(world.complete(LONG))
        while not world.remote.generated():
            await asyncio.sleep(0.01)
        world.plane.silence("local", "decode")
        world.plane.silence("remote", "other")
        await asyncio.sleep(0.1)
        assert not request.done()
        world.plane.silence("remote", "decode")
        route, answer = await request
        assert (route["prefill"], route["fallback"]) == ("local", "link-silent")
        assert answer["choices"][0]["text"] == answer_text(LONG)
        # The path is nobody's fault.
        assert world.plane.suspected == []

    in_world(body)


@pytest.mark.parametrize(("left_s", "prefill"), [(31.0, "local"), (29.0, "remote")])
def test_what_a_producer_with_notice_cannot_end_goes_elsewhere_at_once(
    in_world: InWorld, left_s: float, prefill: str
) -> None:
    async def body(world: World) -> None:
        world.plane.left_s, world.remote.hangs = left_s, True
        request = asyncio.create_task(world.complete(LONG))
        await _until(lambda: bool(world.remote.generated()))
        world.plane.give_notice("local", 1.0)
        world.plane.give_notice("remote", 30.0)
        if prefill == "remote":
            await asyncio.sleep(0.1)
            assert not request.done()
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            return
        route, answer = await request
        assert (route["prefill"], route["fallback"]) == ("local", "preempted")
        assert answer["choices"][0]["text"] == answer_text(LONG)
        await _until(lambda: world.remote.cancelled == 1)
        assert world.plane.suspected == []
        # Nothing has failed, so another PrfaaS instance could have been asked.
        assert world.plane.offloads == [True, True]

    in_world(body)


def test_a_transfer_that_its_consumer_drops_is_prefilled_elsewhere_and_blames_nobody(
    in_world: InWorld,
) -> None:
    async def body(world: World) -> None:
        world.remote.hangs = True
        request = asyncio.create_task(world.complete(LONG))
        await _until(lambda: bool(world.remote.generated()))
        sealed = world.remote.generated()[0].body["kv_transfer_params"]["prfaas"]
        ticket = world.remote._ticket(sealed)
        assert ticket is not None
        world.decode.receiver.transfers.drop(ticket.transfer_id, "made to fail")
        route, answer = await request
        assert (route["prefill"], route["fallback"]) == ("local", "transfer-dropped")
        assert answer["choices"][0]["text"] == answer_text(LONG)
        assert world.plane.suspected == []
        # The hanging prefill was let go of, which is what makes vLLM abort it.
        await _until(lambda: world.remote.cancelled == 1)

    in_world(body)


def test_when_every_prefill_instance_fails_the_decode_engine_does_it(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.remote.fails = world.local.fails = 503
        route, answer = await world.complete(LONG)
        assert (route["prefill"], route["fallback"], route["bytes"]) == ("decode", "http-503", "0")
        assert answer["choices"][0]["text"] == answer_text(LONG)
        (decoded,) = world.decode.generated()
        assert "kv_transfer_params" not in decoded.body

    in_world(body)


def test_a_prefill_refused_as_the_clients_fault_is_left_to_the_decode_engine(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.remote.fails = 400
        route, _ = await world.complete(LONG)
        assert (route["prefill"], route["fallback"]) == ("decode", "http-400")
        assert world.local.generated() == []
        assert world.plane.suspected == []

    in_world(body)


def test_a_failed_instance_comes_back_when_it_is_healthy(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        await world.remote.stop_http()
        await world.complete(LONG)
        await asyncio.sleep(0.5)
        assert not world.plane.is_up("remote")
        await asyncio.to_thread(world.remote.sender.close)  # type: ignore[union-attr]
        await asyncio.to_thread(world.remote.receiver.close)
        await world.remote.start()
        world.remote.connect([world.decode])
        for _ in range(50):
            if world.plane.is_up("remote"):
                break
            await asyncio.sleep(0.1)
        route, _ = await world.complete([9, *LONG])
        assert route["prefill"] == "remote"

    in_world(body)


def test_an_unreachable_decode_engine_is_a_503(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        await world.complete(SHORT)
        await world.decode.stop_http()
        response, answer = await world.post("/v1/completions", {"prompt": LONG})
        assert response.status == 503 and "decode" in answer["error"]["message"]
        async with world.client.get("/health") as health:
            assert health.status == 503

    in_world(body)


def test_a_decode_engine_that_dies_in_a_stream_ends_it_with_an_error(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.decode.dies = "mid-stream"
        async with world.client.post("/v1/completions", json={"prompt": LONG, "stream": True}) as response:
            text = (await response.read()).decode()
        assert '"error"' in text and "died" in text and "[DONE]" not in text

    in_world(body)


@pytest.mark.parametrize("moment", ["prefill", "stream"])
def test_a_client_that_leaves_cancels_both_hops(in_world: InWorld, moment: str) -> None:
    async def body(world: World) -> None:
        if moment == "prefill":
            world.remote.hangs = True
        else:
            world.decode.chunks, world.decode.chunk_s = 1000, 0.05
        async with aiohttp.ClientSession(world.client._base_url) as leaving:
            request = asyncio.create_task(
                leaving.post("/v1/completions", json={"prompt": LONG, "stream": True})
            )
            engine = world.remote if moment == "prefill" else world.decode
            await _until(lambda: bool(engine.generated()))
            if moment == "stream":
                response = await request
                await response.content.readany()
                response.close()
            else:
                request.cancel()
                await asyncio.gather(request, return_exceptions=True)
        await _until(lambda: engine.cancelled == 1)
        for _ in range(50):
            if await world.metric("prfaas_gateway_requests_total{") >= 1:
                break
            await asyncio.sleep(0.05)
        cancelled = 'prfaas_gateway_requests_total{endpoint="completions",outcome="cancelled"'
        assert await world.metric(cancelled) == 1

    in_world(body)


def test_fifty_mixed_requests_with_ten_leaving_clients_leave_nothing(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.decode.chunk_s = 0.02

        async def leaving(index: int) -> None:
            with pytest.raises(TimeoutError):
                async with (
                    asyncio.timeout(0.005 * index),
                    world.client.post(
                        "/v1/completions", json={"prompt": [index, *LONG], "stream": True}
                    ) as response,
                ):
                    await response.content.readexactly(1 << 20)

        prompts = [[i, *(LONG if i % 2 else SHORT)] for i in range(1, 41)]
        results = await asyncio.gather(
            *(world.complete(prompt) for prompt in prompts), *(leaving(i) for i in range(10))
        )
        texts = [r[1]["choices"][0]["text"] for r in results if r is not None]
        assert texts == [answer_text(prompt) for prompt in prompts]

    in_world(body)


def test_an_engines_own_transfer_parameters_do_not_reach_the_client(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        response, answer = await world.post("/v1/completions", {"prompt": SHORT, "leak": True})
        assert response.status == 200 and answer["kv_transfer_params"] is None
        assert route_of(response)["route"] == "local"

    in_world(body)


def test_what_can_never_fit_into_staging_is_not_tried(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        route, _ = await world.complete([5, 6] * 1500)
        assert (route["prefill"], route["reason"]) == ("decode", "staging")
        assert world.remote.generated() == []

    in_world(body)


def test_a_late_transfer_is_given_up(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.remote.stalls = world.local.stalls = True
        route, _ = await world.complete(LONG)
        assert (route["prefill"], route["fallback"]) == ("decode", "transfer-deadline")
        # Inside a cluster no link explains it.
        assert [name for name, *_ in world.plane.suspected] == ["local"]

    in_world(body, options=replace(OPTIONS, transfer_grace_s=0.2))
