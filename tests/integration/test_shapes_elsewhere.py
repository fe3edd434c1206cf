"""Prompts in all shapes, of models of other families than the rest is tried with: known by the engine's own ids.

vLLM makes the ids of gpt-oss chats with the vocabulary o200k_base, which has to be fetched: they are tried where
`TIKTOKEN_ENCODINGS_BASE` is a folder with `o200k_base.tiktoken`, as openai-harmony reads it.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.serving.gateway.prompts.shapes import CHAT, COMPLETIONS, MESSAGES, RESPONSES

from prfaas.serving.engines.tiny import tiny_config

from .asked_shapes import SHAPES, check_ids
from .shimmed import with_shims
from .stack import Stack, running, write_deployment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.extended("two families are in the other tests of shapes"),
    pytest.mark.timeout(1800),
]

TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "pythonic")

VOCABULARY = os.environ.get("TIKTOKEN_ENCODINGS_BASE")


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


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("prfaas-harmony")
    model = {"path": str(harmony_model(directory / "model"))}
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "openai")
    path = written(directory, model, *tools, "--load-format", "seeded")
    yield from running(path, with_shims("with_seeded_weights"))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES])
def test_ids_are_those_of_mimo(mimo: Stack, path: str) -> None:
    assert check_ids(mimo, path) == sum(at == path for at, _ in SHAPES.values())


def test_ids_are_those_of_gpt_oss(gpt_oss: Stack) -> None:
    assert check_ids(gpt_oss, COMPLETIONS) == sum(at == COMPLETIONS for at, _ in SHAPES.values())


@pytest.mark.skipif(
    VOCABULARY is None, reason="TIKTOKEN_ENCODINGS_BASE names no folder with o200k_base.tiktoken"
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES])
def test_ids_are_those_of_gpt_oss_with_its_vocabulary(harmony: Stack, path: str) -> None:
    assert check_ids(harmony, path) == sum(at == path for at, _ in SHAPES.values())
