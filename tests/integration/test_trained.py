"""What random weights can't show: a prompt's first lines decide the answer, by whatever way its KVCache came.

Both kinds of cache, dense (SmolLM2) and mostly windows of 512 tokens (Gemma 3).
"""

import json
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from prfaas.core.kv.hf_config import model_from_directory

from .stack import LOGITS, MODEL, PATIENCE_S, DemoAnswer, call, completion_body, wait_until
from .test_pool import cached_tokens
from .trained import (
    ANSWER_TOKENS,
    AUTHORS,
    FAR,
    GEMMA3,
    HOMES,
    PROMPT_TOKENS,
    SMOLLM2,
    Author,
    TrainedStack,
    write_trained,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow("prompts of thousands of tokens, by a model of real size"),
    pytest.mark.timeout(1800),
]

EACH = pytest.mark.parametrize(
    "trained",
    [
        pytest.param(
            SMOLLM2,
            marks=pytest.mark.extended("by each way `make test` has the logits of tiny models compared"),
        ),
        pytest.param(GEMMA3, marks=pytest.mark.gemma),
    ],
    indirect=True,
)

STREAM_TOKENS = 160
# Of a stream, before its decode engine is killed: between lines, where text has one cut into tokens.
STREAM_EVENTS = 14
# Of a prompt's KVCache, before its prefill engine is killed.
KILLED_SHARE = 0.4


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TrainedStack]:
    # The folder's name is the deployment's, and part of the path of a pool's socket, which must be short.
    directory = tmp_path_factory.mktemp("trained")
    with TrainedStack(write_trained(directory, request.param)) as stack:
        yield stack


def check_told(trained: TrainedStack, author: Author, answer: DemoAnswer) -> DemoAnswer:
    """The answer tells this author, and is a plain engine's, which is returned."""
    assert answer.status == 200, answer.body
    assert author.is_told(answer.body["choices"][0]["text"]), answer.body["choices"][0]["text"]
    return trained.check_forced(author.prompt(trained.tokenizer), answer.token_ids)


@pytest.mark.shows(model="{trained}")
@EACH
def test_first_lines_are_answered_alike_after_offloading(trained: TrainedStack) -> None:
    trained.revive(FAR, *HOMES)
    kv_model = model_from_directory(trained.deployment.model.path, name=MODEL)
    for author in AUTHORS[:2]:
        ids = author.prompt(trained.tokenizer)
        answer = trained.complete(ids, ANSWER_TOKENS, **LOGITS)
        assert answer.route["route"] == "offload" and "fallback" not in answer.route, answer.route
        assert int(answer.route["bytes"]) >= kv_model.bytes_to_move(PROMPT_TOKENS - 1)
        # The split was the same, so logits are.
        trained.check_answer(answer, check_told(trained, author, answer))


def streamed_and_killed(trained: TrainedStack, ids: list[int]) -> tuple[str, str]:
    """A stream whose decode engine is killed: the engine, and the whole text."""
    body = completion_body(ids, STREAM_TOKENS, stream=True)
    del body["return_token_ids"]
    request = urllib.request.Request(
        trained.url("gateway", "/v1/completions"),
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    texts: list[str] = []
    with urllib.request.urlopen(request, timeout=300) as stream:
        route = DemoAnswer(200, dict(stream.headers), None).route
        for line in stream:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            texts.append(event["choices"][0]["text"])
            if len(texts) == STREAM_EVENTS:
                trained.engines.kill(route["decode"])
    return route["decode"], "".join(texts)


@pytest.mark.shows(model="{trained}", what="a decode engine that dies")
@EACH
def test_a_stream_goes_on_elsewhere_as_a_plain_engine_would(trained: TrainedStack) -> None:
    trained.revive(FAR, *HOMES)
    author = AUTHORS[0]
    ids = author.prompt(trained.tokenizer)
    continued = trained.metric("gateway", "prfaas_gateway_continuations_total", 'outcome="continued"')
    killed, text = streamed_and_killed(trained, ids)
    assert (
        trained.metric("gateway", "prfaas_gateway_continuations_total", 'outcome="continued"')
        == continued + 1
    )
    assert author.is_told(text), text
    # An answer may end inside of what its text is cut into.
    token_ids = trained.tokenizer.encode(text, add_special_tokens=False).ids[:-1]
    (alive,) = (name for name in HOMES if name != killed)
    trained.check_forced(ids, token_ids, engine=alive)


@pytest.mark.shows(model="{trained}", pool=True)
@EACH
def test_first_lines_are_answered_alike_from_the_pool(trained: TrainedStack) -> None:
    trained.revive(FAR, *HOMES)
    for author in AUTHORS[:2]:
        trained.complete(author.prompt(trained.tokenizer), ANSWER_TOKENS)
    trained.settle()
    trained.engines.kill(HOMES[1])
    trained.revive(*HOMES)
    for author in AUTHORS[:2]:
        ids = author.prompt(trained.tokenizer)
        body = completion_body(ids, ANSWER_TOKENS, **LOGITS)
        answer = call(trained.url(HOMES[1], "/v1/completions"), body)
        assert cached_tokens(answer) > PROMPT_TOKENS / 2
        check_told(trained, author, answer)


@pytest.mark.shows(model="{trained}", what="a prefill engine that dies")
@EACH
def test_first_lines_are_answered_alike_after_a_prefill_engine_dies(trained: TrainedStack) -> None:
    trained.revive(FAR, *HOMES)
    author = AUTHORS[2]
    ids = author.prompt(trained.tokenizer)
    kv_model = model_from_directory(trained.deployment.model.path, name=MODEL)
    share_bytes = KILLED_SHARE * kv_model.bytes_to_move(PROMPT_TOKENS - 1)
    received = {name: trained.kv_stats(name)["received_bytes"] for name in HOMES}
    answers: list[DemoAnswer] = []
    client = threading.Thread(target=lambda: answers.append(trained.complete(ids, ANSWER_TOKENS, **LOGITS)))
    client.start()
    wait_until(
        lambda: any(
            trained.kv_stats(name)["received_bytes"] > received[name] + share_bytes for name in HOMES
        ),
        PATIENCE_S,
        "part of the KVCache has come",
    )
    trained.engines.kill(FAR)
    client.join(PATIENCE_S)
    assert not client.is_alive()
    (answer,) = answers
    assert answer.route["route"] == "local" and "fallback" in answer.route, answer.route
    check_told(trained, author, answer)
