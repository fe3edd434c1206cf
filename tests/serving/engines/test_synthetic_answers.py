"""Answers of stand-in engines: the same by every way the KV can come, another one as soon as a byte of it is wrong."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_world import MODEL, random_ids, running, write_deployment

from prfaas.core.deployment import Deployment
from prfaas.serving.engines.synthetic.content import PageSource
from prfaas.serving.transport.io.shared_queue import SentTransfer
from prfaas.serving.transport.protocol.chunk_source import ChunkSource

MODELS = ("qwen3-next", "gpt-oss", "mimo-v2-flash", "qwen3")


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return write_deployment(tmp_path)


@pytest.mark.slow("stand-in engines do their work in real time")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_tokens", [2, 255, 257, 1025, 3000])
def test_any_route_gives_the_same_answer(tmp_path: Path, model: str, num_tokens: int) -> None:
    async def check() -> None:
        ids = random_ids(num_tokens, num_tokens)
        async with running(write_deployment(tmp_path, model=model)) as world:
            local = await world.complete("home-0", ids)
            assert local.cached_tokens == 0
            loads = [1, 1, 2]
            for producer, consumer in (("far-0", "home-1"), ("home-prefill", "home-0"), ("far-1", "home-1")):
                await world.post(consumer, "/reset_prefix_cache", {})
                ticket = world.ticket(producer, consumer, ids[:-1])
                sealed, status = await world.move(ticket, ids[:-1])
                layout = world.nodes[consumer].engine.cache.layout
                assert status.phase == "complete", status.reason
                assert status.received_bytes == sum(layout.region_bytes(num_tokens - 1, 0))
                answer = await world.complete(consumer, ids, sealed)
                assert answer.ids == local.ids
                # All of it came over the link; nothing was cached anywhere.
                assert answer.cached_tokens == 0
                assert world.nodes[consumer].engine.endpoints.counts["loads_completed"] == loads.pop(0)
                assert await world.metric(consumer, "prfaas_damaged_loads_total") == 0
            again = await world.complete("home-1", ids)
            assert again.ids == local.ids
            await world.settled()

    asyncio.run(check())


@pytest.mark.slow("stand-in engines do their work in real time")
@pytest.mark.parametrize("num_tokens", [2, 256, 257, 1500])
def test_an_answer_goes_on_after_the_producers_first_token(deployment: Deployment, num_tokens: int) -> None:
    """All tokens of the prompt leave, and the consumer computes the one after them, which the producer has named."""

    async def check() -> None:
        ids = random_ids(num_tokens, num_tokens)
        async with running(deployment) as world:
            local = (await world.complete("home-0", ids)).ids
            sealed = (ticket := world.ticket("far-0", "home-1", ids)).seal(world.key)
            arrival = asyncio.create_task(world.arrival(ticket))
            asked = {"max_tokens": 1, "logprobs": 0, "return_tokens_as_token_ids": True}
            (choice,) = (await world.complete("far-0", ids, sealed, **asked)).body["choices"]
            assert choice["logprobs"]["tokens"] == [f"token_id:{local[0]}"]
            await arrival
            rest = await world.complete("home-1", [*ids, local[0]], sealed, max_tokens=23)
            assert [local[0], *rest.ids] == local
            assert world.nodes["home-1"].engine.endpoints.counts["loads_completed"] == 1
            await world.settled()

    asyncio.run(check())


@pytest.mark.slow("stand-in engines do their work in real time")
def test_other_prompts_give_other_answers(deployment: Deployment) -> None:
    async def check() -> None:
        ids = random_ids(700, 1)
        async with running(deployment, "home-0") as world:
            answers = [(await world.complete("home-0", ids)).ids]
            for place in (0, 255, 256, 511, 600, 699):
                other = ids.copy()
                other[place] ^= 1
                answers.append((await world.complete("home-0", other)).ids)
            assert len(set(map(tuple, answers))) == len(answers)

    asyncio.run(check())


def test_a_prefix_that_is_held_is_not_sent_again(deployment: Deployment) -> None:
    async def check() -> None:
        ids = random_ids(3000, 2)
        async with running(deployment) as world:
            local = (await world.complete("other-0", ids)).ids
            sealed, first = await world.move(world.ticket("far-0", "home-0", ids[:1500]), ids[:1500])
            await world.complete("home-0", ids[:1501], sealed)
            # A hybrid engine that has loaded holds full attention but no state: 5 whole blocks of 256.
            ticket = world.ticket("far-0", "home-0", ids[:-1], skip_tokens=1280)
            sealed, second = await world.move(ticket, ids[:-1])
            layout = world.nodes["home-0"].engine.cache.layout
            assert second.received_bytes == sum(layout.region_bytes(2999, 1280)) < first.received_bytes * 1.5
            answer = await world.complete("home-0", ids, sealed)
            assert answer.ids == local
            assert answer.cached_tokens == 1280
            # vLLM asks for nothing when all of a ticket's attention is held, though the state is not.
            ticket = world.ticket("far-0", "home-0", ids[:1280], skip_tokens=1280)
            sealed, _ = await world.move(ticket, ids[:1280])
            assert (await world.complete("home-0", ids[:1281], sealed)).cached_tokens == 0
            await world.settled()

    asyncio.run(check())


@pytest.mark.slow("stand-in engines do their work in real time")
def test_a_skipped_prefix_that_is_gone_means_a_local_prefill(deployment: Deployment) -> None:
    async def check() -> None:
        ids = random_ids(2000, 3)
        async with running(deployment) as world:
            local = (await world.complete("other-0", ids)).ids
            ticket = world.ticket("far-0", "home-0", ids[:-1], skip_tokens=1024)
            sealed, _ = await world.move(ticket, ids[:-1])
            answer = await world.complete("home-0", ids, sealed)
            assert answer.ids == local
            assert answer.cached_tokens == 0
            assert await world.metric("home-0", "prfaas_loads_completed_total") == 0
            await world.settled()

    asyncio.run(check())


def test_a_prefill_starts_from_a_prefix_that_another_cluster_sends(deployment: Deployment) -> None:
    async def check() -> None:
        ids = random_ids(4000, 4)
        async with running(deployment) as world:
            local = (await world.complete("other-0", ids)).ids
            await world.complete("home-prefill", ids[:2100])
            incoming = world.ticket("home-prefill", "far-0", ids[:2049])
            sealed_in, _ = await world.move(incoming, ids[:2049])
            before = world.nodes["far-0"].engine.counts.prefilled_tokens
            ticket = world.ticket("far-0", "home-0", ids[:-1])
            sealed, _ = await world.move(ticket, ids[:-1], sealed_in)
            assert world.nodes["far-0"].engine.counts.prefilled_tokens - before == 3999 - 2049
            answer = await world.complete("home-0", ids, sealed, cached_elsewhere=2049)
            assert answer.ids == local
            # What the producer said is told instead of the engine's own count, once the KV is loaded.
            assert answer.cached_tokens == 2049
            await world.settled()

    asyncio.run(check())


@pytest.mark.slow("stand-in engines do their work in real time")
@pytest.mark.parametrize("place", [0, 100_003, 131_072 + 8, -1, -68_608 - 5])
def test_one_wrong_byte_is_seen_and_costs_a_prefill(
    deployment: Deployment,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: int,
) -> None:
    """The byte is changed where the producer reads it: the page's digest is the only thing that tells."""
    spoilt = _spoil_one_byte(place)

    async def check() -> None:
        ids = random_ids(1200, 5)
        async with running(deployment) as world:
            local = (await world.complete("other-0", ids)).ids
            monkeypatch.setattr(PageSource, "read_into", spoilt)
            sealed, status = await world.move(world.ticket("far-0", "home-0", ids[:-1]), ids[:-1])
            monkeypatch.undo()
            assert status.phase == "complete"
            answer = await world.complete("home-0", ids, sealed)
            assert (answer.cached_tokens, answer.ids) == (0, local)
            assert await world.metric("home-0", "prfaas_digest_mismatches_total") == 1
            assert await world.metric("home-0", "prfaas_loads_failed_total") == 1
            assert await world.metric("home-0", "prfaas_damaged_loads_total") == 0
            again = await world.complete("home-0", ids)
            assert again.ids == local
            await world.settled()

    asyncio.run(check())
    (line,) = [message for message in caplog.messages if "is not what the prefill engine computed" in message]
    assert line.startswith("a request prefills locally: in its KV from far-0, block ")


