"""Prompts in all shapes, of models of other families than the rest is tried with: known by the engine's own ids.

vLLM makes the ids of gpt-oss chats with the vocabulary o200k_base, which has to be fetched: they are tried where
`TIKTOKEN_ENCODINGS_BASE` is a folder with `o200k_base.tiktoken`, as openai-harmony reads it.
"""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from tests.ports import free_ports
from tests.serving.gateway.prompts.shapes import CHAT, COMPLETIONS, MESSAGES, RESPONSES

from prfaas.serving.engines.tiny import tiny_config

from .asked_shapes import SHAPES, check_ids
from .shimmed import with_shims
from .stack import MODEL, Stack, call, running, write_deployment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.extended("two families are in the other tests of shapes"),
    pytest.mark.timeout(1800),
]

TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "pythonic")

LONG_TOKENS = 1500
VOCABULARY = os.environ.get("TIKTOKEN_ENCODINGS_BASE")
NEEDS_VOCABULARY = pytest.mark.skipif(
    VOCABULARY is None, reason="TIKTOKEN_ENCODINGS_BASE names no folder with o200k_base.tiktoken"
)


def written(directory: Path, model: dict[str, str], *args: str) -> Path:
    """A deployment file in which all prompts are prefilled elsewhere."""
    path = write_deployment(directory, bandwidth="100 Mbit/s", extra_args=args, max_model_len=8192)
    document = json.loads(path.read_text())
    del document["model"]["tiny"]
    document["model"] |= model
    document["routing"] = {"policy": "offload_all"}
    document["clusters"][1]["instances"].pop(0)
    path.write_text(json.dumps(document))
    return path


def harmony_model(folder: Path) -> Path:
    """A tiny gpt-oss with the vocabulary of the real one."""
    from tiktoken.load import load_tiktoken_bpe
    from tiktoken_ext import openai_public
    from transformers.convert_slow_tokenizer import TikTokenConverter

    assert VOCABULARY is not None
    file = Path(VOCABULARY) / "o200k_base.tiktoken"
    with pytest.MonkeyPatch.context() as patch:
        # Not from the address that tiktoken has for it.
        patch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: load_tiktoken_bpe(str(file)))
        harmony = openai_public.o200k_harmony()
    names = {number: name for name, number in sorted(harmony["special_tokens"].items(), reverse=True)}
    special = [names[number] for number in sorted(names)]
    made = TikTokenConverter(
        vocab_file=str(file), pattern=harmony["pat_str"], extra_special_tokens=special
    ).converted()
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    ends = {"bos_token_id": 199998, "eos_token_id": 200002, "pad_token_id": 199999}
    config = {**tiny_config("gpt-oss"), **ends, "vocab_size": max(names) + 1}
    (folder / "config.json").write_text(json.dumps(config))
    told = {"tokenizer_class": "PreTrainedTokenizerFast"} | {
        name.replace("_id", ""): names[number] for name, number in ends.items()
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    yield from running(written(tmp_path_factory.mktemp("prfaas-mimo"), {"tiny": "mimo-v2-flash"}, *TOOLS))


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    yield from running(written(tmp_path_factory.mktemp("prfaas-gpt-oss"), {"tiny": "gpt-oss"}))


def harmony_file(directory: Path) -> Path:
    model = {"path": str(harmony_model(directory / "model"))}
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "openai")
    return written(directory, model, *tools, "--load-format", "seeded")


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    path = harmony_file(tmp_path_factory.mktemp("prfaas-harmony"))
    yield from running(path, with_shims("with_seeded_weights"))


@pytest.fixture
def two_decoders(tmp_path: Path) -> Iterator[Stack]:
    """Both of home prefill and decode; only long prompts are prefilled elsewhere."""
    path = harmony_file(tmp_path)
    document = json.loads(path.read_text())
    document["routing"] = {"policy": "static_threshold", "threshold_tokens": LONG_TOKENS}
    instances = document["clusters"][1]["instances"]
    http_port, kv_port = free_ports(2)
    instances[0]["roles"] = ["prefill", "decode"]
    instances.append({**instances[0], "name": "home-decode-1", "http_port": http_port, "kv_port": kv_port})
    path.write_text(json.dumps(document))
    yield from running(path, with_shims("with_seeded_weights"))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES])
def test_ids_are_those_of_mimo(mimo: Stack, path: str) -> None:
    assert check_ids(mimo, path) == sum(at == path for at, _ in SHAPES.values())


def test_ids_are_those_of_gpt_oss(gpt_oss: Stack) -> None:
    assert check_ids(gpt_oss, COMPLETIONS) == sum(at == COMPLETIONS for at, _ in SHAPES.values())


@NEEDS_VOCABULARY
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES])
def test_ids_are_those_of_gpt_oss_with_its_vocabulary(harmony: Stack, path: str) -> None:
    assert check_ids(harmony, path) == sum(at == path for at, _ in SHAPES.values())


@NEEDS_VOCABULARY
def test_turns_of_gpt_oss_find_what_was_said_before(two_decoders: Stack) -> None:
    """Eight conversations of five turns, four requests at a time."""
    rng = Random(1)
    said: list[list[dict[str, str]]] = [
        [{"role": "system", "content": text_of(rng, 40, f"You are {n}.")}] for n in range(8)
    ]
    before, hits, earlier = [0] * 8, 0, 0

    def ask(messages: list[dict[str, str]]) -> tuple[int, dict[str, str]]:
        body = {"model": MODEL, "messages": messages, "max_tokens": 8}
        answer = call(two_decoders.url("gateway", CHAT), body)
        return answer.body["usage"]["prompt_tokens"], answer.route

    for turn in range(5):
        for messages in said:
            messages.append({"role": "user", "content": text_of(rng, rng.choice((150, 300, 300, 2200)))})
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(ask, said))
        for n, (tokens, route) in enumerate(answers):
            uncached = int(route["uncached"])
            assert route["route"] == ("offload" if uncached > LONG_TOKENS else "local"), route
            hits += (tokens - uncached) if turn else 0
            earlier += before[n]
            before[n] = tokens
            said[n].append({"role": "assistant", "content": text_of(rng, 40)})
    names = [each.name for each in two_decoders.deployment.instances]
    found = sum(two_decoders.metric(name, "vllm:prefix_cache_hits_total") for name in names)
    assert hits / earlier >= 0.92 and found >= hits, (hits, earlier, found)
    two_decoders.wait_clean()


def text_of(rng: Random, words: int, begin: str = "") -> str:
    return " ".join(
        [begin, *(rng.choice(("red", "castle", "seven", "under", "table", "stone")) for _ in range(words))]
    )
