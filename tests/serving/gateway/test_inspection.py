"""The operators' pages: what they tell, what they don't, and whom."""

import json
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from prfaas.serving.gateway.metrics import Metrics
from prfaas.serving.gateway.request_log import RequestLog, RequestRecord

from .world import World

InWorld = Callable[..., None]
LONG = list(range(50, 250)) * 5


def test_a_request_is_explained_with_the_numbers_that_decided(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        await world.complete(LONG)
        response, _ = await world.post("/v1/completions", {"prompt": LONG})
        async with world.admin.get(f"/prfaas/requests/{response.headers['X-Request-Id']}") as page:
            told = await page.json()
        assert (told["prompt_tokens"], told["answer_tokens"], told["status"]) == (len(LONG), 16, 200)
        (attempt,) = told["attempts"]
        assert (attempt["route"], attempt["prefill"], attempt["outcome"]) == ("offload", "remote", "done")
        assert (attempt["uncached_tokens"], attempt["threshold_tokens"]) == (len(LONG), 100.0)
        assert attempt["held_tokens"] == {"pd": 0, "far": 3 * 256} and attempt["skip_tokens"] == 3 * 256
        assert attempt["predicted_ttft_s"] == 0.5
        assert told["transfer"]["bytes"] == 4 * (len(LONG) - 1 - 3 * 256)
        # Full attention: one layer of four, two heads of 64, K and V, two bytes each.
        assert told["transfer"]["saved_bytes"] == 3 * 256 * 2 * 64 * 2 * 2
        assert {"read", "tokenize", "decide", "prefill", "transfer", "first_byte", "total"} <= told[
            "steps_s"
        ].keys()
        assert told["route"] == response.headers["x-prfaas-route"]

    in_world(body)


def test_what_went_wrong_is_told(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.remote.fails, world.decode.dies = 500, "in-body"
        # However slow the machine is, it is not tried again.
        world.plane.suspect_s = 60.0
        response, _ = await world.post("/v1/completions", {"prompt": LONG})
        async with world.admin.get(f"/prfaas/requests/{response.headers['X-Request-Id']}") as page:
            told = await page.json()
        assert [(a["prefill"], a["decode"], a["outcome"]) for a in told["attempts"]] == [
            ("remote", "decode", "http-500"),
            ("local", "decode", "done"),
            ("local", "spare", "done"),
        ]
        assert [note["what"] for note in told["notes"]] == ["decode failed: died"]

    in_world(body, spare=True)


def test_an_operator_drains_and_undrains_an_instance(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        for what, wanted in (("drain", True), ("undrain", False)):
            async with world.admin.post(f"/prfaas/instances/decode/{what}") as page:
                assert page.status == 200 and (await page.json())["role"] == "decode"
            assert world.plane.drained.pop() == ("decode", wanted)
        async with world.admin.post("/prfaas/instances/nobody/drain") as page:
            assert page.status == 404
            assert "there are remote, local, decode" in (await page.json())["error"]["message"]
        for headers in ({"Host": "evil.example"}, {"Origin": "http://localhost"}):
            async with world.admin.post("/prfaas/instances/decode/drain", headers=headers) as page:
                assert page.status == 403
        async with world.admin.get("/prfaas/instances/decode/drain") as page:
            assert page.status == 405
        assert not world.plane.drained

    in_world(body)


def test_pages_hold_no_prompt_and_no_secret(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        headers = {"Authorization": "Bearer hunter2"}
        asked = {"prompt": "a most secret question " * 10}
        response, answer = await world.post("/v1/completions", asked, headers=headers)
        pages = []
        for path in (f"/prfaas/requests/{response.headers['X-Request-Id']}", "/prfaas/state"):
            async with world.admin.get(path) as page:
                assert page.status == 200
                pages.append(await page.text())
        salt = world.decode.generated()[0].body["cache_salt"]
        ticket = world.decode.generated()[0].body["kv_transfer_params"]["prfaas"]
        for secret in ("secret", "hunter2", salt, ticket, answer["choices"][0]["text"]):
            assert not any(secret in page for page in pages)

    in_world(body, tenant_header="authorization")


def test_a_request_under_way_can_be_explained(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.decode.chunks, world.decode.chunk_s = 100, 0.05
        async with world.client.post("/v1/completions", json={"prompt": LONG, "stream": True}) as response:
            await response.content.readany()
            async with world.admin.get(f"/prfaas/requests/{response.headers['X-Request-Id']}") as page:
                told = await page.json()
            assert (told["outcome"], told["status"]) == ("under way", None)
            assert told["steps_s"]["first_byte"] > 0 and "total" not in told["steps_s"]

    in_world(body)


def test_refused_and_unseen_requests_are_explained_too(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        for asked, status, reason in (
            ({}, 400, "malformed"),
            ({"prompt": [5] * 3999, "max_tokens": 4001}, 400, "length"),
        ):
            response, _ = await world.post("/v1/completions", asked)
            assert response.status == status
            async with world.admin.get(f"/prfaas/requests/{response.headers['X-Request-Id']}") as page:
                told = await page.json()
            assert (told["status"], told["direct_reason"], told["prompt_tokens"]) == (status, reason, None)
        async with world.admin.get("/prfaas/requests/unknown") as page:
            assert page.status == 404 and "unknown" in (await page.json())["error"]["message"]

    in_world(body)


def test_the_state_is_the_planes(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        async with world.admin.get("/prfaas/state") as page:
            assert await page.json() == json.loads(json.dumps(world.plane.state()))

    in_world(body)


def test_the_oldest_record_makes_room() -> None:
    records = RequestLog(3, Metrics(CollectorRegistry()))
    for number in range(5):
        records.add(RequestRecord(str(number), "completions", 0.0, 0.0))
    assert len(records.latest(9)) == 3 and records.find("1") is None and records.find("2") is not None
