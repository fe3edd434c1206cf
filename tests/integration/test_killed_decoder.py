"""Real decode engines tell token ids of streams, which clients never see; one that dies is gone on from by another."""

import itertools
import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from .asked_shapes import check_ids
from .shimmed import with_shims
from .stack import MODEL, PATIENCE_S, Stack, call, prompt, running, wait_until, write_deployment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow("engines die while they decode, and are started anew"),
    pytest.mark.extended("its parts run against stand-ins in `make test`"),
    pytest.mark.timeout(1800),
]

CONTINUATIONS = "prfaas_gateway_continuations_total"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "pick", "parameters": {"type": "object"}}}
SAID = {"messages": [{"role": "user", "content": "Say naïve things about 数字, at length."}]}
# Bytes by chance: half characters, and nothing that ends an answer.
LONG = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
USAGE = {"stream_options": {"include_usage": True}}
# Its parser calls all of an answer reasoning that never ends it.
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (COMPLETIONS, {"prompt": prompt(7, 60), **LONG, **USAGE}),
    "logprobs": (COMPLETIONS, {"prompt": prompt(8, 60), **LONG, "logprobs": 2}),
    "reasoning": (CHAT, {**SAID, **LONG, **USAGE, "metadata": {"a": "b"}, "user": "me"}),
    "tools": (CHAT, {**SAID, **LONG, "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}}),
}
# What the model is made to answer: two calls, with something before each.
CALL = '<tool_call>\n{"name": "pick", "arguments": %s}\n</tool_call>'
ARGUMENTS = [
    json.dumps({"note": "naïve 数字, " * 60}, ensure_ascii=False),
    json.dumps({"second": [1, {"2": "{}"}], "rest": "x, " * 200}),
]
SCRIPT = f"Well, let me see.\n{CALL % ARGUMENTS[0]}\n{CALL % ARGUMENTS[1]}"
SCRIPTED = {
    "messages": [{"role": "user", "content": f"Say \x02{SCRIPT}\x03"}],
    "tools": [TOOL],
    "chat_template_kwargs": {"enable_thinking": False},
    "temperature": 0,
    **USAGE,
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two engines that decode, with parsers of reasoning and tool calls."""
    parsers = ["--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    parsers += ["--logits-processors", "scripted:Scripted"]
    path = write_deployment(
        tmp_path_factory.mktemp("prfaas-test-decoder"),
        bandwidth="100 Mbit/s",
        extra_args=parsers,
        max_model_len=8192,
    )
    document = json.loads(path.read_text())
    document["model"]["tiny"] = "qwen3"
    document["clusters"][1]["instances"][0]["roles"] = ["decode"]
    path.write_text(json.dumps(document))
    yield from running(path, with_shims("shims"))


def opened(stack: Stack, name: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        stack.url(name, path),
        headers={"Content-Type": "application/json"},
        data=json.dumps({"model": MODEL, "stream": True, **body}).encode(),
    )
    return urllib.request.urlopen(request, timeout=PATIENCE_S)


def raw_stream(stack: Stack, name: str, path: str, body: dict[str, Any]) -> bytes:
    with opened(stack, name, path, body) as answer:
        raw: bytes = answer.read()
    return raw


def forms(raw: bytes) -> list[bytes]:
    """A stream's events without their texts, those that are alike once: on a busy machine vLLM joins some.

    Without what is each request's own, too.
    """
    bare = re.sub(rb'"id":"[^"]*"|"created":\d+', b"", raw)
    bare = re.sub(rb'"(content|reasoning|text)":"(\\.|[^"\\])+"', b"", bare)
    return [form for form, _ in itertools.groupby(bare.split(b"\n\n"))]


def read(raw: bytes) -> tuple[str, list[Any]]:
    """The joined text, and all events."""
    parts = [part.removeprefix(b"data: ") for part in raw.split(b"\n\n") if part]
    assert parts.pop() == b"[DONE]", raw[-500:]
    events = [json.loads(part) for part in parts]
    text = ""
    for event in events:
        for choice in event["choices"]:
            delta = choice.get("delta", choice)
            text += delta.get("content") or delta.get("reasoning") or delta.get("text") or ""
    return text, events


def restart(stack: Stack, name: str) -> None:
    stack.engines.start(name)
    stack.engines.wait_ready()
    health = stack.url("gateway", "/health")
    wait_until(lambda: call(health).body["instances"][name] == "up", PATIENCE_S, f"{name} is back")


@pytest.mark.parametrize("name", BODIES)
def test_a_client_gets_the_bytes_that_the_engine_sends_without_ids(stack: Stack, name: str) -> None:
    path, body = BODIES[name]
    plain, passed = raw_stream(stack, "home-decode-0", path, body), raw_stream(stack, "gateway", path, body)
    assert read(passed)[0] == read(plain)[0]
    if "logprobs" not in body:
        assert forms(passed) == forms(plain)
    asked = raw_stream(stack, "gateway", path, body | {"return_token_ids": True})
    assert b'"token_ids":[' in asked and b'"prompt_token_ids":[' in asked


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/responses", "/v1/messages"])
def test_prompts_of_all_shapes_are_known_by_the_engines_ids(stack: Stack, path: str) -> None:
    """With parsers, which adjust requests."""
    check_ids(stack, path)


@pytest.mark.shows(model="qwen3", what="a decode engine that dies")
@pytest.mark.parametrize(
    ("name", "after"), [("reasoning", 25), ("text", 12), ("tools", 40), ("logprobs", 31)]
)
def test_a_stream_survives_its_engine(stack: Stack, name: str, after: int) -> None:
    path, body = BODIES[name]
    # So long that its engine is still at it when it is killed.
    body = body | {"max_tokens": 1500}
    if name == "text":
        body |= {"stop": ["never to be found"]}
    whole, events = read(raw_stream(stack, "gateway", path, body))
    continued = stack.metric("gateway", CONTINUATIONS, 'outcome="continued"')
    raw = b""
    with opened(stack, "gateway", path, body) as answer:
        route = answer.headers["x-prfaas-route"]
        engine = re.search(r"decode=([^;]+)", route)
        assert engine is not None
        while raw.count(b"\n\n") < after:
            raw += answer.read1()
        before, _ = read(raw[: raw.rindex(b"\n\n")] + b"\n\ndata: [DONE]")
        stack.engines.kill(engine[1])
        raw += answer.read()
    restart(stack, engine[1])
    text, told = read(raw)
    # The rest may part from the unbroken answer by rounding, and then it is another text.
    same = next((at for at, (a, b) in enumerate(zip(text, whole, strict=False)) if a != b), len(whole))
    print(f"{name}: of {len(whole)} characters {len(before)} came before, the first {same} are equal")
    assert same >= len(before)
    assert len({event["id"] for event in told}) == 1
    roles = [c["delta"]["role"] for e in told for c in e["choices"] if "role" in c.get("delta", {})]
    assert roles == (["assistant"] if path == CHAT else [])
    assert [c["finish_reason"] for e in told for c in e["choices"] if c["finish_reason"]] == ["length"]
    if "stream_options" in body:
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [told[-1]["usage"][name] for name in counts] == [events[-1]["usage"][name] for name in counts]
    assert stack.metric("gateway", CONTINUATIONS, 'outcome="continued"') == continued + 1


def called(events: list[Any]) -> dict[int, tuple[str, str]]:
    """Names and arguments of the calls, each of which has one id."""
    names, arguments, ids = dict[int, str](), dict[int, str](), list[str]()
    for event in events:
        for choice in event["choices"]:
            for one in choice["delta"].get("tool_calls") or ():
                if one.get("id"):
                    ids.append(one["id"])
                    names[one["index"]] = one["function"]["name"]
                told = one["function"].get("arguments") or ""
                arguments[one["index"]] = arguments.get(one["index"], "") + told
    assert len(ids) == len(set(ids)) == len(names)
    return {index: (name, arguments[index]) for index, name in names.items()}


@pytest.mark.shows(model="qwen3", what="a decode engine that dies")
@pytest.mark.parametrize("part", ["of the first call", "of the second call"])
def test_a_tool_call_survives_its_engine(stack: Stack, part: str) -> None:
    whole, events = read(raw_stream(stack, "gateway", CHAT, SCRIPTED))
    assert called(events) == {index: ("pick", told) for index, told in enumerate(ARGUMENTS)}
    continued = stack.metric("gateway", CONTINUATIONS, 'outcome="continued"')
    # What the first engine has sent when it dies ends within this.
    beginning = "数".encode() if part == "of the first call" else b'"index":1'
    raw = b""
    with opened(stack, "gateway", CHAT, SCRIPTED) as answer:
        engine = re.search(r"decode=([^;]+)", answer.headers["x-prfaas-route"])
        assert engine is not None
        while beginning not in raw:
            raw += answer.read1()
        stack.engines.kill(engine[1])
        raw += answer.read()
    restart(stack, engine[1])
    text, told = read(raw)
    assert (text, called(told)) == (whole, called(events))
    assert len({event["id"] for event in told}) == 1
    assert [c["finish_reason"] for e in told for c in e["choices"] if c["finish_reason"]] == ["tool_calls"]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [told[-1]["usage"][name] for name in counts] == [events[-1]["usage"][name] for name in counts]
    assert stack.metric("gateway", CONTINUATIONS, 'outcome="continued"') == continued + 1
