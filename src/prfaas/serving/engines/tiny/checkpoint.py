"""A tiny checkpoint on disk, made once, and anew when its recipe changes.

It has weights, configuration and a byte-level tokenizer, in the files that Hugging Face loaders read.
"""

import hashlib
import json
from pathlib import Path

from prfaas.serving.engines.made_folder import made_folder
from prfaas.serving.engines.tiny.configs import (
    CHAT_TEMPLATE,
    END_ID,
    SPECIAL_TOKENS,
    TURN_END_ID,
    tiny_config,
)


def byte_symbols() -> list[str]:
    """The printable character by which byte-level tokenizers write each byte, at the index of the byte.

    Bytes that are printable in Latin-1 stand for themselves; the other ones, in order, get the code points from 256 on
    (the convention of GPT-2's vocabulary, which `tokenizers`' ByteLevel pre-tokenizer and decoder apply).
    """
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, next_code_point = [], 256
    for byte in range(256):
        if byte in own:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(next_code_point))
            next_code_point += 1
    return symbols


def write_tokenizer(directory: Path, max_tokens: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json (with the chat template) into `directory`.

    One UTF-8 byte is one token, so the number of tokens of a text can be read off it. No text adds special tokens by
    itself. `max_tokens` is the model's context length, in tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(byte_symbols())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    write_tokenizer_config(directory, max_tokens)


def write_tokenizer_config(directory: Path, max_tokens: int) -> None:
    """Writes tokenizer_config.json: special tokens, chat template, and `max_tokens`, the model's context length."""
    pad, begin, end, turn_start, turn_end = SPECIAL_TOKENS
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "bos_token": begin,
        "eos_token": end,
        "additional_special_tokens": [turn_start, turn_end],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_tokens,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


_RECIPE_FILES = ("configs.py", "weights.py", "checkpoint.py")


def tiny_model(name: str, directory: Path) -> Path:
    """The checkpoint directory `directory/name`, made first if it is not there or its recipe has changed.

    `directory` holds one folder per model; this one's has config.json, generation_config.json, model.safetensors,
    tokenizer.json and tokenizer_config.json. Processes that ask at the same time wait for each other.

    Raises:
        ValueError: there is no tiny model of this name.
        OSError: the directory can't be written.
    """
    config = tiny_config(name)
    return made_folder(
        directory / name, _recipe_digest(name), lambda draft: _write_checkpoint(draft, name, config)
    )


def _write_checkpoint(directory: Path, name: str, config: dict[str, object]) -> None:
    from safetensors.torch import save_file

    from prfaas.serving.engines.tiny.weights import tiny_weights

    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation = {"eos_token_id": [END_ID, TURN_END_ID]}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    max_tokens = config["max_position_embeddings"]
    assert isinstance(max_tokens, int)
    write_tokenizer(directory, max_tokens)
    save_file(tiny_weights(name, config), directory / "model.safetensors", metadata={"format": "pt"})


def _recipe_digest(name: str) -> str:
    """Identifies how a checkpoint of `name` would be made now: a digest of the code that makes it."""
    digest = hashlib.blake2b(name.encode(), digest_size=16)
    for file in _RECIPE_FILES:
        digest.update(Path(__file__).with_name(file).read_bytes())
    return digest.hexdigest()
