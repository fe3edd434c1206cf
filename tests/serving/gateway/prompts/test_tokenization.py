"""Whose token ids are taken: the own tokenizer's where all engines that decode agree, else an engine's."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

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


LONG_TEXT = "a" * 600
# Why nobody knows the tokens of a direct prompt: no prompt, none that an engine takes, or none made of tokens.
UNSEEN_REASONS = {"forwarded", "malformed", "refused", "length", "not-rendered", "embeds"}


@pytest.mark.parametrize(
    ("fields", "reason", "num_tokens"),
    [
        ({"prompt": [LONG_TEXT, "b" * 500]}, "batch", 1100),
        ({"prompt": [[1] * 600, [2] * 500], "n": 2}, "batch", 1100),
        ({"prompt": [LONG_TEXT, "b" * 500], "truncate_prompt_tokens": 400}, "batch", 800),
        ({"prompt": LONG_TEXT, "use_beam_search": True, "n": 2}, "beam-search", 600),
        ({"prompt": LONG_TEXT, "n": 1025}, "samples", 600),
        ({"prompt": [5]}, "single-token", 1),
        ({"prompt": LONG_TEXT, "prompt_logprobs": 1}, "prompt-logprobs", 600),
        ({"prompt": LONG_TEXT, "echo": True, "logprobs": 1}, "prompt-logprobs", 600),
    ],
)
def test_what_cannot_be_split_is_routed_by_its_tokens_and_prefix(
    in_world: InWorld, fields: dict[str, Any], reason: str, num_tokens: int
) -> None:
    """The second time the engine that has the prefix is taken, which else would be the less loaded one's turn."""

    async def body(world: World) -> None:
        assert world.spare is not None
        response, _ = await world.post("/v1/completions", fields)
        first = route_of(response)
        assert (response.status, first["route"], first["reason"]) == (200, "local", reason)
        assert first["prefill"] == first["decode"] and first["uncached"] == str(num_tokens)
        world.plane.open[first["decode"]] += 5
        response, _ = await world.post("/v1/completions", fields)
        world.plane.open[first["decode"]] -= 5
        again = route_of(response)
        assert again["decode"] == first["decode"]
        # Prompt logprobs are computed from the first token on, whatever is held.
        from_the_first = reason == "prompt-logprobs" or num_tokens == 1
        assert (int(again["uncached"]) == num_tokens) is from_the_first
        assert world.plane.own_prefills == [num_tokens, int(again["uncached"])]
        assert world.plane.answers == [fields.get("n", 1) * (2 if reason == "batch" else 1)] * 2
        async with world.admin.get(f"/prfaas/requests/{response.headers['X-Request-Id']}") as page:
            told = await page.json()
        assert (told["direct_reason"], told["prompt_tokens"]) == (reason, num_tokens)
        assert reason not in UNSEEN_REASONS
        # Each prompt's length is one of those from which thresholds are worked out.
        prompts = 2 if reason == "batch" else 1
        lengths = [length for length, _ in world.plane.observed[:prompts]]
        assert len(world.plane.observed) == 2 * prompts and sum(lengths) == num_tokens
        assert all(0 < uncached <= length for length, uncached in world.plane.observed)

    in_world(body, spare=True)


@pytest.mark.parametrize(
    "fields",
    [{"prompt": LONG_TEXT, "truncate_prompt_tokens": 400}, {"prompt": LONG_TEXT, "suffix": "b"}],
)
def test_what_an_engine_cuts_or_completes_is_prefilled_elsewhere(
    in_world: InWorld, fields: dict[str, Any]
) -> None:
    async def body(world: World) -> None:
        response, _ = await world.post("/v1/completions", fields)
        assert route_of(response)["route"] == "offload"
        assert len(world.decode.rendered()) >= 1
        assert world.decode.loaded == [fields.get("truncate_prompt_tokens", 600) - 1]

    in_world(body)


@pytest.mark.parametrize(
    ("path", "fields", "reason", "tokens"),
    [
        ("/v1/completions", {}, "malformed", 0),
        ("/v1/completions", {"prompt": "a", "n": 0}, "malformed", 0),
        ("/v1/chat/completions", CHAT | {"temperature": 5, "documents": [{}]}, "refused", 0),
        ("/v1/completions", {"prompt": "a" * 4000}, "length", 0),
        # 256 numbers of 16 bits for each token.
        ("/v1/completions", {"prompt_embeds": "a" * (100 * 2 * 256 * 4 // 3)}, "embeds", 99),
        ("/tokenize", {"prompt": "a"}, "forwarded", 0),
    ],
)
def test_what_has_no_tokens_for_anybody(
    in_world: InWorld, path: str, fields: dict[str, Any], reason: str, tokens: int
) -> None:
    """With what an engine does not render, the list of the reasons is complete."""

    async def body(world: World) -> None:
        await world.post(path, fields)
        direct = 'prfaas_gateway_direct_total{reason="%s"}'
        assert await world.metric(direct % reason) == 1
        assert world.plane.own_prefills == [tokens]
        assert reason in UNSEEN_REASONS

    in_world(body)


@pytest.mark.parametrize(
    ("path", "fields", "found"),
    [
        ("/v1/completions", {"prompt": [5] * 4001}, "4001 input tokens, which exceeds"),
        ("/v1/completions", {"prompt": [[5], [5] * 4001]}, "4001 input tokens, which exceeds"),
        ("/v1/completions", {"prompt": "a" * 4001}, "4001 input tokens, which exceeds"),
        ("/v1/completions", {"prompt": "a" * 40_000}, "at least 32000 input tokens"),
        ("/v1/completions", {"prompt": "a" * 4_000_000}, "4000000 characters"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 4_000_000}]}, "characters"),
        ("/tokenize", {"prompt": "a" * 4_000_000}, "4000000 characters"),
    ],
)
def test_what_no_engine_would_take_reaches_none(
    in_world: InWorld, path: str, fields: dict[str, Any], found: str
) -> None:
    async def body(world: World) -> None:
        await introduced(world.decode)
        async with world.client.post(path, json=fields) as response:
            said = (await response.json())["error"]
        assert response.status == said["code"] == 400 and found in said["message"]
        assert said["message"].startswith("This model's maximum context length is 4000 tokens. However, your")
        assert not any(engine.generated() for engine in world.engines)
        assert await world.metric('prfaas_gateway_refused_total{reason="length"}') == 1
        assert not any("a" * 100 in json.dumps(seen.body) for engine in world.engines for seen in engine.seen)

    in_world(body)
