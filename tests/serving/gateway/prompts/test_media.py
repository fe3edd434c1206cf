"""Chats with images: routed by their tokens and digests, rendered by both engines, and fetched from nowhere."""

from collections.abc import Callable
from typing import Any

import pytest

from prfaas.serving.gateway.bodies import ApiError
from prfaas.serving.gateway.prompts.prompt import Endpoint, check_media, media_parts

from ..fixed_plane import BLOCK_TOKENS
from ..stand_in import answer_text
from ..world import World, route_of

InWorld = Callable[..., None]
PATH = "/v1/chat/completions"
CAT, DOG = "data:image/png;base64,Y2F0", "data:image/png;base64,ZG9n"


def chat(*urls: str, **fields: Any) -> dict[str, Any]:
    text = {"type": "text", "text": "what is this? " * 20}
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": [text, *images]}], **fields}


def test_both_engines_render_it_and_all_but_the_last_token_is_loaded(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        asked = chat(CAT, DOG, max_tokens=5, tools=[{"type": "function", "function": {"name": "f"}}])
        ids = world.decode._ids(asked)
        response, answer = await world.post(PATH, asked)
        assert response.status == 200 and answer["choices"][0]["text"] == answer_text(ids, 5)
        assert route_of(response)["route"] == "offload" and world.decode.loaded == [len(ids) - 1]
        (prefill,) = world.remote.generated()
        assert prefill.path == PATH and prefill.body["max_tokens"] == 1
        assert prefill.body["messages"] == asked["messages"] and prefill.body["tools"] == asked["tools"]
        decoded = world.decode.generated()[-1]
        assert decoded.body["messages"] == asked["messages"]
        # An engine would not look at ids between which images stand.
        assert decoded.body["kv_transfer_params"].keys() == {"prfaas"}
        (rendered,) = [each for each in world.decode.rendered() if each.body.get("tools")]
        assert rendered.body == asked | {"mm_payload": "none"}

    in_world(body, dense=True)


def test_another_image_is_another_prefix(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        for image in (CAT, DOG, CAT):
            await world.post(PATH, chat(image))
        whole = len(world.decode._ids(chat(CAT))) - 1
        # What the decode engine holds of the first one is not sent again.
        assert world.decode.loaded == [whole, whole, whole - BLOCK_TOKENS]

    in_world(body, dense=True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_hybrid_models_media_stay_whole(in_world: InWorld, stream: bool) -> None:
    async def body(world: World) -> None:
        asked = chat(CAT, stream=stream)
        async with world.client.post(PATH, json=asked) as response:
            assert response.status == 200
            await response.read()
        route = route_of(response)
        assert (route["route"], route["reason"]) == ("local", "media")
        assert int(route["uncached"]) == len(world.decode._ids(asked))

    in_world(body)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://internal/x.png"}},
        {"type": "image_url", "image_url": "HTTPS://internal"},
        {"type": "text", "text": "x", "image_url": {"url": " http://internal"}},
        {"image_url": "http://allowed.example@internal/"},
        {"type": "video_url", "video_url": {"url": "file:///etc/passwd"}},
        {"type": "audio_url", "audio_url": {"url": "http:\\\\internal"}},
        {"type": "image", "source": {"type": "url", "url": "http://internal"}},
        {"type": "tool_result", "content": [{"type": "image", "source": {"url": "ftp://internal"}}]},
        {"type": "input_image", "image_url": "http://allowed.example.internal/"},
    ],
)
@pytest.mark.parametrize(
    ("endpoint", "field"),
    [(Endpoint.CHAT, "messages"), (Endpoint.MESSAGES, "messages"), (Endpoint.RESPONSES, "input")],
)
def test_nothing_is_fetched_from_elsewhere(endpoint: Endpoint, field: str, part: dict[str, Any]) -> None:
    body = {field: [{"role": "user", "content": [{"type": "text", "text": "http://x"}, part]}]}
    for domains in ((), ("allowed.example",)):
        with pytest.raises(ApiError, match="data: URLs") as refused:
            check_media(list(media_parts(endpoint, body)), domains)
        assert refused.value.status == 400
    assert list(media_parts(endpoint, body))


def test_media_from_allowed_domains_and_of_the_client_itself() -> None:
    for url in (CAT, "https://Allowed.example/x.png?y=http://z", "http://allowed.example:8080/x"):
        check_media(list(media_parts(Endpoint.CHAT, chat(url))), ("allowed.example",))
    text = {"messages": [{"role": "user", "content": [{"type": "text", "text": "see http://internal"}]}]}
    tool = {"type": "tool_use", "input": {"url": "http://internal"}}
    for body in (text, {"messages": [{"role": "assistant", "content": [tool]}]}, {"messages": 5}):
        assert not list(media_parts(Endpoint.CHAT, body))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": None, "uuid": "logo"},
        {"type": "image_url", "image_url": {"url": CAT}, "uuid": "logo"},
        {"type": "text", "text": "x", "image_url": CAT, "uuid": ""},
    ],
)
def test_nobody_names_what_others_have_sent(part: dict[str, Any]) -> None:
    """vLLM keeps media by `uuid`, whoever sent them: another tenant's image would be read, or put in place of one."""
    body = {"messages": [{"role": "user", "content": [part]}]}
    with pytest.raises(ApiError, match="leave `uuid` out") as refused:
        check_media(list(media_parts(Endpoint.CHAT, body)), ("allowed.example",))
    assert (refused.value.status, refused.value.param) == (400, "uuid")


def test_a_url_is_refused_in_the_form_of_the_api(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        response, answer = await world.post(PATH, chat("http://internal/x"))
        assert response.status == 400 and "data: URLs" in answer["error"]["message"]
        assert not world.decode.generated() and not any(s.body.get("mm_payload") for s in world.decode.seen)

    in_world(body)
