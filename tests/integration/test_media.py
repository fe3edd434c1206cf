"""Chats with images on two sites: prefilled at one, all but the last token loaded at the other."""

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from .shimmed import with_shims
from .stack import DemoAnswer, Stack, call, running, write_deployment
from .tiny_vl import CONTEXT_TOKENS, write_tiny_vl

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow("engines of its own"),
    pytest.mark.timeout(1800),
]

PREFILL, DECODE = "east-prefill-0", "home-decode-0"
PATH = "/v1/chat/completions"
# Of probabilities so close, rounding decides which is larger.
_TIE_NATS = 0.25


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("prfaas-media")
    write_tiny_vl(directory / "model")
    path = write_deployment(directory, bandwidth="1 Gbit/s", max_model_len=CONTEXT_TOKENS)
    document: dict[str, Any] = json.loads(path.read_text())
    document["routing"] = {"policy": "offload_all"}
    document["model"] |= {"path": str(directory / "model")}
    del document["model"]["tiny"]
    document["engine"]["extra_args"] += ["--load-format", "seeded", "--limit-mm-per-prompt", '{"video":0}']
    document["clusters"][1]["instances"].pop(0)
    path.write_text(json.dumps(document))
    yield from running(path, with_shims("with_seeded_weights", "with_torchvision"))


def image(colour: tuple[int, int, int]) -> dict[str, Any]:
    """A hundred tokens of one colour, with a corner of another."""
    picture = Image.new("RGB", (320, 320), colour)
    picture.paste((255 - colour[0], 10, 200), (0, 0, 120, 60))
    raw = io.BytesIO()
    picture.save(raw, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(raw.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def asked(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    said = {"messages": messages, "max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 5}
    return said | {"return_token_ids": True, "ignore_eos": True} | fields


def check_equal(ours: DemoAnswer, plain: DemoAnswer) -> None:
    assert ours.status == plain.status == 200, (ours.body, plain.body)
    assert ours.body["prompt_token_ids"] == plain.body["prompt_token_ids"]
    pairs = zip(*(each.body["choices"][0]["logprobs"]["content"] for each in (ours, plain)), strict=True)
    for one, other in pairs:
        if one["token"] != other["token"]:
            tops = {top["token"]: top["logprob"] for top in other["top_logprobs"]}
            assert other["logprob"] - tops[one["token"]] <= _TIE_NATS
            return


def loaded(stack: Stack) -> float:
    source = 'source="external_kv_transfer"'
    return stack.metric(DECODE, "vllm:prompt_tokens_by_source_total", source)


@pytest.mark.shows(model="qwen3-vl", what="images")
def test_a_conversation_about_two_images(stack: Stack) -> None:
    messages: list[dict[str, Any]] = []
    sides = [image((200, 30, 30)), image((20, 90, 160))]
    kv = stack.deployment.model.kv_model()
    for turn in range(3):
        text = {"type": "text", "text": f"Turn {turn}: what differs between what you see? " * 6}
        messages.append({"role": "user", "content": [text, *sides[turn : turn + 1]]})
        before, hits = loaded(stack), stack.metric(DECODE, "vllm:prefix_cache_hits_total")
        answer = call(stack.url("gateway", PATH), asked(messages))
        assert answer.status == 200, answer.body
        tokens = len(answer.body["prompt_token_ids"])
        explained = stack.record(answer)
        assert answer.route["route"] == "offload" and answer.route["prefill"] == PREFILL, explained
        assert "fallback" not in answer.route, explained
        held = stack.metric(DECODE, "vllm:prefix_cache_hits_total") - hits
        assert loaded(stack) - before == tokens - 1 - held
        assert int(answer.route["bytes"]) >= kv.bytes_to_move(tokens - 1, int(held), 1)
        plain = call(stack.url(DECODE, PATH), asked(messages, cache_salt=f"plain {turn}"))
        check_equal(answer, plain)
        messages.append({"role": "assistant", "content": answer.body["choices"][0]["message"]["content"]})
        stack.settle()
    assert stack.metric(DECODE, "vllm:prfaas_loads_completed_total") == 3
    assert stack.metric(DECODE, "vllm:prfaas_loads_failed_total") == 0
    stack.wait_clean()


def test_another_image_is_never_taken_for_the_first(stack: Stack) -> None:
    def about(shown: dict[str, Any]) -> list[dict[str, Any]]:
        # The image comes first, so that all behind it depends on it.
        return [{"role": "user", "content": [shown, {"type": "text", "text": "describe it " * 40}]}]

    first, other = about(image((5, 200, 5))), about(image((5, 200, 6)))
    answers = []
    for messages in (first, other, first):
        answer = call(stack.url("gateway", PATH), asked(messages))
        assert answer.status == 200 and "fallback" not in answer.route, stack.explain(answer)
        check_equal(answer, call(stack.url(DECODE, PATH), asked(messages, cache_salt="plain other")))
        answers.append(answer)
        stack.settle()
    assert answers[0].body["prompt_token_ids"] == answers[1].body["prompt_token_ids"]
    uncached = [int(answer.route["uncached"]) for answer in answers]
    # What stands before the image is all that the second one shares.
    assert uncached[1] > uncached[0] - 32 and uncached[2] < uncached[0] / 2


def test_no_url_is_fetched(stack: Stack) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}
    answer = call(stack.url("gateway", PATH), asked([{"role": "user", "content": [part]}]))
    assert answer.status == 400 and "data: URLs" in answer.body["error"]["message"]
    # Nor by an engine that is asked past the gateway.
    for name in (PREFILL, DECODE):
        direct = call(stack.url(name, PATH), asked([{"role": "user", "content": [part]}]))
        assert direct.status >= 400 and "allowed domains" in direct.body["error"]["message"], direct.body