def test_layers_that_change_places_are_seen(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    put = SentTransfer.put

    def swapped(
        self: SentTransfer, region: int, offset: int, source: ChunkSource, *, urgent: bool = False
    ) -> None:
        put(self, {0: 1, 1: 0}.get(region, region), offset, source, urgent=urgent)

    async def check() -> None:
        ids = random_ids(1200, 5)
        async with running(deployment) as world:
            local = (await world.complete("other-0", ids)).ids
            monkeypatch.setattr(SentTransfer, "put", swapped)
            sealed, _ = await world.move(world.ticket("far-0", "home-0", ids[:-1]), ids[:-1])
            monkeypatch.undo()
            answer = await world.complete("home-0", ids, sealed)
            assert (answer.cached_tokens, answer.ids) == (0, local)
            assert await world.metric("home-0", "prfaas_digest_mismatches_total") == 1

    asyncio.run(check())


@pytest.mark.slow("stand-in engines do their work in real time")
@pytest.mark.parametrize("place", [0, 100_003, 131_072 + 8, -1, -68_608 - 5])
def test_without_digests_one_wrong_byte_gives_another_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """So that what a test does to the bytes shows in the answer."""
    spoilt = _spoil_one_byte(place)

    async def check() -> None:
        ids = random_ids(1200, 5)
        async with running(write_deployment(tmp_path, page_digests=False)) as world:
            local = (await world.complete("other-0", ids)).ids
            monkeypatch.setattr(PageSource, "read_into", spoilt)
            sealed, status = await world.move(world.ticket("far-0", "home-0", ids[:-1]), ids[:-1])
            monkeypatch.undo()
            assert status.phase == "complete"
            answer = await world.complete("home-0", ids, sealed)
            assert world.nodes["home-0"].engine.endpoints.counts["loads_completed"] == 1
            assert answer.ids != local
            assert await world.metric("home-0", "prfaas_damaged_loads_total") == 1
            # No state is held, so the next time all of it is computed anew.
            again = await world.complete("home-0", ids)
            assert (again.cached_tokens, again.ids) == (0, local)

    asyncio.run(check())


def _spoil_one_byte(place: int) -> Callable[[PageSource, int, memoryview], None]:
    """`PageSource.read_into` that changes byte `place` of the first region, or of the last one if negative."""
    read, page_bytes = PageSource.read_into, {True: 131_072, False: 68_608}[place >= 0]

    def read_into(self: PageSource, start: int, out: memoryview) -> None:
        read(self, start, out)
        spot = place if place >= 0 else self.nbytes + max(place, -self.nbytes)
        if self._page_bytes == page_bytes and start <= spot < start + out.nbytes:
            out[spot - start] ^= 0x10

    return read_into


def test_damage_that_is_cached_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        ids = random_ids(513, 6)
        async with running(write_deployment(tmp_path, model="qwen3", page_digests=False)) as world:
            local = (await world.complete("other-0", ids)).ids
            monkeypatch.setattr(PageSource, "read_into", _spoil_one_byte(77))
            sealed, _ = await world.move(world.ticket("far-0", "home-0", ids[:-1]), ids[:-1])
            monkeypatch.undo()
            wrong = await world.complete("home-0", ids, sealed)
            again = await world.complete("home-0", ids)
            assert again.cached_tokens == 512
            assert again.ids == wrong.ids != local

    asyncio.run(check())


@pytest.mark.slow("stand-in engines do their work in real time")
@pytest.mark.parametrize("place", [5, -5])
def test_damage_follows_the_context_to_other_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """Also that of a linear state, which is not sent on: what was computed from it is as wrong."""

    async def check() -> None:
        ids = random_ids(3000, 6)
        async with running(write_deployment(tmp_path, page_digests=False)) as world:
            local = (await world.complete("other-0", ids)).ids
            monkeypatch.setattr(PageSource, "read_into", _spoil_one_byte(place))
            sealed_in, _ = await world.move(world.ticket("home-prefill", "far-0", ids[:1025]), ids[:1025])
            monkeypatch.undo()
            sealed, _ = await world.move(world.ticket("far-0", "home-0", ids[:-1]), ids[:-1], sealed_in)
            answer = await world.complete("home-0", ids, sealed)
            assert answer.ids != local
            assert await world.metric("far-0", "prfaas_damaged_loads_total") == 1

    asyncio.run(check())


@pytest.mark.slow("stand-in engines do their work in real time")
def test_an_answer_can_be_continued_elsewhere(deployment: Deployment) -> None:
    async def check() -> None:
        ids = random_ids(300, 7)
        async with running(deployment, "home-0", "other-0") as world:
            whole = (await world.complete("home-0", ids, max_tokens=600)).ids
            for told in (1, 211, 212, 213, 400):
                rest = await world.complete("other-0", ids + whole[:told], max_tokens=600 - told)
                assert rest.ids == whole[told:]

    asyncio.run(check())


def test_tenants_share_no_prefix_but_get_the_same_answers(deployment: Deployment) -> None:
    async def check() -> None:
        ids = random_ids(1500, 8)
        async with running(deployment) as world:
            first = await world.complete("home-0", ids, cache_salt="a")
            other = await world.complete("home-0", ids, cache_salt="b")
            again = await world.complete("home-0", ids, cache_salt="a")
            assert (first.cached_tokens, other.cached_tokens, again.cached_tokens) == (0, 0, 1280)
            assert first.ids == other.ids == again.ids
            ticket = world.ticket("far-0", "home-1", ids[:-1], salt="a")
            sealed, _ = await world.move(ticket, ids[:-1], cache_salt="a")
            wrong = await world.complete("home-1", ids, sealed, cache_salt="b")
            assert wrong.cached_tokens == 0
            await world.settled()

    asyncio.run(check())


def test_tickets_for_others_and_other_prompts_move_nothing(deployment: Deployment) -> None:
    async def check() -> None:
        ids = random_ids(600, 9)
        async with running(deployment) as world:
            elsewhere = world.ticket("far-0", "home-1", ids[:-1]).seal(world.key)
            assert (await world.complete("home-0", ids, elsewhere)).cached_tokens == 0
            await world.post("home-0", "/reset_prefix_cache", {})
            forged = world.ticket("far-0", "home-0", ids[:-1]).seal(b"x" * 32)
            assert (await world.complete("home-0", ids, forged)).cached_tokens == 0
            ticket = world.ticket("far-0", "home-0", ids[:-1])
            sealed, _ = await world.move(ticket, ids[:-1])
            other = [*ids[:-2], ids[-2] ^ 1, ids[-1]]
            await world.complete("home-0", other, sealed)
            assert await world.metric("home-0", "prfaas_loads_completed_total") == 0
            await world.settled()

    asyncio.run(check())


@pytest.mark.slow("stand-in engines do their work in real time")
def test_bodies_as_the_gateway_and_clients_send_them(deployment: Deployment) -> None:
    async def check() -> None:
        async with running(deployment, "home-0") as world:
            text = await world.post(
                "home-0", "/v1/completions", {"prompt": "Hello", "return_token_ids": True}
            )
            choice = text.body["choices"][0]
            assert choice["prompt_token_ids"] == list(b"Hello")
            assert len(choice["token_ids"]) == 16
            assert choice["text"].encode() == bytes(choice["token_ids"])
            messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
            chat = await world.post(
                "home-0", "/v1/chat/completions", {"messages": messages, "return_token_ids": True, "n": 2}
            )
            tokens = await world.post("home-0", "/tokenize", {"messages": messages})
            assert chat.body["prompt_token_ids"] == tokens.body["tokens"]
            assert len(chat.body["choices"]) == 2
            given = await world.post(
                "home-0",
                "/v1/chat/completions",
                {
                    "messages": messages,
                    "max_tokens": 7,
                    "kv_transfer_params": {"prompt_token_ids": tokens.body["tokens"]},
                },
            )
            content = chat.body["choices"][0]["message"]["content"]
            assert given.body["choices"][0]["message"]["content"] == content[:7]
            several = await world.post("home-0", "/v1/completions", {"prompt": ["a", "b"], "n": 2})
            assert [choice["index"] for choice in several.body["choices"]] == [0, 1, 2, 3]
            for body, status in (
                ({"prompt": "x", "model": "another"}, 404),
                ({"prompt": "x" * 20_000}, 400),
                ({"prompt": []}, 400),
                ({"prompt": "x", "max_tokens": 0}, 400),
            ):
                assert (await world.post("home-0", "/v1/completions", body)).status == status
            assert (
                json.loads(await world.get("home-0", "/v1/models"))["data"][0]["owned_by"]
                == "prfaas-synthetic"
            )
            assert "prfaas-synthetic" in await world.get("home-0", "/version")
            await world.settled()

    asyncio.run(check())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streams_say_what_whole_answers_say(deployment: Deployment, path: str) -> None:
    async def check() -> None:
        async with running(deployment, "home-0") as world:
            prompt = (
                {"prompt": "Hello"}
                if path == "/v1/completions"
                else {"messages": [{"role": "user", "content": "x"}]}
            )
            body: dict[str, Any] = {"model": MODEL, **prompt, "max_tokens": 100, "return_token_ids": True}
            whole = (await world.post("home-0", path, body)).body
            url = deployment.instance("home-0").url + path
            stream = body | {"stream": True, "stream_options": {"include_usage": True}}
            async with world.session.post(url, json=stream) as response:
                assert response.headers["Server"] == "prfaas-synthetic"
                events = [
                    line.removeprefix(b"data: ").strip() async for line in response.content if line.strip()
                ]
            assert events.pop() == b"[DONE]"
            parsed = [json.loads(event) for event in events]
            assert parsed.pop()["usage"]["completion_tokens"] == 100
            ids = [token for event in parsed for token in event["choices"][0]["token_ids"]]
            assert ids == whole["choices"][0]["token_ids"]
            # As vLLM, it joins what is ready: how many events that makes is the machine's too.
            *reasons, reason = (event["choices"][0]["finish_reason"] for event in parsed)
            assert set(reasons) <= {None} and reason == "length"
            assert len(parsed) < 100

    asyncio.run(check())


def test_a_stream_interval_makes_few_events_of_the_same_answer(tmp_path: Path) -> None:
    deployment = write_deployment(tmp_path, extra_args=["--stream-interval", "40"])

    async def check() -> None:
        async with running(deployment, "home-0") as world:
            body = {"model": MODEL, "prompt": "Hello", "max_tokens": 100, "return_token_ids": True}
            whole = (await world.post("home-0", "/v1/completions", body)).body
            url = deployment.instance("home-0").url + "/v1/completions"
            async with world.session.post(url, json=body | {"stream": True}) as response:
                lines = [line async for line in response.content if line.strip()]
            pieces = [
                json.loads(line.removeprefix(b"data: "))["choices"][0]["token_ids"] for line in lines[:-1]
            ]
            assert [token for piece in pieces for token in piece] == whole["choices"][0]["token_ids"]
            # The first one at once, the last one when the answer ends.
            assert len(pieces[0]) < 40
            assert all(len(piece) >= 40 for piece in pieces[1:-1])
            assert len(pieces) <= 4

    asyncio.run(check())


@pytest.mark.slow("stand-in engines do their work in real time")
def test_a_client_that_leaves_leaves_nothing_behind(deployment: Deployment) -> None:
    async def check() -> None:
        async with running(deployment) as world:
            ids = random_ids(15_000, 11)
            ticket = world.ticket("far-0", "home-0", ids[:-1])
            hop = asyncio.create_task(world.complete("far-0", ids[:-1], ticket.seal(world.key), max_tokens=1))
            while not world.nodes["far-0"].engine.endpoints._sends:
                await asyncio.sleep(0.001)
            hop.cancel()
            assert (await world.arrival(ticket)).phase == "failed"
            url = deployment.instance("home-0").url + "/v1/completions"
            async with world.session.post(
                url, json={"model": MODEL, "prompt": "x", "max_tokens": 9000, "stream": True}
            ) as response:
                await response.content.readline()
            await world.settled()
            assert await world.metric("home-0", "num_requests_running") == 0
            assert np.isfinite(await world.metric("home-0", "kv_cache_usage_perc"))

    asyncio.run(check())


@pytest.mark.slow("a crowd takes its turns in real time")
def test_a_crowd_in_a_small_cache_ends(deployment: Deployment) -> None:
    """More requests than pages, some with transfers that came to nothing, some whose client leaves."""

    async def check() -> None:
        prompts = [random_ids(1500 + 200 * seed, seed) for seed in range(6)]
        async with running(deployment) as world:
            expected = [(await world.complete("other-0", ids)).ids for ids in prompts]
            world.nodes["home-0"].engine.cache.pool.capacity = 30

            async def request(number: int) -> None:
                ids = prompts[number % len(prompts)]
                ticket = world.ticket("far-0", "home-0", ids[:-1], skip_tokens=256 * (number % 3))
                sealed, _ = await world.move(ticket, ids[:-1])
                answer = asyncio.create_task(world.complete("home-0", ids, sealed))
                if number % 5 == 0:
                    await asyncio.sleep(0.005)
                    answer.cancel()
                    await asyncio.gather(answer, return_exceptions=True)
                    # The engine may never have heard of it: that is why gateways abandon.
                    await world.abandon(ticket)
                else:
                    assert (await answer).ids == expected[number % len(prompts)]

            await asyncio.gather(*map(request, range(48)))
            await world.settled()
            engine = world.nodes["home-0"].engine
            assert engine.counts.finished + engine.counts.cancelled >= 40
            assert engine.endpoints.counts["loads_completed"] > 0

    asyncio.run(check())


@pytest.mark.slow("stand-in engines do their work in real time")
def test_a_request_that_leaves_while_it_waits_frees_its_transfer(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(write_deployment(tmp_path, speedup=5)) as world:
            engine = world.nodes["home-0"].engine
            ids = random_ids(1000, 1)
            sealed, _ = await world.move(world.ticket("far-0", "home-0", ids[:500]), ids[:500])
            ahead = asyncio.create_task(world.complete("home-0", random_ids(15_000, 2), max_tokens=1))
            while not engine.counts.running:
                await asyncio.sleep(0.001)
            behind = asyncio.create_task(world.complete("home-0", ids, sealed))
            while not engine.counts.waiting:
                await asyncio.sleep(0.001)
            assert await world.metric("home-0", "num_requests_waiting") == 1
            behind.cancel()
            assert (await ahead).status == 200
            await world.settled()

    asyncio.run(check())
